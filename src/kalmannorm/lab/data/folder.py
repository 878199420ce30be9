"""Image folders, such as ImageNet: train/ and val/, each with a folder of images per class."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kalmannorm.lab.data import decoding
from kalmannorm.lab.data.files import MissingDataError, Say
from kalmannorm.lab.data.randomness import generator, stratified
from kalmannorm.lab.data.source import Options
from kalmannorm.lab.data.streaming import Files, Streaming

PREFIX = "folder:"


@dataclass(frozen=True)
class ImageFolders:
    """The image folder at `path`, or the folder `name` in the data root."""

    name: str
    path: Path | None = None
    classes: int | None = None
    image_size: int = 224
    train_size: int | None = None
    test_size: int | None = None

    def where(self, root: Path) -> Path:
        return root / self.name if self.path is None else self.path

    def look(self, root: Path) -> None:
        self._class_names(root)

    def _class_names(self, root: Path) -> list[str]:
        """The class names, from folders only, because listing the files of ImageNet takes long."""
        home = self.where(root)
        if not home.is_dir():
            remedy = "put your copy there" if self.path is None else "give the path of a folder with train/ and val/"
            raise MissingDataError(f"there is no folder {home}: {remedy}")
        parts = [home / part for part in ("train", "val")]
        names = [
            sorted(path.name for path in part.iterdir() if path.is_dir()) if part.is_dir() else [] for part in parts
        ]
        for part, found in zip(parts, names, strict=True):
            if not found:
                raise MissingDataError(f"{part} must contain a folder of images per class")
        if names[0] != names[1]:
            odd = sorted(set(names[0]) ^ set(names[1]))
            raise MissingDataError(f"{parts[0]} and {parts[1]} must contain the same classes; only one has {odd[0]}")
        return names[0]

    def check(self, root: Path) -> None:
        self.look(root)
        for part in ("train", "val"):
            decoding.check(self._files(root, part)[0])

    def counted(self, root: Path) -> ImageFolders:
        train, test = (len(self._files(root, part)[0]) for part in ("train", "val"))
        return replace(self, classes=len(self._class_names(root)), train_size=train, test_size=test)

    def fetch(self, root: Path, say: Say) -> None:
        self.look(root)

    def load(self, root: Path, options: Options) -> Streaming:
        from torchvision.transforms import v2

        classes = len(self._class_names(root))
        size = options.image_size or self.image_size
        crop: list[torch.nn.Module] = [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
        center: list[torch.nn.Module] = [v2.Resize(round(size * 256 / 224), antialias=True), v2.CenterCrop(size)]
        train, test = (
            self._shuffled(root, part, count, options.seed)
            for part, count in (("train", options.train_examples), ("val", options.test_examples))
        )
        return Streaming(
            self.name,
            classes,
            train,
            test,
            image_size=size,
            train_transform=v2.Compose([*crop, v2.PILToTensor()]),
            test_transform=v2.Compose([*center, v2.PILToTensor()]),
            workers=options.workers,
            device=options.device,
        )

    def _shuffled(self, root: Path, part: str, count: int | None, seed: int) -> Files:
        """The files in a fixed random order. In the order of classes, the examples of a group would be too similar."""
        files = Files(*self._files(root, part))
        files = files.subset(stratified(files.labels, count, seed))
        return files.subset(torch.randperm(len(files), generator=generator("files", part)))

    def _files(self, root: Path, part: str) -> tuple[list[str], list[int]]:
        paths: list[str] = []
        labels: list[int] = []
        for label, name in enumerate(self._class_names(root)):
            folder = self.where(root) / part / name
            found = images_in(folder)
            if not found:
                raise MissingDataError(f"{folder} contains no images: add some, or delete this folder")
            paths += found
            labels += [label] * len(found)
        return paths, labels


def images_in(folder: Path) -> list[str]:
    """Files with the names of images, at any depth, in the order of torchvision's `ImageFolder`.

    Links are followed. No folder is entered twice, and none that contains this folder, because links may form cycles.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS

    met = {_identity(parent) for parent in folder.absolute().parents}
    found: list[tuple[str, list[str]]] = []
    for home, folders, files in os.walk(folder, followlinks=True):
        own = _identity(home)
        if own in met:
            folders.clear()
            continue
        met.add(own)
        folders.sort()
        found.append((home, sorted(name for name in files if name.lower().endswith(IMG_EXTENSIONS))))
    return [os.path.join(home, name) for home, names in sorted(found) for name in names]


def _identity(folder: str | Path) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino
