"""Running averages of what training sees: a NaN stays a NaN, and ranks are joined when the average is asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmannorm.lab.training.fabric import Fabric


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

    def of_ranks(self, fabric: Fabric) -> Tensor:
        """Sum and count of every rank, (R, 2)."""
        found = fabric.all_gather(self.sums.clone())
        assert isinstance(found, Tensor)
        return found.reshape(-1, 2)

    def restore(self, of_ranks: Tensor, fabric: Fabric) -> None:
        """Each rank takes what was its own, so that all is added up in the same order; else rank 0 takes it all."""
        rows = of_ranks.reshape(-1, 2)
        if len(rows) == fabric.world_size:
            self.sums.copy_(rows[fabric.global_rank])
        elif fabric.global_rank == 0:
            self.sums.copy_(rows.sum(0))

    def reset(self) -> None:
        self.sums.zero_()
