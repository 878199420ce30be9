"""DistributedDataParallel with two examples per process.

    torchrun --nproc-per-node 2 examples/distributed.py

By default each process normalizes its own examples. With `process_group="world"` all processes share their statistics,
as with SyncBatchNorm. Convert before wrapping in DDP. The script runs on CPUs with gloo. On GPUs use nccl, and move the
model and the data to the device of the process.
"""

from __future__ import annotations

import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import kalmannorm


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def main(steps: int = 5) -> None:
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = kalmannorm.convert(network(), torch.randn(2, 3, 12, 12), process_group="world")
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(kalmannorm.parameter_groups(model, 1e-4), lr=0.1)
    torch.manual_seed(rank)  # every process has its own data
    for _ in range(steps):
        images, labels = torch.randn(2, 3, 12, 12), torch.randint(4, (2,))
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state = torch.cat([value.flatten().double() for value in model.state_dict().values()])
    states = [torch.empty_like(state) for _ in range(distributed.get_world_size())]
    distributed.all_gather(states, state)
    if rank == 0:
        equal = all(torch.equal(state, other) for other in states)
        print(f"{len(states)} processes, gains {kalmannorm.gains(model)}, equal: {equal}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
