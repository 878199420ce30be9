"""A 3-D U-Net of MONAI at batch 1: it learns to find a ball in a noisy volume.

    python examples/volumes.py

Importing `kalmannorm.integrations.monai` makes `norm="kalman"` work in MONAI's nets.
"""

from __future__ import annotations

import torch
from monai.losses import DiceLoss
from monai.networks.nets import UNet
from torch import Tensor, nn

import kalmannorm
import kalmannorm.integrations.monai

SIZE = 32


def scan() -> tuple[Tensor, Tensor]:
    """A volume (1, 1, D, H, W) with a ball in it, and the mask of the ball."""
    centre = torch.randint(10, SIZE - 10, (3,))
    grid = torch.stack(torch.meshgrid(*[torch.arange(SIZE)] * 3, indexing="ij"), -1)
    mask = (grid - centre).square().sum(-1) < int(torch.randint(5, 10, ())) ** 2
    mask = mask.float()[None, None]
    return mask + 0.7 * torch.randn_like(mask), mask


@torch.no_grad()
def dice(net: nn.Module, scans: list[tuple[Tensor, Tensor]]) -> float:
    """The mean overlap of found and true balls: 2 |A ∩ B| / (|A| + |B|)."""
    scores = []
    for volume, mask in scans:
        found = (net.eval()(volume) > 0).float()
        scores.append((2 * (found * mask).sum() / (found.sum() + mask.sum())).item())
    return sum(scores) / len(scores)


def main(steps: int = 60) -> float:
    torch.manual_seed(0)
    net = UNet(
        spatial_dims=3, in_channels=1, out_channels=1, channels=(8, 16, 32), strides=(2, 2), num_res_units=1,
        norm=("kalman", {"statistics_batch_size": 1}),
    )  # fmt: skip
    print(kalmannorm.rewire(net, scan()[0]).summary)
    optimizer = torch.optim.AdamW(kalmannorm.parameter_groups(net, 1e-4), lr=5e-3)
    loss = DiceLoss(sigmoid=True)
    for _ in range(steps):
        volume, mask = scan()
        optimizer.zero_grad()
        loss(net.train()(volume), mask).backward()
        optimizer.step()
    kalmannorm.recalibrate(net, [scan() for _ in range(16)])
    score = dice(net, [scan() for _ in range(8)])
    print(f"Dice: {score:.2f}")
    return score


if __name__ == "__main__":
    main()
