"""Running averages of loss and accuracy between two log events."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import MeanMetric

from kalmannorm.lab.training.fabric import Fabric


class Average(MeanMetric):
    """torchmetrics' mean in float64. A NaN makes the average NaN. Only reading a value waits for the device.

    Our part is the checkpoint. torchmetrics saves one joint state, but each rank must get its own sum back: a resumed
    run then adds the same numbers in the same order, and its log is bit-identical.
    """

    def __init__(self, device: torch.device) -> None:
        # "disable" keeps a NaN, and looks for none: looking would wait for the device in every step.
        super().__init__(nan_strategy="disable", sync_on_compute=False, compute_with_cache=False)
        self.to(device)
        self.set_dtype(torch.float64)  # last: after it, torchmetrics 1.9's `to` would round what is added to float32

    def of_this_rank(self) -> float:
        return float(self.compute())

    def of_all_ranks(self) -> float:
        with self.sync_context():
            return float(self.compute())

    def sums_of_ranks(self, fabric: Fabric) -> Tensor:
        """Sum and count of every rank, (R, 2), for a checkpoint."""
        found = fabric.all_gather(torch.stack([self.mean_value, self.weight]))
        assert isinstance(found, Tensor)
        return found.reshape(-1, 2)

    def restore(self, sums_of_ranks: Tensor, fabric: Fabric) -> None:
        """Each rank takes its own sum back. If the number of ranks has changed, rank 0 takes the total."""
        rows = sums_of_ranks.reshape(-1, 2)
        if len(rows) == fabric.world_size:
            total, count = rows[fabric.global_rank]
        elif fabric.global_rank == 0:
            total, count = rows.sum(0)
        else:
            return
        self.mean_value.copy_(total)
        self.weight.copy_(count)
