"""Tiny-ImageNet: 200 classes of ImageNet at 64×64, with 500 training and 50 test images each.

    tiny-imagenet-200/train/n01443537/images/n01443537_0.JPEG
    tiny-imagenet-200/val/images/val_0.JPEG, with the class of each in tiny-imagenet-200/val/val_annotations.txt

The images are decoded once, into tiny-imagenet-200.npz beside the folder. This file contains the names and sizes of all
images. If the folder changes, it is decoded again.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import sys
import urllib.error
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kalmannorm.lab.data import decoding
from kalmannorm.lab.data.files import DamagedDataError, MissingDataError, Say, arriving, remedy
from kalmannorm.lab.data.randomness import generator
from kalmannorm.lab.data.resident import Resident, Split
from kalmannorm.lab.data.source import Options
from kalmannorm.lab.errors import LabError

URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
MD5 = "90528d7ca1a48142e341f4ef8d21d0de"


class Listing(NamedTuple):
    """Files and their labels."""

    paths: list[Path]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class TinyImageNet:
    name: str = "tiny-imagenet"
    classes: int = 200
    image_size: int = 64
    per_class: int = 500
    test_size: int = 10_000
    folder: str = "tiny-imagenet-200"

    @property
    def train_size(self) -> int:
        return self.classes * self.per_class

    def where(self, root: Path) -> Path:
        return root / self.folder

    def look(self, root: Path) -> None:
        self._listings(root)

    def check(self, root: Path) -> None:
        for listing in self._listings(root):
            decoding.pixels(listing.paths, self.image_size)

    def counted(self, root: Path) -> TinyImageNet:
        return self

    def load(self, root: Path, options: Options) -> Resident:
        train, test = self._decoded(root)
        mean, std = train.moments()
        return Resident.chosen(self, train, test, options, mean=mean, std=std, padding=8)

    def fetch(self, root: Path, say: Say) -> None:
        from torchvision.datasets.utils import download_and_extract_archive

        say(f"{self.name}: {URL}")
        try:
            with arriving(self.where(root)) as folder, contextlib.redirect_stdout(sys.stderr):
                download_and_extract_archive(URL, str(folder), md5=MD5)
                self.look(folder)
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, RuntimeError) as error:
            raise LabError(
                f"{self.name} could not be downloaded ({error}): put the folder {self.folder} from {URL} into {root}"
            ) from error

    def _damaged(self, path: Path, why: str, root: Path) -> DamagedDataError:
        return DamagedDataError(f"{path} is damaged ({why}): repair it with {remedy(self.name, root)}")

    def _listings(self, root: Path) -> tuple[Listing, Listing]:
        """Training and test files. An error if their number or names are wrong."""
        base = self.where(root)
        train, annotations = base / "train", base / "val" / "val_annotations.txt"
        if not train.is_dir() or not annotations.is_file():
            lacking = annotations if train.is_dir() else train
            raise MissingDataError(f"there is no {lacking}: get it with {remedy(self.name, root)}")
        names = sorted(path.name for path in train.iterdir() if path.is_dir())
        if len(names) != self.classes:
            raise self._damaged(train, f"{len(names)} classes instead of {self.classes}", root)
        paths = []
        for name in names:
            found = sorted((train / name / "images").glob("*.JPEG"))
            if len(found) != self.per_class:
                raise self._damaged(train / name, f"{len(found)} images instead of {self.per_class}", root)
            paths += found
        # In the order of classes, the examples of a group would be too similar.
        order = torch.randperm(len(paths), generator=generator(self.name)).tolist()
        labels = np.arange(self.classes).repeat(self.per_class)
        return Listing([paths[i] for i in order], labels[order]), self._test_listing(root, annotations, names)

    def _test_listing(self, root: Path, annotations: Path, names: list[str]) -> Listing:
        label_of = {name: label for label, name in enumerate(names)}
        there = {path.name for path in (annotations.parent / "images").glob("*.JPEG")}
        try:
            rows = [line.split("\t")[:2] for line in annotations.read_text(encoding="utf-8").splitlines()]
            labels = np.array([label_of[name] for _, name in rows], np.int64)
        except (KeyError, ValueError):
            raise self._damaged(annotations, "a line does not name a file and its class", root) from None
        if len(rows) != self.test_size or not there.issuperset(file for file, _ in rows):
            raise self._damaged(annotations.parent, f"some of its {self.test_size:,} images are missing", root)
        return Listing([annotations.parent / "images" / file for file, _ in rows], labels)

    def _decoded(self, root: Path) -> tuple[Split, Split]:
        listings = self._listings(root)
        fingerprint = _fingerprint(listings)
        cache = root / f"{self.folder}.npz"
        arrays = _read_cache(cache, fingerprint)
        if arrays is None:
            arrays = [decoding.pixels(listing.paths, self.image_size) for listing in listings]
            _write_cache(cache, fingerprint, arrays)
        train, test = (
            Split(torch.from_numpy(images), torch.from_numpy(listing.labels))
            for images, listing in zip(arrays, listings, strict=True)
        )
        return train, test


def _fingerprint(listings: tuple[Listing, Listing]) -> str:
    found = hashlib.sha256()
    for listing in listings:
        for path in listing.paths:
            found.update(f"{path.name} {path.stat().st_size}\n".encode())
    return found.hexdigest()


def _read_cache(path: Path, fingerprint: str) -> list[NDArray[np.uint8]] | None:
    """The cached arrays. None if there is no cache, if it belongs to other files, or if it is damaged."""
    if not path.is_file():
        return None
    try:
        with np.load(path) as saved:
            if str(saved["fingerprint"]) == fingerprint:
                return [saved["train"], saved["test"]]
    except Exception:  # a damaged file may raise anything
        pass
    return None


def _write_cache(path: Path, fingerprint: str, arrays: list[NDArray[np.uint8]]) -> None:
    """Write the cache. If the disk is full or read-only, the images are decoded again next time."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            np.savez(file, fingerprint=fingerprint, train=arrays[0], test=arrays[1])
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
