"""What the kernels of a norm on the short way have to offer, and the memory that they share."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Memory:
    """Memory that the norms of a bundle share in one forward and its backward, on one stream.

    `moments` holds the moments of all norms. Scratch memory is used between two launches of one norm.
    """

    def __init__(self, moments: Tensor) -> None:
        self.moments, self.address = moments, moments.data_ptr()
        self._scratch, self._size = moments, 0

    def scratch(self, values: int) -> int:
        """The address of memory for so many float32 values. The next norm uses the same memory."""
        if self._size < values:
            self._scratch, self._size = self.moments.new_empty(values), values
        return self._scratch.data_ptr()


class RowKernels(Protocol):
    """One norm on x of one shape, prepared: see `triton_rows.py`."""

    keeps_output: bool
    masked: bool
    residual: bool
    values: int
    size: int
    eps: float

    def forward(self, x: Tensor, rows: Tensor, residual: Tensor | None, memory: Memory, start: int) -> Tensor: ...

    def backward(
        self, grad_y: Tensor, x: Tensor, y: Tensor | None, rows: Tensor, memory: Memory, start: int
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...

    def moments(self, moments: Tensor, start: int) -> tuple[Tensor, ...]: ...


Run = tuple[RowKernels, Memory, int]
"""The kernels, the shared memory, and where the moments of this norm begin."""
