"""Detection at batch 1: Faster R-CNN with a ResNet-18 learns to find a bright box in noise.

    python examples/detection.py

Detectors usually freeze the BatchNorm of their backbone, because a batch of one image is too small for it. Here the
norms of the backbone are trained. For published weights of a backbone, use `weights=` of `resnet_fpn_backbone`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead

import kalmannorm

SIZE = 64


def scene() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """One image with one box."""
    left, top = torch.randint(2, SIZE // 2, (2,)).tolist()
    width, height = torch.randint(16, SIZE // 2 - 2, (2,)).tolist()
    image = 0.2 * torch.rand(3, SIZE, SIZE)
    image[:, top : top + height, left : left + width] += 0.7
    box = torch.tensor([[left, top, left + width, top + height]], dtype=torch.float32)
    return [image], [{"boxes": box, "labels": torch.tensor([1])}]


def detector() -> nn.Module:
    backbone = resnet_fpn_backbone(
        backbone_name="resnet18", weights=None, norm_layer=nn.BatchNorm2d, trainable_layers=5
    )
    head = TwoMLPHead(backbone.out_channels * 7 * 7, 128)
    return FasterRCNN(
        backbone, box_head=head, box_predictor=FastRCNNPredictor(128, num_classes=2), min_size=SIZE, max_size=SIZE,
        rpn_post_nms_top_n_train=200, rpn_batch_size_per_image=64, box_batch_size_per_image=64,
    )  # fmt: skip


def main(steps: int = 60, scenes: int = 4) -> tuple[float, float]:
    """Returns the loss of the first and of the last five steps."""
    torch.manual_seed(0)
    data = [scene() for _ in range(scenes)]
    model = kalmannorm.convert(detector(), data[0], statistics_batch_size=1)
    print(kalmannorm.wiring(model).summary)
    optimizer = torch.optim.SGD(kalmannorm.parameter_groups(model, 1e-4), lr=0.005, momentum=0.9)
    losses = []
    for step in range(steps):
        images, targets = data[step % scenes]
        loss = sum(model.train()(images, targets).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    print(f"loss: {first:.3f} at first, {last:.3f} at last")
    return first, last


if __name__ == "__main__":
    main()
