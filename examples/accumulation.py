"""Gradient accumulation: eight micro-batches of 2 make one step, and one update of the statistics.

    python examples/accumulation.py

Without `accumulate_statistics`, each micro-batch would update the running statistics by itself. With it, gradients and
statistics are those of one forward on all 16 examples in groups of 2, up to rounding.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kalmannorm

MICRO, STEPS = 2, 5


def network(x: Tensor) -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1),
        nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip
    return kalmannorm.convert(net, x[:MICRO], statistics_batch_size=MICRO)


def main() -> float:
    """Returns the largest difference between both models after training."""
    torch.manual_seed(0)
    data, labels = torch.randn(STEPS, 16, 3, 16, 16), torch.randint(4, (STEPS, 16))
    accumulated = network(data[0])
    whole = copy.deepcopy(accumulated)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (accumulated, whole)]
    for x, target in zip(data, labels, strict=True):
        with kalmannorm.accumulate_statistics(accumulated):
            for images, classes in zip(x.split(MICRO), target.split(MICRO), strict=True):
                loss = F.cross_entropy(accumulated(images), classes) * MICRO / len(x)
                loss.backward()
        F.cross_entropy(whole(x), target).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(accumulated.state_dict().values(), whole.state_dict().values(), strict=True)
    difference = max((a - b).abs().max().item() for a, b in pairs if a.is_floating_point())
    print(f"weights and statistics differ by at most {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
