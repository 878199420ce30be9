"""Small data sets: all images are on the device, and are normalized and augmented there in batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kalmannorm.lab.data.protocol import Batch
from kalmannorm.lab.data.randomness import epoch_order, generator, stratified
from kalmannorm.lab.data.sharing import batch_count, share, spans
from kalmannorm.lab.data.source import Options, Source
from kalmannorm.lab.machine.memory import check_fits


@dataclass(frozen=True)
class Split:
    """Images (N, C, H, W), uint8 or float32, and labels (N,), int64."""

    images: Tensor
    labels: Tensor

    def subset(self, count: int | None, seed: int) -> Split:
        """`count` examples, with the same share of each class, and equal in all runs."""
        chosen = stratified(self.labels, count, seed)
        return self if len(chosen) == len(self.labels) else Split(self.images[chosen], self.labels[chosen])

    def resized(self, size: int | None) -> Split:
        """Images scaled once to `size` × `size`, with antialiasing. None keeps the images."""
        if size is None or tuple(self.images.shape[2:]) == (size, size):
            return self
        parts = []
        for start in range(0, len(self.images), 1024):
            part = self.images[start : start + 1024]
            scaled = F.interpolate(part.float(), (size, size), mode="bilinear", antialias=True, align_corners=False)
            parts.append(scaled if part.is_floating_point() else scaled.round().clamp(0, 255).to(part.dtype))
        return Split(torch.cat(parts), self.labels)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel, (C,), over all pixels of uint8 images."""
        channels = self.images.shape[1]
        counts = torch.zeros(channels, 256, dtype=torch.float64)
        for start in range(0, len(self.images), 1024):  # counting makes an int64 copy
            part = self.images[start : start + 1024]
            for channel in range(channels):
                counts[channel] += torch.bincount(part[:, channel].flatten(), minlength=256)
        shares, values = counts / counts.sum(1, keepdim=True), torch.arange(256.0, dtype=torch.float64)
        mean = shares @ values
        return mean, (shares @ values**2 - mean**2).sqrt()

    def to(self, device: torch.device) -> Split:
        return Split(self.images.to(device), self.labels.to(device))


class Resident:
    """A data set on the device.

    Args:
        mean, std: (C,), for the normalization of images.
        padding: augment by padding with this many mean pixels, a random crop and a random flip; 0: no augmentation.
    """

    def __init__(
        self,
        name: str,
        classes: int,
        train: Split,
        test: Split,
        *,
        mean: Tensor,
        std: Tensor,
        padding: int,
        device: torch.device,
    ) -> None:
        self.name, self.classes, self.padding, self.device = name, classes, padding, device
        channels, height, width = train.images.shape[1:]
        self.shape = (int(channels), int(height), int(width))
        self.train_size, self.test_size = len(train.labels), len(test.labels)
        self._train, self._test = train.to(device), test.to(device)
        self.mean, self.std = (value.float().view(-1, 1, 1).to(device) for value in (mean, std))

    @classmethod
    def chosen(
        cls, source: Source, train: Split, test: Split, options: Options, *, mean: Tensor, std: Tensor, padding: int
    ) -> Resident:
        """The examples and the image size from the options. The padding grows with the image size."""
        assert source.classes is not None
        size = options.image_size
        train, test = (
            split.subset(count, options.seed)
            for split, count in ((train, options.train_examples), (test, options.test_examples))
        )
        if size is not None:
            shape = (len(train.labels) + len(test.labels), train.images.shape[1], size, size)
            what = f"{shape[0]:,} images of {size}×{size}"
            remedy = "use a smaller --image-size, or fewer --train-examples"
            check_fits(what, shape, train.images.element_size(), remedy)
        return cls(
            source.name,
            source.classes,
            train.resized(size),
            test.resized(size),
            mean=mean,
            std=std,
            padding=round(padding * size / train.images.shape[2]) if size else padding,
            device=options.device,
        )

    def train_batches(
        self, size: int, *, seed: int, epoch: int, start: int = 0, augment: bool = True, rank: int = 0, ranks: int = 1
    ) -> Iterator[Batch]:
        count, mine = batch_count(self.name, self.train_size, size), share(size, rank, ranks)
        return self._train_batches(size, range(start, count), mine, seed, epoch, augment and self.padding > 0)

    def _train_batches(
        self, size: int, numbers: range, mine: slice, seed: int, epoch: int, augmented: bool
    ) -> Iterator[Batch]:
        order = epoch_order(self.train_size, seed, epoch)[numbers.start * size : numbers.stop * size]
        moves = [draw(size, self.padding, generator("augment", seed, epoch, i)) for i in numbers] if augmented else []
        # The random choices of the whole epoch are transferred at once, so that no step waits for them.
        chosen = order.view(-1, size)[:, mine].to(self.device)
        drawn = torch.stack(moves)[:, mine].to(self.device) if moves else None
        for i, positions in enumerate(chosen):
            images, labels = self._batch(self._train, positions)
            yield (images if drawn is None else crop_and_flip(images, drawn[i], self.padding)), labels

    def plain_batches(self, size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        return (self._batch(self._train, part) for part in spans(self.train_size, size, rank, ranks))

    def test_batches(self, size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        return (self._batch(self._test, part) for part in spans(self.test_size, size, rank, ranks))

    def _batch(self, split: Split, chosen: Tensor | slice) -> Batch:
        return (split.images[chosen].float() - self.mean) / self.std, split.labels[chosen]


def draw(count: int, padding: int, rng: torch.Generator) -> Tensor:
    """(count, 3): top and left of the crop in the padded image, and whether it is flipped."""
    corners = torch.randint(0, 2 * padding + 1, (count, 2), generator=rng)
    return torch.cat((corners, torch.randint(0, 2, (count, 1), generator=rng)), 1)


def crop_and_flip(images: Tensor, moves: Tensor, padding: int) -> Tensor:
    """Pad each image of a batch with zeros, crop it and perhaps flip it, as its row of `moves` says."""
    N, C, H, W = images.shape
    top, left, flip = moves.unbind(1)
    rows = top.view(N, 1) + torch.arange(H, device=images.device)
    columns = left.view(N, 1) + torch.arange(W, device=images.device)
    columns = torch.where(flip.view(N, 1) > 0, columns.flip(1), columns)
    index = rows.unsqueeze(2) * (W + 2 * padding) + columns.unsqueeze(1)
    padded = F.pad(images, (padding,) * 4).flatten(2)
    return padded.gather(2, index.view(N, 1, -1).expand(N, C, -1)).view(N, C, H, W)
