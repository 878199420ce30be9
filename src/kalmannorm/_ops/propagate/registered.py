"""Bundles as registered ops, for compiled models: `kalmannorm::bundle_rows` and its backward.

A compiled graph holds the number of a bundle, and `find` returns the bundle. The number is part of the graph, so a
graph that torch finds in its cache on disk has the numbers of the process that traced it now.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kalmannorm._ops.dispatch import on_device_of
from kalmannorm._ops.library import Names, below_autograd, register, register_differentiable
from kalmannorm._ops.propagate import aten
from kalmannorm._ops.propagate.bundle import ROWS, Bundle
from kalmannorm._ops.propagate.rows import asked_of, differentiated, summed
from kalmannorm.moments.core import full_precision

ALIGNED = 16


class CompiledBundle:
    """A bundle with its number, the module that runs it (`aten` or `triton_bundle`), and what a backward needs."""

    def __init__(self, bundle: Bundle, run: ModuleType, dtype: torch.dtype, tensors: Sequence[Tensor]) -> None:
        self.bundle, self.run, self.dtype, self.device = bundle, run, dtype, tensors[0].device
        wanted = [True] * len(tensors)
        # One forward shows which tensors it saves for the backward. It also builds the kernels.
        with torch.no_grad(), full_precision(self.device), on_device_of(tensors[0]):
            made = run.forward(bundle, tensors, dtype, self.device, True, run.prepare(bundle, tensors, wanted))
        self.saved = [(tuple(tensor.shape), tensor.dtype) for tensor in made.saved]
        self.state = made.state if run is aten else None  # it depends on the tensors if kernels run
        self.last: tuple[Any, Any] | None = None
        self.number = _BUNDLES.add(self)

    def others(self) -> int:
        """The number of results that are not rows of norms."""
        return len(self.bundle.results) - len(self.bundle.norms)

    def prepared(self, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> Any:
        """What `run` prepares for these tensors. It is kept while they stay where they are."""
        key = list(map(Tensor.data_ptr, tensors)), list(wanted)
        if self.last is None or self.last[0] != key:
            self.last = key, self.run.prepare(self.bundle, tensors, wanted)
        return self.last[1]


_BUNDLES: Names[CompiledBundle] = Names()
find = _BUNDLES.find


def _forward(tensors: list[Tensor], groups: list[int], wanted: list[bool], number: str) -> list[Tensor]:
    """The rows of the norms (5, G, C), means and variances of other results, and tensors for the backward."""
    known = find(number)
    gradients = True in wanted
    with full_precision(known.device), on_device_of(tensors[0]):
        prepared = known.prepared(tensors, wanted)
        made = known.run.forward(known.bundle, tensors, known.dtype, known.device, gradients, prepared)
        rows = [made.rows.new_empty((ROWS, width)) for width in known.bundle.widths]
        if rows:
            torch.split_with_sizes_copy(made.rows, known.bundle.widths, 1, out=rows)
    spread = [
        part.as_strided((ROWS, size, part.shape[1]), (part.shape[1], 0, 1))
        for part, size in zip(rows, groups, strict=True)
    ]
    means, variances = ([pair[part].clone() for pair in made.others] for part in range(2))
    return [*spread, *means, *variances, *(made.saved if gradients else ())]


def _fake_forward(tensors: list[Tensor], groups: list[int], wanted: list[bool], number: str) -> list[Tensor]:
    known, like = find(number), tensors[0]
    bundle = known.bundle
    rows = [
        like.new_empty_strided((ROWS, size, width), (width, 0, 1), dtype=known.dtype)
        for size, width in zip(groups, bundle.widths, strict=True)
    ]
    others = [like.new_empty((1, result.numel()), dtype=known.dtype) for result in bundle.results[len(bundle.norms) :]]
    saved = [like.new_empty(shape, dtype=dtype) for shape, dtype in known.saved]
    return [*rows, *others, *(torch.empty_like(part) for part in others), *(saved if True in wanted else ())]


def _backward(
    grads: list[Tensor | None], tensors: list[Tensor], saved: list[Tensor], wanted: list[bool], asked: list[bool],
    number: str,
) -> list[Tensor]:  # fmt: skip
    """The gradients of the tensors where `asked` is true."""
    known = find(number)
    norms, others = len(known.bundle.norms), known.others()
    rows, means, variances = grads[:norms], grads[norms : norms + others], grads[norms + others :]
    with full_precision(known.device), on_device_of(tensors[0]):
        state = known.prepared(tensors, wanted) if known.state is None else known.state
        pairs = list(zip(means, variances, strict=True))
        found = known.run.backward(known.bundle, tensors, saved, state, summed(known.bundle, rows), pairs, asked)
        return _laid_out(found, tensors)


def _laid_out(gradients: list[Tensor | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Gradients with the layouts of their tensors. Compiled code reads 16 bytes at once, so they begin there."""
    there, odd, likes = list[Tensor](), list[int](), list[Tensor]()
    for grad, like in zip(gradients, tensors, strict=True):
        if grad is not None:
            if grad.data_ptr() % ALIGNED or (grad.dim() > 1 and grad.stride() != like.stride()):
                odd.append(len(there))
                likes.append(like)
            there.append(grad)
    if odd:
        copies = list(map(torch.empty_like, likes))
        torch._foreach_copy_(copies, [there[i] for i in odd])
        for i, copied in zip(odd, copies, strict=True):
            there[i] = copied
    return there


def _fake_backward(
    grads: list[Tensor | None], tensors: list[Tensor], saved: list[Tensor], wanted: list[bool], asked: list[bool],
    number: str,
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(tensor) for tensor, wants in zip(tensors, asked, strict=True) if wants]


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, groups: list[int], wanted: list[bool], number: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        found = below_autograd("bundle_rows", list(tensors), groups, wanted, number)
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
        tensors, saved, arrived = ctx.saved_tensors[:count], ctx.saved_tensors[count:], list(grads[: ctx.results])
        if torch.is_grad_enabled():
            return None, None, None, *differentiated(known.bundle, tensors, known.dtype, ctx.groups, arrived)
        asked = asked_of(known.bundle, ctx.wanted, arrived)
        run = torch.ops.kalmannorm.bundle_rows_backward
        found = iter(run(arrived, tensors, saved, ctx.wanted, asked, ctx.number) if True in asked else ())
        return None, None, None, *[next(found) if wants else None for wants in asked]


def _apply(tensors: list[Tensor], groups: list[int], wanted: list[bool], number: str) -> list[Tensor]:
    return list(_Node.apply(groups, wanted, number, *tensors))  # type: ignore[no-untyped-call]


_SCHEMA = "(Tensor[] tensors, SymInt[] groups, bool[] wanted, str bundle) -> Tensor[]"
register_differentiable("bundle_rows", _SCHEMA, _forward, _fake_forward, _apply)
_SCHEMA = "(Tensor?[] grads, Tensor[] tensors, Tensor[] saved, bool[] wanted, bool[] asked, str bundle) -> Tensor[]"
register("bundle_rows_backward", _SCHEMA, _backward, _fake_backward)


def bundle_rows(tensors: list[Tensor], groups: list[int], wanted: list[bool], number: str) -> list[Tensor]:
    """See the op. `wanted` says which tensors need a gradient."""
    found: list[Tensor] = torch.ops.kalmannorm.bundle_rows(tensors, groups, wanted, number)
    return found
