"""References to modules that do not keep the modules alive. The model keeps them, and the relay is a part of the model.

So a deleted model is freed immediately. A prior reads tensors of modules. These tensors are kept alive, because a part
of a model may be used without the rest. Copies and pickles treat such a reference like any other.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm

_MISSING = object()


def _nothing() -> None:
    return None


def check_gathered(tensor: Any, name: str) -> None:
    """Raise if FSDP holds the tensor in parts now. FSDP2 then has a DTensor in its place, and FSDP1 an empty one."""
    if not isinstance(tensor, Tensor):
        return
    sharded = type(tensor).__module__.startswith("torch.distributed")
    if sharded or (tensor.dim() == 1 and tensor.numel() == 0):
        raise RuntimeError(
            f"kalmannorm: a prior reads {name!r} of a layer whose parameters are sharded and not gathered now; shard "
            "the model as one unit, as fully_shard(model) does, not block by block"
        )


def _of_removed(module: nn.Module, name: str) -> Any:
    """A tensor that the module had at conversion. After `prune.remove` the weight contains the mask."""
    plain, _, kind = name.rpartition("_")
    merged = module._parameters.get(plain)
    if merged is not None and kind in ("orig", "mask"):
        return merged if kind == "orig" else torch.ones_like(merged)
    raise RuntimeError(
        f"kalmannorm: a prior reads {name!r} of a {type(module).__name__} that has no {name!r} any more; call "
        "kalmannorm.rewire(model, example_input)"
    )


def _computed(module: nn.Module, name: str) -> Any:
    """A tensor that was a parameter or buffer at conversion, and is none any more.

    If a hook of torch computes it before each forward of the module, as pruning does, it is computed again here. The
    attribute is that of the module's last forward, which may be one of an earlier step. A computed filter is then that
    of the new weight.
    """
    if name == "filter" and "weight" not in module._parameters:
        return module.filter_of(_computed(module, "weight"))  # type: ignore[operator]
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, BasePruningMethod) and hook._tensor_name == name:
            return hook.apply_mask(module)  # type: ignore[no-untyped-call]
        if isinstance(hook, WeightNorm) and hook.name == name:
            return hook.compute_weight(module)
    found = getattr(module, name, _MISSING)
    return _of_removed(module, name) if found is _MISSING else found


class WeakModule:
    """A module that is kept alive elsewhere, and its tensors by name."""

    def __init__(self, module: nn.Module | None) -> None:
        self.reference: Callable[[], nn.Module | None] = _nothing if module is None else weakref.ref(module)
        self._tensors: tuple[dict[str, Any], ...] = ()
        self.hold()

    def hold(self) -> None:
        """Keep the tensors that the module has now, and later ones with the same names."""
        module = self.module()
        if module is not None:
            self._tensors = module._parameters, module._buffers

    def module(self) -> nn.Module | None:
        """The module, or None if it was deleted."""
        return self.reference()

    def never_was(self) -> bool:
        """Whether there was no module from the beginning."""
        return not self._tensors

    def tensor(self, name: str) -> Any:
        """An attribute of the module. If the module was deleted, only its parameters and buffers are available."""
        module = self.module()
        if module is not None:
            stored = name in module._parameters or name in module._buffers
            tensor = getattr(module, name) if stored else _computed(module, name)
            check_gathered(tensor, name)
            return tensor
        for held in self._tensors:
            if name in held:
                return held[name]
        raise RuntimeError(
            f"kalmannorm: a prior reads {name!r} of a layer that was deleted together with its model; keep that "
            "model, or convert this part by itself"
        )

    def parameter(self, name: str) -> Any:
        """A parameter or buffer stored in the module. None if there is none of that name, or if it is computed."""
        return next((held[name] for held in self._tensors if name in held), None)

    def identity(self) -> int:
        """A number for the module. It stays valid after the module is deleted."""
        return id(self._tensors[0]) if self._tensors else id(None)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeakModule:
        copied = WeakModule(None)
        copied.__setstate__(copy.deepcopy((self.module(), self._tensors), memo))
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return WeakModule, (None,), (self.module(), self._tensors)

    def __setstate__(self, state: tuple[nn.Module | None, tuple[dict[str, Any], ...]]) -> None:
        module, self._tensors = state
        self.reference = _nothing if module is None else weakref.ref(module)
