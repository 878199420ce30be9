"""What norms keep in a closing phase. `closing.py` has the formulas.

The averages of all norms are one tensor, and the sums that their probes collect are another. Each norm has views of
both. So a step of the phase takes a few operations for all norms together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

SAVED = ("strength", "fading", "averages")
"""What a state dict contains of a `ClosingState`."""
ROWS = 4
"""Each norm begins at a multiple of so many rows (of three values). Kernels read its averages in steps of 16 bytes."""
MOST_RUNS = 8
"""So many additions are faster than one for all norms, which gets a list of tensors."""


class ClosingState(nn.Module):
    """What a norm needs in the closing phase. `ClosingPhase` in `_model/closing.py` changes it after every step.

    Its tensors are in the state dict, but they are no buffers. Averages of a model (EMA, SWA) pair their buffers with
    those of the model by their order, and they may have been made before the phase began.
    """

    strength: Tensor
    """λ"""
    averages: Tensor
    """(C, 3): the averages of Σ g and Σ g z, without the factor of a GradScaler, and the number of steps in them."""
    scale: Tensor
    """The factor of the GradScaler. It is not saved."""
    present: float = 0.0
    """κ"""
    fading: Tensor | None
    """Exists if the prior of a Kalman norm fades while λ rises. A checkpoint contains it for this reason."""
    settled: bool = False
    """Whether λ is 1. Python must know it without reading the device. Use `GroupedNorm.settle_closing` to set it."""
    probe: Tensor
    """Zeros (C, 3). Their gradient is the sum over backwards of Σ g and Σ g z, and the number of backwards.

    As a gradient it is summed by autograd like the gradients of the parameters. It belongs to no optimizer.
    """
    place: Place | None = None
    """Where it is in the memory of the phase's norms. Copies, pickles and state dicts have memory of their own."""

    def __init__(self, channels: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.present, self.settled, self.place = 0.0, False, None
        self.strength = torch.zeros((), device=device, dtype=dtype)
        self.fading = None
        self.averages = torch.zeros(channels, 3, device=device, dtype=dtype)
        self.scale = torch.ones((), device=device, dtype=dtype)
        self._renew()

    @property
    def fades(self) -> bool:
        return self.fading is not None

    def set_fades(self, fades: bool) -> None:
        self.fading = torch.ones_like(self.strength) if fades else None

    def saved(self) -> dict[str, Tensor]:
        """The tensors in its state dict, by name."""
        return {name: tensor for name in SAVED if (tensor := getattr(self, name)) is not None}

    @contextmanager
    def _as_buffers(self, *more: str) -> Iterator[None]:
        """Its saved tensors as buffers, so that torch saves, loads and moves them."""
        names = (*SAVED, *more)
        try:
            for name in names:
                self._buffers[name] = self.__dict__.pop(name)
            yield
        finally:
            for name in names:
                self.__dict__[name] = self._buffers.pop(name)

    def _own_averages(self) -> Tensor:
        """In memory of their own: of tensors that share memory, Accelerate saves only one."""
        return self.averages if self.place is None else self.averages.clone()

    def _save_to_state_dict(self, *arguments: Any) -> None:
        kept, self.averages = self.averages, self._own_averages()
        try:
            with self._as_buffers():
                super()._save_to_state_dict(*arguments)
        finally:
            self.averages = kept

    def _load_from_state_dict(self, *arguments: Any) -> None:
        with self._as_buffers():
            super()._load_from_state_dict(*arguments)

    def _renew(self) -> None:
        self.place = None
        self._collect_in(torch.zeros_like(self.averages))

    def _collect_in(self, sums: Tensor) -> None:
        self.probe = torch.zeros_like(sums).requires_grad_()
        # From the beginning, and never removed: a CUDA graph adds to the same memory in every replay.
        self.probe.grad = sums

    def move_to(self, place: Place) -> None:
        """Keep the averages, and collect the sums, in this place from now on."""
        place.averages.copy_(self.averages)
        if self.probe.grad is not None:
            place.sums.copy_(self.probe.grad)
        self.place, self.averages = place, place.averages
        self._collect_in(place.sums)  # another probe: by its address code knows that a graph must be captured again

    def collects_in_place(self) -> bool:
        """Whether probe and averages still are where the memory of the phase has them."""
        place = self.place
        return place is not None and self.averages is place.averages and self.probe.grad is place.sums

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ClosingState:
        before = self.averages
        with self._as_buffers("scale"):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.averages is not before:
            self._renew()
        return self

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name not in ("probe", "place")}
        return kept | {"averages": self._own_averages()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._renew()


class Place(NamedTuple):
    """Where a norm is: in which memory, its first row, and its views."""

    memory: ClosingMemory
    row: int
    averages: Tensor
    sums: Tensor


class ClosingMemory:
    """The memory of the norms of one phase, on one device and in one dtype. The rows between norms stay zero.

    It knows no norm, so it is freed with them.
    """

    def __init__(self, states: Sequence[ClosingState]) -> None:
        channels = [len(state.averages) for state in states]
        self.count, padded = len(states), [-(-count // ROWS) * ROWS for count in channels]
        starts, like = [0, *accumulate(padded)], states[0].averages
        self.firsts = torch.tensor(starts[:-1], device=like.device)
        """The row of the first channel of each norm."""
        self.averages, self.sums = like.new_zeros(starts[-1], 3), like.new_zeros(starts[-1], 3)
        self.runs: dict[tuple[int, ...], list[tuple[int, int, int]] | None] = {}
        with torch.no_grad():
            parts = zip(self.averages.split_with_sizes(padded), self.sums.split_with_sizes(padded), strict=True)
            for state, row, count, (averages, sums) in zip(states, starts[:-1], channels, parts, strict=True):
                state.move_to(Place(self, row, averages[:count], sums[:count]))

    @classmethod
    def of(cls, states: Sequence[ClosingState]) -> ClosingMemory:
        """The memory of these norms. A new one if some of them have no place in it, or averages of their own."""
        place = states[0].place
        if place is not None and not place.memory.holds(states):
            _collect_in_place_again(states)
            place = place if place.memory.holds(states) else None
        return cls(states) if place is None else place.memory

    def holds(self, states: Sequence[ClosingState]) -> bool:
        """Whether these are its norms, and their averages still are views of it."""
        places = [state.place for state in states]
        if len(states) != self.count or False in [place is not None and place.memory is self for place in places]:
            return False
        return False not in [state.collects_in_place() for state in states]

    def add(self, states: Sequence[ClosingState], sums: Tensor) -> bool:
        """Add what these norms have collected, (C, 3) one after the other, to their sums.

        False if it was not done: the norms are in other memory, or not side by side here.
        """
        places = [state.place for state in states if state.collects_in_place()]
        rows = tuple([place.row for place in places if place is not None and place.memory is self])
        if len(rows) < len(states):
            return False
        if rows not in self.runs:
            self.runs[rows] = _runs(rows, [len(state.averages) for state in states])
        runs = self.runs[rows]
        for first, begin, count in runs or ():
            self.sums[first : first + count].add_(sums[begin : begin + count])
        return runs is not None


def _runs(rows: Sequence[int], channels: Sequence[int]) -> list[tuple[int, int, int]] | None:
    """Norms that are side by side: their first row in memory, their first row among these norms, and how many rows.

    None if they are in too many places.
    """
    runs, begin = list[tuple[int, int, int]](), 0
    for row, count in zip(rows, channels, strict=True):
        first, started, before = runs[-1] if runs else (-1, 0, 0)
        if first + before == row:
            runs[-1] = first, started, before + count
        else:
            runs.append((row, begin, count))
        begin += count
    return runs if len(runs) <= MOST_RUNS else None


def _collect_in_place_again(states: Sequence[ClosingState]) -> None:
    """`backward(create_graph=True)` makes new gradients of probes. Their values go where the memory has them."""
    with torch.no_grad():
        for state in states:
            place, grad = state.place, state.probe.grad
            if place is not None and state.averages is place.averages and grad is not place.sums:
                place.sums.zero_() if grad is None else place.sums.copy_(grad)
                state.probe.grad = place.sums
