"""How many backwards reach each norm in an optimizer step, and whether that number has changed.

In a closing phase a norm expects sums of gradients per backward. The loss of a micro-batch is divided by the number k
of micro-batches, so these sums are 1 / k of the step's. With another k the averages of these sums are wrong by the
quotient of both numbers. A norm cannot know k before the step is over: the user has to say it.

Some steps have another number, and need no other averages: the last step of an epoch may have fewer micro-batches, each
divided by the usual k. So a number counts as changed if two steps in a row have it, and if it has changed by the same
factor for all norms. A layer that is skipped at random, or called as often as the data ask for, is no change of k.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

Counts = tuple[float, ...]
"""Backwards in a step, for each norm."""


class Backwards:
    """Counts the backwards of each step without waiting for the device: on CUDA a step is read in a later one."""

    def __init__(self) -> None:
        self.usual: Counts | None = None
        self._last: Counts | None = None
        self._copies: list[tuple[list[Tensor], list[torch.cuda.Event]]] = []

    def forget(self, usual: Counts | None = None) -> None:
        """Expect any number of backwards in the next steps, or `usual`."""
        self.usual, self._last, self._copies = usual, None, []

    def note(self, counts: list[Tensor]) -> None:
        """Take the counts of a step: one vector per device, with an entry for each norm."""
        kinds = {each.device.type for each in counts}
        if not counts or not kinds <= {"cpu", "cuda"}:
            return
        if "cuda" in kinds and torch.cuda.is_current_stream_capturing():
            return
        copies = [each.to("cpu", non_blocking=True) for each in counts]
        self._copies.append((copies, [_event(each.device) for each in counts if each.device.type == "cuda"]))

    def changed(self) -> tuple[float, float] | None:
        """The usual and the new number of backwards per norm, if the number has changed."""
        while self._copies and all(event.query() for event in self._copies[0][1]):  # type: ignore[no-untyped-call]
            counts, _ = self._copies.pop(0)
            found = self._compare(tuple(chain.from_iterable(vector.tolist() for vector in counts)))
            if found is not None:
                return found
        return None

    def _compare(self, now: Counts) -> tuple[float, float] | None:
        if not any(now):
            return None
        twice, self._last = now == self._last, now
        if not twice or now == self.usual:
            return None
        usual, factor = self.usual, None if self.usual is None else _factor(self.usual, now)
        if usual is None or factor is None:
            self.usual = now
            return None
        least = min(each for each in usual if each)
        return least, least * factor


def _factor(before: Counts, now: Counts) -> float | None:
    """The factor by which all counts have changed. None if they have changed in different ways."""
    if len(before) != len(now) or any(bool(old) != bool(new) for old, new in zip(before, now, strict=True)):
        return None
    factors = {new / old for old, new in zip(before, now, strict=True) if old}
    return factors.pop() if len(factors) == 1 else None


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))  # type: ignore[no-untyped-call]
    return event
