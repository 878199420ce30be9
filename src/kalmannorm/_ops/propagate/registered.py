"""Bundles as registered ops, for compiled models: `kalmannorm::bundle_rows` and its backward.

A compiled graph holds the number of a bundle, and `find` returns the bundle. The number is part of the graph, so a
graph that torch finds in its cache on disk has the numbers of the process that traced it now.

The ops that run return few large tensors: the rows of all norms, and gradients as the kernels write them. They are
divided in the graph, because compiled code creates a view in less time than Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kalmannorm._names import Names
from kalmannorm._ops.dispatch import on_device_of
from kalmannorm._ops.library import below_autograd, register, register_differentiable
from kalmannorm._ops.propagate import aten, native_bundle
from kalmannorm._ops.propagate.bundle import ROWS, Bundle
from kalmannorm._ops.propagate.rows import asked_of, differentiated, summed
from kalmannorm.moments.core import full_precision


class CompiledBundle:
    """A bundle with its number, the module that runs it (`aten` or `triton_bundle`), and what a backward needs."""

    def __init__(self, bundle: Bundle, run: ModuleType, dtype: torch.dtype, tensors: Sequence[Tensor]) -> None:
        # What `native_bundle` prepares depends on the layout of the weights. A compiled backward must not need it.
        run = aten if run is native_bundle else run
        self.bundle, self.run, self.dtype, self.device = bundle, run, dtype, tensors[0].device
        wanted = [True] * len(tensors)
        # One forward shows which tensors it saves for the backward. It also builds the kernels.
        with torch.no_grad(), full_precision(self.device), on_device_of(tensors[0]):
            made = run.forward(bundle, tensors, dtype, self.device, True, run.prepare(bundle, tensors, wanted))
        self.saved = [(tuple(tensor.shape), tensor.dtype) for tensor in made.saved]
        self.state = made.state if run is aten else None  # it depends on the tensors if kernels run
        self.last: tuple[Any, Any] | None = None
        self.number = _BUNDLES.add(self)

    @property
    def flat(self) -> bool:
        """Whether a backward returns three tensors that contain all gradients, not each gradient by itself."""
        return self.run is not aten

    def others(self) -> list[int]:
        """The sizes of the results that are not rows of norms."""
        return [result.numel() for result in self.bundle.results[len(self.bundle.norms) :]]

    def prepared(self, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> Any:
        """What `run` prepares for these tensors. It is kept while they stay where they are."""
        key = list(map(Tensor.data_ptr, tensors)), list(wanted)
        if self.last is None or self.last[0] != key:
            self.last = key, self.run.prepare(self.bundle, tensors, wanted)
        return self.last[1]


_BUNDLES: Names[CompiledBundle] = Names()
find = _BUNDLES.find


def _flat_forward(tensors: list[Tensor], groups: list[int], wanted: list[bool], number: str) -> list[Tensor]:
    """The rows of all norms (5, channels), means and variances of other results, and tensors for the backward."""
    known = find(number)
    gradients = True in wanted
    with full_precision(known.device), on_device_of(tensors[0]):
        prepared = known.prepared(tensors, wanted)
        made = known.run.forward(known.bundle, tensors, known.dtype, known.device, gradients, prepared)
        others = [pair[part] for part in range(2) for pair in made.others]
        return [made.rows, *([torch.cat(others, 1)] if others else ()), *(made.saved if gradients else ())]


def _fake_flat_forward(tensors: list[Tensor], groups: list[int], wanted: list[bool], number: str) -> list[Tensor]:
    known, like = find(number), tensors[0]
    rows = like.new_empty((ROWS, known.bundle.channels), dtype=known.dtype)
    others = like.new_empty((1, 2 * sum(known.others())), dtype=known.dtype)
    saved = [like.new_empty(shape, dtype=dtype) for shape, dtype in known.saved]
    return [rows, *([others] if known.others() else ()), *(saved if True in wanted else ())]


def _divided(flat: list[Tensor], groups: list[int], number: str) -> list[Tensor]:
    """The rows of the norms (5, G, C), means and variances of other results, and tensors for the backward."""
    known = find(number)
    sizes, channels, start, rows = known.others(), known.bundle.channels, 0, list[Tensor]()
    for width, size in zip(known.bundle.widths, groups, strict=True):
        rows.append(flat[0].as_strided((ROWS, size, width), (channels, 0, 1), start))
        start += width
    if not sizes:
        return [*rows, *flat[1:]]
    return [*rows, *flat[1].split_with_sizes([*sizes, *sizes], 1), *flat[2:]]


def _forward(tensors: list[Tensor], groups: list[int], number: str) -> list[Tensor]:
    """Without gradients: the results of an op must not share memory."""
    flat = _flat_forward(tensors, groups, [False] * len(tensors), number)
    return [part.clone() for part in _divided(flat, groups, number)]


def _fake_forward(tensors: list[Tensor], groups: list[int], number: str) -> list[Tensor]:
    flat = _fake_flat_forward(tensors, groups, [False] * len(tensors), number)
    return [part.clone() for part in _divided(flat, groups, number)]


def _backward(
    grads: list[Tensor | None], tensors: list[Tensor], saved: list[Tensor], wanted: list[bool], asked: list[bool],
    number: str,
) -> list[Tensor]:  # fmt: skip
    """The gradients of the tensors where `asked` is true, or tensors that contain them: see `CompiledBundle.flat`."""
    known = find(number)
    norms, others = len(known.bundle.norms), len(known.others())
    rows, means, variances = grads[:norms], grads[norms : norms + others], grads[norms + others :]
    with full_precision(known.device), on_device_of(tensors[0]):
        state = known.prepared(tensors, wanted) if known.state is None else known.state
        pairs = list(zip(means, variances, strict=True))
        whole = summed(known.bundle, rows)
        if known.flat:
            *filled, of_rows = known.run.fill_gradients(known.bundle, tensors, saved, state, whole, pairs)
            return [*filled, filled[1].new_empty((ROWS, known.bundle.channels)) if of_rows is None else of_rows]
        found = known.run.backward(known.bundle, tensors, saved, state, whole, pairs, asked)
        return [_alone(grad, like) for grad, like in zip(found, tensors, strict=True) if grad is not None]


def _alone(grad: Tensor, like: Tensor) -> Tensor:
    """With the strides of `like` and memory of its own: inductor requires both, and its kernels need it aligned."""
    if grad.stride() == like.stride() and grad.untyped_storage().nbytes() == grad.nbytes:
        return grad
    return torch.empty_like(like).copy_(grad)


def _fake_backward(
    grads: list[Tensor | None], tensors: list[Tensor], saved: list[Tensor], wanted: list[bool], asked: list[bool],
    number: str,
) -> list[Tensor]:  # fmt: skip
    known, like = find(number), tensors[0]
    if known.flat:
        sizes = known.run.sizes_of_gradients(known.bundle, tensors, wanted, known.device)
        return [like.new_empty(size, dtype=dtype) for size, dtype in sizes]
    return [torch.empty_like(tensor) for tensor, wants in zip(tensors, asked, strict=True) if wants]


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, groups: list[int], wanted: list[bool], number: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        found = _divided(below_autograd("bundle_rows", list(tensors), groups, wanted, number), groups, number)
        bundle = find(number).bundle
        ctx.set_materialize_grads(False)
        ctx.groups, ctx.wanted, ctx.number = groups, wanted, number
        ctx.results = 2 * len(bundle.results) - len(bundle.norms)
        saved = found[ctx.results :]
        ctx.mark_non_differentiable(*saved)
        ctx.save_for_backward(*tensors, *saved)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        known = find(ctx.number)
        count = len(known.bundle.masks)
        kept, arrived = ctx.saved_tensors, list(grads[: ctx.results])  # an activation checkpoint gives them once
        tensors, saved = kept[:count], kept[count:]
        if torch.is_grad_enabled():
            return None, None, None, *differentiated(known.bundle, tensors, known.dtype, ctx.groups, arrived)
        asked = asked_of(known.bundle, ctx.wanted, arrived)
        if True not in asked:
            return None, None, None, *[None] * len(tensors)
        found = torch.ops.kalmannorm.bundle_rows_backward(arrived, tensors, saved, ctx.wanted, asked, ctx.number)
        if known.flat:
            every = known.run.gradients_in(found, known.bundle, tensors, ctx.wanted, known.device)
            return None, None, None, *[grad if wants else None for grad, wants in zip(every, asked, strict=True)]
        one_by_one = iter(found)
        return None, None, None, *[next(one_by_one) if wants else None for wants in asked]


def _apply(tensors: list[Tensor], groups: list[int], number: str) -> list[Tensor]:
    gradients = torch.is_grad_enabled()
    wanted = [gradients and tensor.requires_grad for tensor in tensors]
    return list(_Node.apply(groups, wanted, number, *tensors))  # type: ignore[no-untyped-call]


_SCHEMA = "(Tensor[] tensors, SymInt[] groups, str bundle) -> Tensor[]"
_BELOW = "(Tensor[] tensors, SymInt[] groups, bool[] wanted, str bundle) -> Tensor[]"
register_differentiable(
    "bundle_rows", _SCHEMA, _forward, _fake_forward, _apply, (_BELOW, _flat_forward, _fake_flat_forward)
)
_SCHEMA = "(Tensor?[] grads, Tensor[] tensors, Tensor[] saved, bool[] wanted, bool[] asked, str bundle) -> Tensor[]"
register("bundle_rows_backward", _SCHEMA, _backward, _fake_backward)


bundle_rows: Callable[..., list[Tensor]] = torch.ops.kalmannorm.bundle_rows
