"""Expands one row of a bundle to as many rows as a norm has groups, without a copy.

The op then returns a gradient for each group and does not have to sum them. Here the gradients of all norms of a bundle
are concatenated and summed together. Otherwise each norm would need a launch of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Spread(torch.autograd.Function):
    """Expands rows (1, C) or (C,). `groups` says how many rows (G, C) each becomes."""

    @staticmethod
    def forward(ctx: Any, groups: Sequence[int], *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.ranks = [row.dim() for row in rows]
        return tuple(row.expand(size, -1) for row, size in zip(rows, groups, strict=True))

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None] * len(arriving)
        alike: dict[int, tuple[list[int], list[int]]] = {}  # by number of groups: rows (C,), and rows (1, C)
        for place, (grad, rank) in enumerate(zip(arriving, ctx.ranks, strict=True)):
            if grad is not None:
                alike.setdefault(grad.shape[0], ([], []))[rank - 1].append(place)
        for places in alike.values():
            arrived = [[grad for place in each if (grad := arriving[place]) is not None] for each in places]
            widths = [[grad.shape[1] for grad in grads] for grads in arrived]
            sums = torch.cat([*arrived[0], *arrived[1]], 1).sum(0)
            flat, rows = torch.split(sums, [sum(each) for each in widths])
            found_parts = torch.split(flat, widths[0]), torch.split(rows.unsqueeze(0), widths[1], 1)
            for each, parts in zip(places, found_parts, strict=True):
                for place, part in zip(each, parts, strict=True):
                    found[place] = part
        return None, *found
