"""What the kernels of a norm on the short way have to offer, and the memory that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kalmannorm._ops.normalize.recipes import Plan, Tensors
from kalmannorm._ops.propagate.bundle import ROWS


class RowGradients:
    """Memory for the gradients of the rows of all norms of a bundle, (5, 1, channels), in one backward.

    It is for norms with one group. Then the bundle gets the gradients of all rows without a copy. `places`: the number
    of each norm, by where its moments begin.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths, self.places = widths, dict[int, int]()
        self.made: tuple[int, Tensor, Sequence[Tensor]] | None = None  # the backward, the memory, and its parts

    @classmethod
    def fitting(cls, widths: Sequence[int], groups: Sequence[int]) -> RowGradients | None:
        """None if a norm has several groups, or does not begin at a multiple of 16 bytes."""
        return cls(widths) if set(groups) == {1} and not any(width % 4 for width in widths) else None

    def of(self, start: int, like: Tensor) -> Tensor:
        """Memory for the gradient of one norm, (5, 1, C). A backward inside another one has memory of its own."""
        made, backward = self.made, torch._C._current_graph_task_id()
        if made is None or made[0] != backward:
            whole = like.new_empty((ROWS, 1, sum(self.widths)))
            made = self.made = backward, whole, whole.split_with_sizes(self.widths, 2)
        return made[2][self.places[start]]

    def take(self, arrived: Sequence[Tensor | None]) -> Tensor | None:
        """The gradient of all rows, (5, channels). None if some that arrived are not here.

        The next backward gets new memory, because gradients of γ and β are views of this one.
        """
        made, self.made = self.made, None
        if made is None or False in [one is other for one, other in zip(arrived, made[2], strict=True)]:
            return None
        return made[1].squeeze(1)


class Scratch:
    """Memory between two launches of one norm. All norms of a bundle use the same, one after the other.

    `gradients`: memory for the gradients of rows, if norms share it.
    """

    def __init__(self, gradients: RowGradients | None = None) -> None:
        self.gradients = gradients
        self.memory: Tensor | None = None

    def of(self, like: Tensor, values: int) -> int:
        """The address of memory for so many float32 values."""
        if self.memory is None or self.memory.numel() < values:
            self.memory = like.new_empty(values)
        return self.memory.data_ptr()


class Memory(NamedTuple):
    """Memory that the norms of a bundle share in one forward and its backward, on one stream: moments, and scratch."""

    moments: Tensor
    scratch: Scratch


class RowKernels(Protocol):
    """One norm on x of one shape, prepared: see `triton_rows.py`."""

    keeps_output: bool
    groups: int
    channels: int
    masked: bool
    relu: bool
    residual: bool
    values: int
    size: int
    eps: float

    def forward(self, x: Tensor, rows: Tensor, residual: Tensor | None, memory: Memory, start: int) -> Tensor: ...

    def backward(
        self, grad_y: Tensor, x: Tensor, y: Tensor | None, rows: Tensor, memory: Memory, start: int
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...

    def moments(self, moments: Tensor, start: int) -> tuple[Tensor, ...]: ...


Pair = tuple[Tensor, Tensor]


class Expected(NamedTuple):
    """The averages of gradients of many norms, (rows, 3), in units of the loss. A norm has C rows, from `row` on."""

    whole: Tensor
    row: int = 0

    def of(self, channels: int) -> Tensor:
        return self.whole[self.row : self.row + channels]

    def address(self) -> int:
        return self.whole.data_ptr() + 3 * self.row * self.whole.element_size()


SettledSaved = tuple[Tensor, Tensor | None, Tensor, Expected]
"""What the backward of a settled norm reads: x, y if its sign is the mask of the ReLU, the rows, and the averages. A
plain tuple, because it is made in every step."""
SettledGradients = tuple[Tensor, Tensor, Tensor | None]
"""Gradients of x, of the rows (5, G, C) and of the residual."""


class SettledRowKernels(RowKernels, Protocol):
    """One settled norm on x of one shape, prepared: see `triton_settled_rows.py`.

    The sums that its closing phase collects are the gradients of γ and β, which are among those of the rows.
    """

    def settle(
        self, x: Tensor, rows: Tensor, residual: Tensor | None, running: Pair, memory: Memory, start: int
    ) -> Tensor:
        """y. Writes the moments, and behind them what the backward needs of the running statistics."""

    def differentiate(self, grad_y: Tensor, saved: SettledSaved, memory: Memory, start: int) -> SettledGradients: ...


class Read(NamedTuple):
    """What a settled norm without a prior reads: γ, β, running mean and variance, and the addresses of these four."""

    weight: Tensor
    bias: Tensor
    mean: Tensor
    var: Tensor
    addresses: tuple[int, ...]


AloneSaved = tuple[Tensor, Tensor | None, Tensor, Tensor, Expected]
"""What the backward of a settled norm without a prior reads: x, y if its sign is the mask, γ, β, and the averages."""
AloneSums = tuple[Tensor, Tensor, Tensor]
"""Where a backward writes the gradients of γ and β, and where it adds what the closing phase collects, (C, 3)."""


class SettledAloneKernels(Protocol):
    """One settled norm without a prior on x of one shape, prepared: see `triton_settled_alone.py`."""

    keeps_output: bool
    groups: int
    channels: int
    relu: bool
    residual: bool
    values: int
    size: int

    def settle(self, x: Tensor, read: Read, residual: Tensor | None, memory: Memory, start: int) -> Tensor:
        """y. Writes the moments, and behind them what the backward needs of the running statistics."""

    def differentiate(
        self, grad_y: Tensor, saved: AloneSaved, sums: AloneSums, memory: Memory, start: int
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of x and of the residual."""

    def moments(self, moments: Tensor, start: int) -> tuple[Tensor, ...]: ...


class Grouped(Protocol):
    groups: int
    channels: int


def kept_of(kernels: Grouped, moments: Tensor, start: int) -> Tensor:
    """What the backward of a settled norm needs of its running statistics: m and ρ (2, C), behind its moments."""
    begin = start + 4 * kernels.groups * kernels.channels
    return moments.view(-1)[begin : begin + 2 * kernels.channels].view(2, kernels.channels)


Transition = tuple[Tensor, Tensor, Tensor]
"""What a learned transition reads: the posterior of the norm before (2, G, P), the matrix A (C, P) and the noise r."""
Predicted = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of these three."""


class LearnedKernels(RowKernels, Protocol):
    """One norm with a learned transition on x of one shape, prepared: see `triton_learned.py`."""

    previous_shape: tuple[int, int, int]
    most_noises: int

    def filter(
        self, x: Tensor, rows: Tensor, residual: Tensor | None, given: Transition | None, memory: Memory, start: int
    ) -> tuple[Tensor, Tensor]: ...

    def differentiate(
        self,
        grad_y: Tensor,
        grad_posterior: Tensor,
        x: Tensor,
        y: Tensor | None,
        rows: Tensor,
        given: Transition | None,
        memory: Memory,
        start: int,
        to_matrix: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Predicted]: ...


Planned = tuple[Plan, Tensors]
"""How y is computed again, and the tensors of its residual for that."""
Run = tuple[RowKernels, Memory, int, Planned | None]
"""The kernels, the shared memory, where the moments of this norm begin, and how y is computed again, if it is."""
