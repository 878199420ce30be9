"""What a closing phase collects from settled norms on the short way.

It collects the sums of g and of g z, see `_norms/closing.py`. These are the gradients of β and γ. A bundle gets the
gradients of γ and β of all its norms together, so it collects for all of them, in a few launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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

    The probes are inputs of the bundle's node, and a backward adds to their gradients.
    """

    def __init__(self, states: States) -> None:
        self.places = [*states]
        self.probes = [state.probe for state in states.values()]
        self.ran = set[int]()

    def gradients(self, node: Any, whole: Tensor | None, widths: list[int], arrived: Sequence[bool]) -> list[Any]:
        """Gradients of the probes. `whole` is that of the rows, (5, channels). `arrived`: whether a norm got one.

        In a usual backward they are added here to those of before, and None is returned.
        """
        pairs = enumerate(self.places)
        found = {number: place for number, place in pairs if place in self.ran and arrived[place]}
        nothing: list[Any] = [None] * len(self.probes)
        if whole is None or not found:
            return nothing
        with torch.no_grad():
            sums = torch.stack([whole[1], whole[0], torch.ones_like(whole[0])], 1).to(self.probes[0].dtype)
            parts = sums.split_with_sizes(widths)
            before = [grad for number in found if (grad := self.probes[number].grad) is not None]
            if len(before) == len(found) and _adds_up(node):
                torch._foreach_add_(before, [parts[place] for place in found.values()])
                return nothing
        for number, place in found.items():
            nothing[number] = parts[place]
        return nothing


def _adds_up(node: Any) -> bool:
    """Whether this backward adds up gradients at the probes, the last inputs of the node.

    `torch.autograd.grad` and `backward(inputs=...)` do not, or they return the gradients.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node.next_functions[-1][0]))
    except RuntimeError:  # torch.autograd.grad, for the probes
        return False
