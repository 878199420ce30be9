"""The cells of the trials: a data set and a network.

The images come from packs, see `pack.py`. Forms are chosen on a held-out tenth of the training images. The test images
are only used to confirm what was chosen.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from kalmannorm.lab.models.cifar_inception import CifarInception

BATCH = 128
MOSAIC = 10
"""Images per edge of a packed mosaic."""


@dataclass(frozen=True)
class Cell:
    """A network on a data set, and how it is trained."""

    name: str
    packs: tuple[str, ...]
    net: Callable[[], nn.Module]
    size: int
    padding: int
    epochs: int
    rate: float = 0.1
    decay: float = 5e-4


@dataclass(frozen=True)
class Data:
    """Images (N, 3, H, W) uint8 and labels (N,) on the device; `scale` and `shift` normalize a channel.

    `held`: the images to score, which are not trained on.
    """

    train: Tensor
    train_labels: Tensor
    held: Tensor
    held_labels: Tensor
    scale: Tensor
    shift: Tensor

    def prepared(self, images: Tensor) -> Tensor:
        return (images.float() * self.scale + self.shift).contiguous(memory_format=torch.channels_last)


def _resnet18() -> nn.Module:
    """torchvision's ResNet-18, with a 3×3 stem of stride 1 for 64×64 images."""
    from torchvision.models import resnet18

    model = resnet18(num_classes=100)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    return model


CELLS = {
    "cifar10": Cell("cifar10", ("cifar10-a", "cifar10-b"), lambda: CifarInception(10), 32, 4, 15),
    "cifar100": Cell("cifar100", ("cifar100-a", "cifar100-b"), lambda: CifarInception(100), 32, 4, 15),
    "tiny100": Cell("tiny100", ("tiny100-a", "tiny100-b"), _resnet18, 64, 8, 15),
}


def load(cell: Cell, folder: Path, device: torch.device, *, test: bool = False) -> Data:
    """The training set of the cell, with every tenth image of each class held out.

    `test`: all training images, and the test images to score.
    """
    images, labels = _images(cell.packs, folder, cell.size)
    if test:
        train, train_labels = images, labels
        held, held_labels = _images((f"{cell.name}-test",), folder, cell.size)
    else:
        place = torch.zeros_like(labels)
        for label in labels.unique():
            mine = labels == label
            place[mine] = torch.arange(int(mine.sum()))
        chosen = place % 10 == 9
        train, train_labels, held, held_labels = images[~chosen], labels[~chosen], images[chosen], labels[chosen]
    # In the order of classes, the examples of a group would be too similar.
    shuffled = torch.randperm(len(held), generator=torch.Generator().manual_seed(0))
    values = train[::8].float()
    mean, std = values.mean((0, 2, 3)), values.std((0, 2, 3))
    scale, shift = (1 / std).view(1, 3, 1, 1), (-mean / std).view(1, 3, 1, 1)
    tensors = train, train_labels, held[shuffled], held_labels[shuffled], scale, shift
    return Data(*(tensor.to(device) for tensor in tensors))


def _images(packs: tuple[str, ...], folder: Path, size: int) -> tuple[Tensor, Tensor]:
    missing = [name for name in packs if not (folder / f"{name}.npz").is_file()]
    if missing:
        raise FileNotFoundError(f"no pack {missing[0]} in {folder}: make it with trials/pack.py")
    parts = [_read(folder / f"{name}.npz", size) for name in packs]
    images = torch.from_numpy(np.concatenate([part[0] for part in parts])).permute(0, 3, 1, 2).contiguous()
    return images, torch.from_numpy(np.concatenate([part[1] for part in parts]).astype(np.int64))


def _read(path: Path, size: int) -> tuple[np.ndarray, np.ndarray]:
    packed = np.load(path)
    kind = "webp" if "webp" in packed else "jpeg"
    blob, offsets = packed[kind].tobytes(), packed["offsets"]

    def decode(number: int) -> np.ndarray:
        picture = Image.open(io.BytesIO(blob[offsets[number] : offsets[number + 1]])).convert("RGB")
        return np.asarray(picture)

    with ThreadPoolExecutor() as pool:
        pictures = list(pool.map(decode, range(len(offsets) - 1)))
    labels = packed["labels"]
    if kind == "jpeg":
        return np.stack(pictures), labels
    mosaics = np.stack(pictures).reshape(-1, MOSAIC, size, MOSAIC, size, 3).transpose(0, 1, 3, 2, 4, 5)
    return mosaics.reshape(-1, size, size, 3)[: len(labels)], labels
