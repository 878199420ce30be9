"""Segmentation at batch 2: a U-Net of segmentation_models_pytorch learns to find discs in noise.

python examples/segmentation.py
"""

from __future__ import annotations

import segmentation_models_pytorch as smp
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kalmannorm

SIZE = 64


def scenes(count: int) -> tuple[Tensor, Tensor]:
    """Noisy images with a bright disc each, and masks of the discs."""
    centre = torch.randint(16, SIZE - 16, (2, count, 1, 1))
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    distance = (rows - centre[0]) ** 2 + (columns - centre[1]) ** 2
    masks = distance < torch.randint(6, 14, (count, 1, 1)) ** 2
    return masks[:, None].float() + torch.randn(count, 3, SIZE, SIZE), masks.float()


@torch.no_grad()
def overlap(model: nn.Module, images: Tensor, masks: Tensor) -> float:
    """Intersection over union, in %."""
    found = model.eval()(images)[:, 0] > 0
    return 100 * ((found & (masks > 0)).sum() / (found | (masks > 0)).sum()).item()


def main(steps: int = 80) -> float:
    torch.manual_seed(0)
    test = scenes(16)
    model = smp.Unet("resnet18", encoder_weights=None, decoder_channels=(64, 32, 16, 8, 8), classes=1)
    model = kalmannorm.convert(model, test[0][:2], statistics_batch_size=2)
    print(kalmannorm.wiring(model).summary)
    optimizer = torch.optim.AdamW(kalmannorm.parameter_groups(model, 1e-4), lr=2e-3)
    for _ in range(steps):
        images, masks = scenes(2)
        loss = F.binary_cross_entropy_with_logits(model.train()(images)[:, 0], masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    kalmannorm.recalibrate(model, [scenes(2) for _ in range(20)])
    score = overlap(model, *test)
    print(f"intersection over union: {score:.1f} %")
    return score


if __name__ == "__main__":
    main()
