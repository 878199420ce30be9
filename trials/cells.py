"""The cells of the trials: a data set and a network.

The images come from packs, see `pack.py`. Digits come with scikit-learn. Forms are chosen on a held-out tenth of the
training images. The test images are only used to confirm what was chosen.

| cell | network | images |
| --- | --- | --- |
| `cifar10`, `cifar100` | CIFAR Inception, the paper's | CIFAR-10, CIFAR-100 |
| `cifar10-wide`, `cifar100-wide` | the same, widened to the parameters of BKN learned | the same |
| `cifar10-small` | CIFAR Inception | 4,000 training images of CIFAR-10, for batches of 1 to 4 |
| `cifar10-resnet32` | ResNet-32 of the authors' code | CIFAR-10 |
| `tiny100` | ResNet-18 | 100 classes of Tiny-ImageNet |
| `tiny100-inception` | BN-Inception, in the role of the paper's Inception-v2 | the same |
| `digits` | digits-net | the lab's digits, for trials on a CPU |
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

from kalmannorm.lab.data.digits import Digits
from kalmannorm.lab.experiments.widths import matching_width
from kalmannorm.lab.models.bn_inception import BNInception
from kalmannorm.lab.models.cifar_inception import CifarInception
from kalmannorm.lab.models.cifar_resnet import CifarResNet
from kalmannorm.lab.models.digits_net import DigitsNet

BATCH = 128
MOSAIC = 10
"""Images per edge of a packed mosaic."""


@dataclass(frozen=True)
class Cell:
    """A network on a data set, and how it is trained."""

    name: str
    images: str
    """The data set, which names the packs."""
    net: Callable[[], nn.Module]
    size: int
    padding: int
    epochs: int
    rate: float = 0.1
    decay: float = 5e-4
    count: int | None = None
    """Images to train on, the same in every run. None: all."""
    channels: int = 3
    flips: bool = True
    """Whether half of the training images are mirrored."""
    step: float = 0.0
    """Milliseconds of a step of 128 images on an H200, with other runs beside it, to plan a queue. 0: not measured."""

    @property
    def packs(self) -> tuple[str, ...]:
        """Of the training images. Digits need none."""
        return () if self.images == "digits" else (f"{self.images}-a", f"{self.images}-b")


@dataclass(frozen=True)
class Data:
    """Images (N, C, H, W) uint8 and labels (N,) on the device; `scale` and `shift` normalize a channel.

    `held`: the images to score, which are not trained on. `test`: the test images, if runs are scored on both.
    """

    train: Tensor
    train_labels: Tensor
    held: Tensor
    held_labels: Tensor
    scale: Tensor
    shift: Tensor
    test: Tensor | None = None
    test_labels: Tensor | None = None

    def prepared(self, images: Tensor) -> Tensor:
        return (images.float() * self.scale + self.shift).contiguous(memory_format=torch.channels_last)


def _resnet18() -> nn.Module:
    """torchvision's ResNet-18, with a 3×3 stem of stride 1 for 64×64 images."""
    from torchvision.models import resnet18

    model = resnet18(num_classes=100)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    return model


def _wide(classes: int) -> nn.Module:
    """CIFAR Inception with batch norm and as many parameters as with BKN learned."""
    with torch.random.fork_rng(devices=[]):  # only the first call searches
        width = matching_width("cifar-inception", classes, (3, 32, 32))
    return CifarInception(classes, 3, width)


CELLS = {
    "cifar10": Cell("cifar10", "cifar10", lambda: CifarInception(10), 32, 4, 15, step=1.9),
    "cifar100": Cell("cifar100", "cifar100", lambda: CifarInception(100), 32, 4, 15, step=1.9),
    "cifar10-wide": Cell("cifar10-wide", "cifar10", lambda: _wide(10), 32, 4, 15, step=4.5),
    "cifar100-wide": Cell("cifar100-wide", "cifar100", lambda: _wide(100), 32, 4, 15, step=4.5),
    "cifar10-small": Cell("cifar10-small", "cifar10", lambda: CifarInception(10), 32, 4, 4, count=4000),
    "cifar10-resnet32": Cell("cifar10-resnet32", "cifar10", lambda: CifarResNet(32, 10), 32, 4, 15, step=2.2),
    "tiny100": Cell("tiny100", "tiny100", _resnet18, 64, 8, 15, step=3.4),
    "tiny100-inception": Cell("tiny100-inception", "tiny100", lambda: BNInception(100), 64, 8, 15),
    "digits": Cell("digits", "digits", lambda: DigitsNet(10), 8, 0, 15, channels=1, flips=False),
}


def load(cell: Cell, folder: Path, device: torch.device, *, test: bool = False, both: bool = False) -> Data:
    """The training set of the cell, with every tenth image of each class held out.

    `test`: all training images, and the test images to score. `both`: the held-out images and the test images.
    """
    missing = absent(cell, folder, test=test or both)
    if missing:
        raise FileNotFoundError(f"no pack {missing[0]} in {folder}: make it with trials/pack.py")
    if not cell.packs:
        (images, labels), tested = ((part.images.to(torch.uint8), part.labels) for part in Digits().read())
        return split(images, labels, _shuffled(*tested) if test or both else None, test=test, device=device)
    images, labels = unpacked(cell.packs, folder, cell.size)
    tested = unpacked((f"{cell.images}-test",), folder, cell.size) if test or both else None
    return split(images, labels, None if tested is None else _shuffled(*tested), test=test, device=device)


def absent(cell: Cell, folder: Path, *, test: bool) -> list[str]:
    """Packs of this cell that are not in the folder."""
    names = [*cell.packs, *([f"{cell.images}-test"] if cell.packs and test else [])]
    return [name for name in names if not (folder / f"{name}.npz").is_file()]


def split(
    images: Tensor, labels: Tensor, tested: tuple[Tensor, Tensor] | None, *, test: bool, device: torch.device
) -> Data:
    """Train, and score on a held-out tenth and the test images if they are given; or on the test images alone."""
    if test:
        assert tested is not None
        train, train_labels, (held, held_labels), tested = images, labels, tested, None
    else:
        place = torch.zeros_like(labels)
        for label in labels.unique():
            mine = labels == label
            place[mine] = torch.arange(int(mine.sum()))
        chosen = place % 10 == 9
        train, train_labels = images[~chosen], labels[~chosen]
        held, held_labels = _shuffled(images[chosen], labels[chosen])
    values = train[::8].float()
    mean, std = values.mean((0, 2, 3)), values.std((0, 2, 3))
    scale, shift = (1 / std).view(1, -1, 1, 1), (-mean / std).view(1, -1, 1, 1)
    tensors = train, train_labels, held, held_labels, scale, shift, *(tested or ())
    return Data(*(tensor.to(device) for tensor in tensors))


def subset(labels: Tensor, count: int | None) -> Tensor:
    """The numbers of `count` images, with the same share of each class, in random order. None: of all, in order."""
    if count is None or count >= len(labels):
        return torch.arange(len(labels))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    by_class = order[labels.cpu()[order].argsort(stable=True)]
    spread = torch.linspace(0, len(labels) - 1, count).round().long()
    chosen: Tensor = by_class[spread]
    return chosen


def made_up(cell: Cell, count: int, device: torch.device, *, test: bool = False, both: bool = False) -> Data:
    """Random images of the cell's size in two classes, for a dry run."""
    generator = torch.Generator().manual_seed(0)

    def some(number: int) -> tuple[Tensor, Tensor]:
        images = torch.randint(
            0, 256, (number, cell.channels, cell.size, cell.size), generator=generator, dtype=torch.uint8
        )
        return images, torch.arange(number) % 2

    images, labels = some(count)
    return split(images, labels, some(16) if test or both else None, test=test, device=device)


def _shuffled(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """In the order of classes, the examples of a group would be too similar."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], labels[order]


def unpacked(packs: tuple[str, ...], folder: Path, size: int) -> tuple[Tensor, Tensor]:
    """Images (N, C, H, W) uint8 and labels of these packs, one after another."""
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
