"""What a closing phase collects from settled norms on the short way.

It collects the sums of g and of g z, see `_norms/closing.py`. These are the gradients of β and γ. A bundle gets the
gradients of γ and β of all its norms together, so it collects for all of them, in a few launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from kalmannorm._ops.normalize.settled_alone import adds_up
from kalmannorm._running.bundling import Part
from kalmannorm._support.changes import Changes

States = dict[int, Any]
"""The `ClosingState` of each settled norm, by its place in the bundle."""


def settled_states(part: Part) -> States:
    """Those of the norms that are at the end of a closing phase."""
    known = part.settled
    if known is None or known[0] != Changes.count:
        norms: dict[int, Any] = {place: call.norm.module() for place, call in enumerate(part.calls)}
        found = {place: norm.closing for place, norm in norms.items() if norm is not None and norm.runs_settled()}
        known = part.settled = Changes.count, found
    return known[1]


class Collecting:
    """One forward of a bundle with settled norms. `ran` are those that ran on the short way: the others collect alone.

    Probes are inputs of the bundle's node. A backward adds to their gradients.
    """

    def __init__(self, states: States) -> None:
        self.places, self.states = [*states], [*states.values()]
        self.probes = [state.probe for state in self.states]
        self.last = get_gradient_edge(self.probes[-1]).node  # here, where gradients are enabled
        self.ran = set[int]()

    def gradients(self, whole: Tensor | None, widths: list[int], arrived: Sequence[bool]) -> list[Any]:
        """Gradients of the probes. `whole` is that of the rows, (5, channels). `arrived`: whether a norm got one."""
        reached = {place for place in self.ran if arrived[place]}
        if whole is None or not reached:
            return [None] * len(self.probes)
        with torch.no_grad():
            return self._of_probes(whole, widths, reached)

    def _of_probes(self, whole: Tensor, widths: list[int], reached: set[int]) -> list[Any]:
        """In a usual backward they are added here to those of before, and None is returned."""
        found = {number: place for number, place in enumerate(self.places) if place in reached}
        nothing: list[Any] = [None] * len(self.probes)
        sums = torch.stack([whole[1], whole[0], torch.ones_like(whole[0])], 1).to(self.probes[0].dtype)
        adds, first = adds_up(self.last), self.states[0].place
        if adds and first is not None and len(found) == len(widths) and first.memory.add(self.states, sums):
            return nothing
        parts = sums.split_with_sizes(widths)
        before = [grad for number in found if (grad := self.probes[number].grad) is not None]
        if adds and len(before) == len(found):
            torch._foreach_add_(before, [parts[place] for place in found.values()])
            return nothing
        for number, place in found.items():
            nothing[number] = parts[place]
        return nothing
