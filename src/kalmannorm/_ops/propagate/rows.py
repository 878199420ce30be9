"""The rows of a bundle, divided among its norms, and their gradients, joined again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kalmannorm._ops.propagate import aten
from kalmannorm._ops.propagate.bundle import ROWS, Bundle
from kalmannorm.moments import closed


def spread(bundle: Bundle, rows: Tensor, groups: Sequence[int]) -> Sequence[Tensor]:
    """Divide rows (5, channels) among the norms, each (5, G, C). The rows of all groups are the same memory."""
    sizes = bundle.widths
    if len(set(groups)) == 1:
        return rows.unsqueeze(1).expand(-1, groups[0], -1).split(sizes, 2)  # type: ignore[no-any-return, no-untyped-call]
    parts = rows.unsqueeze(1).split(sizes, 2)  # type: ignore[no-untyped-call]
    return [part.expand(-1, size, -1) for part, size in zip(parts, groups, strict=True)]


def summed(bundle: Bundle, grads: Sequence[Tensor | None]) -> Tensor | None:
    """The gradient of rows (5, channels): sums over groups. Missing gradients are zero. None if all are missing."""
    there = [grad for grad in grads if grad is not None]
    if not there:
        return None
    if len(there) < len(grads):
        missing = there[0].new_zeros(())
        grads = [
            missing.expand(ROWS, 1, norm.channels) if grad is None else grad
            for grad, norm in zip(grads, bundle.norms, strict=True)
        ]
        there = [grad for grad in grads if grad is not None]
    if len({grad.shape[1] for grad in there}) == 1:
        whole = torch.cat(there, 2)
        return whole.squeeze(1) if whole.shape[1] == 1 else whole.sum(1)
    return torch.cat([grad.sum(1) for grad in there], 1)


def asked_of(bundle: Bundle, wanted: Sequence[bool], grads: Sequence[Tensor | None]) -> list[bool]:
    """The tensors that need a gradient and get one. `grads`: of the rows, then of other means, then variances."""
    norms, others = len(bundle.norms), len(bundle.results) - len(bundle.norms)
    arrived = 0
    for place, grad in enumerate(grads):
        bit = place if place < norms + others else place - others
        arrived |= 0 if grad is None else 1 << bit
    return [bool(wants and mask & arrived) for wants, mask in zip(wanted, bundle.masks, strict=True)]


def differentiated(
    bundle: Bundle,
    tensors: Sequence[Tensor],
    dtype: torch.dtype,
    groups: Sequence[int],
    grads: Sequence[Tensor | None],
) -> list[Any]:
    """Gradients that can be differentiated again."""

    def spelt_out(*given: Tensor) -> list[Tensor]:
        rows, *rest = aten.spelt_out(bundle, given, dtype, given[0].device)
        return [*spread(bundle, rows, groups), *rest]

    return closed.again(spelt_out, tensors, list(grads))
