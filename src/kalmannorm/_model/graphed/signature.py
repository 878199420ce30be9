"""The signature of a call: everything outside of the model that a graph depends on.

These are the structure of the arguments, the layout of every tensor, all other arguments by value, and the modes of
torch: gradients, autocast, precision and determinism.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Arguments and results of these classes are compared by value."""


class Arguments(NamedTuple):
    """The arguments of a call. `leaves` are tensors and constants."""

    leaves: list[Any]
    structure: Any

    def form(self) -> Hashable:
        """The structure as a part of a key. In older versions of torch it cannot be hashed."""
        try:
            hash(self.structure)
        except TypeError:
            return repr(self.structure)
        form: Hashable = self.structure
        return form

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def replaced(self, tensors: list[Tensor]) -> Arguments:
        """The same arguments with other tensors."""
        others = iter(tensors)
        return Arguments([next(others) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves], self.structure)

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = pytree.tree_unflatten(self.leaves, self.structure)
        return args, kwargs


def arguments_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return Arguments(*pytree.tree_flatten((args, kwargs)))


def key_of(leaf: Any) -> Hashable:
    """What a graph depends on of one argument. None if no graph can serve it."""
    if type(leaf) in (Tensor, torch.nn.Parameter):
        if leaf.layout != torch.strided or leaf.is_inference() or not _dense(leaf):
            return None
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return (type(leaf), leaf) if type(leaf) in CONSTANTS else None


def _dense(tensor: Tensor) -> bool:
    """Whether its elements fill their memory, each once. Only then a copy can have its strides."""
    if tensor.is_contiguous() or (tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)):
        return True
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


class Autocast(NamedTuple):
    """The state of autocast on a device."""

    kind: str
    enabled: bool
    dtype: torch.dtype
    cached: bool

    @classmethod
    def of(cls, kind: str) -> Autocast:
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return cls(kind, enabled, dtype, torch.is_autocast_cache_enabled())

    def again(self) -> Any:
        """A context with this state. Threads of the backward do not have it."""
        return torch.autocast(self.kind, self.dtype, self.enabled, self.cached)


def modes(kind: str) -> Hashable:
    """The modes of torch that change results."""
    cudnn = torch.backends.cudnn
    return (
        torch.is_grad_enabled(),
        Autocast.of(kind),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        *_precision(),
    )


def _precision() -> tuple[Hashable, ...]:
    """How float32 is multiplied. Newer versions of torch have settings of their own for this, and warn of the older."""
    getter = getattr(torch._C, "_get_fp32_precision_getter", None)
    if getter is None:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    kinds = ("generic", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")
    return tuple(getter(*kind) for kind in kinds)
