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


def idle_gains(part: Part) -> dict[int, Tensor]:
    """Gains of norms whose priors have faded, by place in the bundle. They are not read any more."""
    gains = dict[int, Tensor]()
    for place, call in enumerate(part.calls):
        norm = call.norm.module() if call.faded else None
        gain = None if norm is None else norm._parameters.get("gain_logit")
        if gain is not None and gain.requires_grad:
            gains[place] = gain
    return gains


class Collecting:
    """One forward of a bundle with settled norms. `ran` are those that ran on the short way: the others collect alone.

    Probes and idle gains are inputs of the bundle's node. A backward adds to the gradients of the probes. The gains of
    norms that ran get gradients of zero, because DDP waits for a gradient of each.
    """

    def __init__(self, states: States, gains: dict[int, Tensor]) -> None:
        self.places, self.states, self.gains = [*states], [*states.values()], gains
        self.probes = [state.probe for state in self.states]
        self.inputs = [*self.probes, *gains.values()]
        self.last = get_gradient_edge(self.probes[-1]).node  # here, where gradients are enabled
        self.ran = set[int]()

    def gradients(self, whole: Tensor | None, widths: list[int], arrived: Sequence[bool]) -> list[Any]:
        """Gradients of `inputs`. `whole` is that of the rows, (5, channels). `arrived`: whether a norm got one."""
        reached = {place for place in self.ran if arrived[place]}
        if whole is None or not reached:
            return [None] * len(self.inputs)
        with torch.no_grad():
            return [*self._of_probes(whole, widths, reached), *self._of_gains(reached)]

    def _of_probes(self, whole: Tensor, widths: list[int], reached: set[int]) -> list[Any]:
        """In a usual backward they are added here to those of before, and None is returned."""
        found = {number: place for number, place in enumerate(self.places) if place in reached}
        nothing: list[Any] = [None] * len(self.probes)
        sums = torch.stack([whole[1], whole[0], torch.ones_like(whole[0])], 1).to(self.probes[0].dtype)
        adds_up, first = self._adds_up(), self.states[0].place
        if adds_up and first is not None and len(found) == len(widths) and first.memory.add(self.states, sums):
            return nothing
        parts = sums.split_with_sizes(widths)
        before = [grad for number in found if (grad := self.probes[number].grad) is not None]
        if adds_up and len(before) == len(found):
            torch._foreach_add_(before, [parts[place] for place in found.values()])
            return nothing
        for number, place in found.items():
            nothing[number] = parts[place]
        return nothing

    def _adds_up(self) -> bool:
        """Whether this backward adds up gradients at the probes.

        `torch.autograd.grad` and `backward(inputs=...)` do not, or they return the gradients.
        """
        try:
            return bool(torch._C._will_engine_execute_node(self.last))
        except RuntimeError:  # torch.autograd.grad, for the probes
            return False

    def _of_gains(self, reached: set[int]) -> list[Tensor | None]:
        if not self.gains:
            return []
        zeros = zip(self.gains, _zeros_like([*self.gains.values()]), strict=True)
        return [zero if place in reached else None for place, zero in zeros]


def _zeros_like(parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """Zeros for each, in one memory if all have the same dtype and device."""
    if len({(each.dtype, each.device) for each in parameters}) > 1:
        return [torch.zeros_like(each) for each in parameters]
    sizes = [each.numel() for each in parameters]
    parts = parameters[0].new_zeros(sum(sizes)).split_with_sizes(sizes)
    pairs = zip(parts, parameters, strict=True)
    return [part if each.dim() == 1 else part.view(each.shape) for part, each in pairs]
