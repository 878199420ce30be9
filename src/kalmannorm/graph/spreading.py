"""Rows for every group: what a bundle gives norms as one row, as many rows as they have groups, and no copy of it.

The op then gives back a gradient for each group, and does not have to sum them: here those of all norms of a bundle are
laid side by side and summed together, where each norm would need a launch of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Spread(torch.autograd.Function):
    """Rows (1, C) or (C,), and for each how many (G, C) it shall be."""

    @staticmethod
    def forward(ctx: Any, groups: Sequence[int], *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shapes = [row.shape for row in rows]
        return tuple(row.expand(size, -1) for row, size in zip(rows, groups, strict=True))

    @staticmethod
    def backward(ctx: Any, *at: Tensor | None) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None] * len(at)
        alike: dict[int, list[int]] = {}  # by number of groups
        for place, grad in enumerate(at):
            if grad is not None:
                alike.setdefault(grad.shape[0], []).append(place)
        for places in alike.values():
            arrived = [grad for place in places if (grad := at[place]) is not None]
            sums = torch.cat(arrived, 1).sum(0)
            parts = torch.split(sums, [grad.shape[1] for grad in arrived])
            for place, part in zip(places, parts, strict=True):
                found[place] = part.view(ctx.shapes[place])
        return None, *found
