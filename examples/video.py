"""A video net at batch 1: r3d_18 learns whether a bar moves to the left or to the right.

python examples/video.py
"""

from __future__ import annotations

import torch
import torchvision
from torch import Tensor
from torch.nn import functional as F

import kalmannorm

FRAMES, SIZE = 8, 24


def clip() -> tuple[Tensor, Tensor]:
    """A clip (1, 3, T, H, W) and its class: 0 moves to the left, 1 to the right."""
    right = torch.randint(2, (1,))
    video = 0.3 * torch.randn(1, 3, FRAMES, SIZE, SIZE)
    for frame in range(FRAMES):
        place = 2 * frame if right else 2 * (FRAMES - 1 - frame)
        video[:, :, frame, :, place + 3 : place + 6] += 1
    return video, right


def main(steps: int = 25) -> tuple[float, float]:
    """Returns the loss of the first and of the last five steps."""
    torch.manual_seed(0)
    model = torchvision.models.video.r3d_18(num_classes=2)
    model = kalmannorm.convert(model, clip()[0], statistics_batch_size=1)
    print(kalmannorm.wiring(model).summary)
    optimizer = torch.optim.SGD(kalmannorm.parameter_groups(model, 1e-4), lr=0.003, momentum=0.9)
    losses = []
    for _ in range(steps):
        video, label = clip()
        loss = F.cross_entropy(model(video), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    print(f"loss: {first:.3f} at first, {last:.3f} at last")
    return first, last


if __name__ == "__main__":
    main()
