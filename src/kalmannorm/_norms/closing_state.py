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
    memory: ClosingMemory | None = None
    """That of the phase's norms. It belongs to one phase, so copies and pickles do not have it."""

    def __init__(self, channels: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.present, self.settled, self.memory = 0.0, False, None
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

    def _save_to_state_dict(self, *arguments: Any) -> None:
        with self._as_buffers():
            super()._save_to_state_dict(*arguments)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        with self._as_buffers():
            super()._load_from_state_dict(*arguments)

    def _renew(self) -> None:
        self.memory = None
        self._collect_in(torch.zeros_like(self.averages))

    def _collect_in(self, sums: Tensor) -> None:
        self.probe = torch.zeros_like(sums).requires_grad_()
        # From the beginning, and never removed: a CUDA graph adds to the same memory in every replay.
        self.probe.grad = sums

    def move_to(self, averages: Tensor, sums: Tensor) -> None:
        """Keep the averages, and collect the sums, in this memory from now on."""
        averages.copy_(self.averages)
        if self.probe.grad is not None:
            sums.copy_(self.probe.grad)
        self.averages = averages
        self._collect_in(sums)  # another probe: by its address code knows that a graph must be captured again

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ClosingState:
        with self._as_buffers("scale"):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._renew()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("probe", "memory")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._renew()


class Place(NamedTuple):
    """Where a norm is: its first row, and its views."""

    row: int
    averages: Tensor
    sums: Tensor


class ClosingMemory:
    """The memory of the norms of one phase, on one device and in one dtype. The rows between norms stay zero."""

    def __init__(self, states: Sequence[ClosingState]) -> None:
        self.states = [*states]
        channels = [len(state.averages) for state in states]
        self.padded = [-(-count // ROWS) * ROWS for count in channels]
        self.exact = channels == self.padded
        starts = [0, *accumulate(self.padded)]
        like = states[0].averages
        self.firsts = torch.tensor(starts[:-1], device=like.device)
        """The row of the first channel of each norm."""
        self.averages, self.sums = like.new_zeros(starts[-1], 3), like.new_zeros(starts[-1], 3)
        with torch.no_grad():
            self.parts, self.collected = self.of_norms(self.averages), self.of_norms(self.sums)
            for state, averages, sums in zip(states, self.parts, self.collected, strict=True):
                state.move_to(averages, sums)
                state.memory = self
        places = map(Place, starts[:-1], self.parts, self.collected)
        self.places = dict(zip(states, places, strict=True))
        self.runs: dict[tuple[int, ...], list[list[int]] | None] = {}

    @classmethod
    def of(cls, states: Sequence[ClosingState]) -> ClosingMemory:
        """The memory of these norms. A new one if some of them have no part of it, or tensors of their own."""
        memory = states[0].memory
        return memory if memory is not None and memory.holds(states) else cls(states)

    def holds(self, states: Sequence[ClosingState]) -> bool:
        """Whether these are its norms, and their tensors still are views of it.

        Loading with `assign=True`, `model.to()` and `backward(create_graph=True)` exchange tensors.
        """
        if len(states) != len(self.states) or False in [a is b for a, b in zip(states, self.states, strict=True)]:
            return False
        tensors = zip(self.states, self.parts, self.collected, strict=True)
        return False not in [state.averages is a and state.probe.grad is b for state, a, b in tensors]

    def of_norms(self, whole: Tensor) -> list[Tensor]:
        """The part of each norm, (C, 3), of a tensor like the memory."""
        parts = [*whole.split_with_sizes(self.padded)]
        return parts if self.exact else [each[: len(s.averages)] for each, s in zip(parts, self.states, strict=True)]

    def add(self, states: Sequence[ClosingState], sums: Tensor) -> bool:
        """Add what these norms have collected, (C, 3) one after the other, to their sums.

        False if it was not done: the norms are in other memory, or not side by side here.
        """
        key = tuple(map(id, states))
        if key not in self.runs:
            self.runs[key] = self._runs_of(states)
        runs = self.runs[key]
        if runs is None or False in [state.probe.grad is self.places[state].sums for state in states]:
            return False
        for first, begin, count in runs:
            self.sums[first : first + count].add_(sums[begin : begin + count])
        return True

    def _runs_of(self, states: Sequence[ClosingState]) -> list[list[int]] | None:
        """Norms that are side by side: their first row here, their first row among these, and how many rows.

        None if they are in too many places, or are not all here.
        """
        runs, begin = list[list[int]](), 0
        for state in states:
            place, count = self.places.get(state), len(state.averages)
            if place is None:
                return None
            if runs and sum(runs[-1][::2]) == place.row:
                runs[-1][2] += count
            else:
                runs.append([place.row, begin, count])
            begin += count
        return runs if len(runs) <= MOST_RUNS else None

    def row_of(self, state: ClosingState) -> int | None:
        """Where a norm begins. None if it has averages of its own now."""
        place = self.places[state]
        return place.row if state.averages is place.averages else None

    def expected(self) -> Tensor:
        """A copy of the averages, in units of the loss."""
        with torch.no_grad():
            return self.averages * self.states[0].scale
