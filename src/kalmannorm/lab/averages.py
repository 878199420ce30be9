"""Running averages of what training sees: a NaN stays a NaN, and ranks are joined when the average is asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmannorm.lab.fabric import Fabric


class Average:
    """The mean of what was added since the last reset, in float64 on the device; nothing waits before it is asked."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, value: Tensor) -> None:
        self.sums[0] += value
        self.sums[1] += 1

    def here(self) -> float:
        """Of this rank; waits for the device."""
        total, count = self.sums.tolist()
        return float(total / count) if count else float("nan")

    def joined(self, fabric: Fabric) -> Tensor:
        """Sum and count of all ranks."""
        found = fabric.all_reduce(self.sums.clone(), reduce_op="sum")
        assert isinstance(found, Tensor)
        return found

    def reset(self) -> None:
        self.sums.zero_()
