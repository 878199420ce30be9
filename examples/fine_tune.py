"""Fine-tune a timm model that was trained with BatchNorm, in batches of 4 with groups of 2. It needs timm.

    python examples/fine_tune.py

With your own data, start from published weights instead of `pretrained()`:

    model = timm.create_model("resnet50", pretrained=True, num_classes=10)

Conversion keeps the logits of the pretrained model. Training then continues with Kalman norms. They normalize with
their running statistics from the first step on, in a closing phase.
"""

from __future__ import annotations

import timm
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import kalmannorm


def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    return F.interpolate(images, size=24).expand(-1, 3, -1, -1), torch.tensor(data.target)


def train(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    batch: int,
    steps: int,
    lr: float,
    phase: kalmannorm.ClosingPhase | None = None,
) -> None:
    optimizer = torch.optim.AdamW(kalmannorm.parameter_groups(model, 1e-2), lr)
    model.train()
    for _ in range(steps):
        chosen = torch.randint(len(images), (batch,))
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if phase is not None:
            phase.step()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return 100 * (model.eval()(images).argmax(1) == labels).float().mean().item()


def pretrained(images: Tensor, labels: Tensor) -> nn.Module:
    """A BatchNorm model, trained on the digits 0 to 4 only. It stands for published weights."""
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=10, output_stride=8)  # the images are small
    train(model, images[labels < 5], labels[labels < 5], batch=16, steps=40, lr=2e-3)
    return model


def main(steps: int = 150) -> dict[str, float]:
    images, labels = digits()
    model = pretrained(images[:900], labels[:900])
    test = images[900:1200], labels[900:1200]
    found = {"pretrained": accuracy(model, *test)}

    model = kalmannorm.convert(model, images[:2], statistics_batch_size=2)
    found["converted"] = accuracy(model, *test)
    phase = kalmannorm.ClosingPhase(model, steps, start=0, end=0)
    train(model, images[:900], labels[:900], batch=4, steps=steps, lr=2e-3, phase=phase)
    found["fine-tuned"] = accuracy(model, *test)
    for name, score in found.items():
        print(f"{name}: {score:.1f} %")
    return found


if __name__ == "__main__":
    main()
