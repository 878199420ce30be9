"""Lightning: a callback converts the model, recalibrates before validation, and logs gains.

python examples/lightning_trainer.py
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import kalmannorm
from kalmannorm.integrations.lightning import KalmanCallback


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, padding=1),
            nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10),
        )  # fmt: skip

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(kalmannorm.parameter_groups(self, weight_decay=1e-4), lr=0.05, momentum=0.9)


def main(epochs: int = 4) -> dict[str, float]:
    seed_everything(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(digits.target)
    train = DataLoader(TensorDataset(images[:1200], labels[:1200]), batch_size=8, shuffle=True)
    test = DataLoader(TensorDataset(images[1200:], labels[1200:]), batch_size=64)
    callback = KalmanCallback(images[:2], statistics_batch_size=2, recalibrate_on=train, recalibrate_batches=50)
    trainer = Trainer(max_epochs=epochs, callbacks=[callback], accelerator="cpu", logger=False,
                      enable_checkpointing=False)  # fmt: skip
    trainer.fit(Digits(), train, test)
    found = {name: value.item() for name, value in trainer.callback_metrics.items()}
    print(found)
    return found


if __name__ == "__main__":
    main()
