"""Large data sets: worker processes read and augment image files while the device computes.

The result for a file depends on (seed, epoch, its index) alone. So the number of workers, and the batch at which an
epoch is resumed, have no effect. Workers return bytes, which become normalized floats on the device.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kalmannorm.lab.data import decoding
from kalmannorm.lab.data.protocol import Batch
from kalmannorm.lab.data.randomness import epoch_order, generator
from kalmannorm.lab.data.sharing import batch_count, share, spans
from kalmannorm.lab.errors import LabError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Those of ImageNet, which pretrained models expect."""
AHEAD = 4
"""Batches that each worker reads ahead."""

Transform = Callable[[Any], Tensor]
"""From a PIL image to bytes (3, H, W)."""


class Files:
    """Paths and labels in two arrays. Lists of a million objects would gradually be copied into every worker."""

    def __init__(self, paths: Sequence[str], labels: Sequence[int]) -> None:
        self._paths: NDArray[np.bytes_] = np.array([os.fsencode(path) for path in paths])
        self.labels = torch.tensor(labels, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[str, int]:
        return os.fsdecode(bytes(self._paths[index])), int(self.labels[index])

    def subset(self, chosen: Tensor) -> Files:
        files = Files.__new__(Files)
        files._paths, files.labels = self._paths[chosen.numpy()], self.labels[chosen]
        return files


class _Examples(Dataset[Any]):
    """(bytes, label) of a file, or its error. An exception would come back as a worker's traceback."""

    def __init__(self, files: Files, transform: Transform, place: tuple[int, int] | None) -> None:
        self.files, self.transform, self.place = files, transform, place

    def __getitem__(self, index: int) -> tuple[Tensor, int] | LabError:
        path, label = self.files[index]
        try:
            image = decoding.opened(path)
        except LabError as error:
            return error
        if self.place is None:
            return self.transform(image), label
        # torchvision's transforms use the global generator. It is seeded for them and restored afterwards.
        before = torch.get_rng_state()
        torch.set_rng_state(generator("image", *self.place, index).get_state())
        try:
            return self.transform(image), label
        finally:
            torch.set_rng_state(before)


def _collate(examples: list[tuple[Tensor, int] | LabError]) -> Batch | LabError:
    for example in examples:
        if isinstance(example, LabError):
            return example
    images, labels = zip(*examples, strict=True)
    return torch.stack(images), torch.tensor(labels)


def _leave_interrupts_to_the_main_process(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _read(loader: DataLoader[Any]) -> Iterator[Batch | LabError]:
    """The batches of a loader. If a worker dies, the error is one line."""
    batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            reason = str(error).splitlines()[0]
            raise LabError(f"{reason}: if memory was short, use fewer --workers or a smaller --image-size") from error
        yield batch


class Streaming:
    """A data set in files.

    Args:
        train_transform: includes augmentation; `test_transform` does not.
        workers: processes that read files; 0 reads in this process. No more are started than there are cores.
    """

    def __init__(
        self,
        name: str,
        classes: int,
        train: Files,
        test: Files,
        *,
        image_size: int,
        train_transform: Transform,
        test_transform: Transform,
        workers: int,
        device: torch.device,
    ) -> None:
        self.name, self.classes, self.device = name, classes, device
        self.shape = (3, image_size, image_size)
        self.train_size, self.test_size = len(train), len(test)
        self._train, self._test = train, test
        self._train_transform, self._test_transform = train_transform, test_transform
        self.workers = min(workers, os.cpu_count() or 1)
        self.mean, self.std = (255 * torch.tensor(value, device=device).view(3, 1, 1) for value in (MEAN, STD))

    def train_batches(
        self, size: int, *, seed: int, epoch: int, start: int = 0, augment: bool = True, rank: int = 0, ranks: int = 1
    ) -> Iterator[Batch]:
        count, mine = batch_count(self.name, self.train_size, size), share(size, rank, ranks)
        order = epoch_order(self.train_size, seed, epoch)[start * size : count * size]
        batches = order.view(-1, size)[:, mine].tolist()
        if augment:
            return self._stream(_Examples(self._train, self._train_transform, (seed, epoch)), batches)
        return self._stream(_Examples(self._train, self._test_transform, None), batches)

    def plain_batches(self, size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        return self._in_order(self._train, size, rank, ranks)

    def test_batches(self, size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        return self._in_order(self._test, size, rank, ranks)

    def _in_order(self, files: Files, size: int, rank: int, ranks: int) -> Iterator[Batch]:
        batches = [list(range(len(files))[span]) for span in spans(len(files), size, rank, ranks)]
        return self._stream(_Examples(files, self._test_transform, None), batches)

    def _stream(self, examples: _Examples, batches: list[list[int]]) -> Iterator[Batch]:
        loader = DataLoader(
            examples,
            batch_sampler=batches,
            num_workers=self.workers,
            collate_fn=_collate,
            pin_memory=self.device.type == "cuda",
            prefetch_factor=AHEAD if self.workers else None,
            worker_init_fn=_leave_interrupts_to_the_main_process,
            generator=torch.Generator(),  # otherwise the loader would use the global one
        )
        for batch in _read(loader):
            if isinstance(batch, LabError):
                raise batch
            images, labels = (part.to(self.device, non_blocking=True) for part in batch)
            yield (images.float() - self.mean) / self.std, labels
