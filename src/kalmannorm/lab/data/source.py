"""The interface of a data set before it is loaded: its sizes, whether it exists, how to download and load it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

from kalmannorm.lab.data.files import DamagedDataError, MissingDataError, Say
from kalmannorm.lab.data.protocol import Data

DataState = Literal["ready", "missing", "damaged"]


@dataclass(frozen=True)
class Options:
    """The arguments of `kalmannorm.lab.data.load` that every data set takes."""

    device: torch.device
    image_size: int | None = None
    train_examples: int | None = None
    test_examples: int | None = None
    workers: int = 4
    seed: int = 0


class Source(Protocol):
    """A data set by name. Sizes are None if they depend on the user's own files."""

    @property
    def name(self) -> str: ...
    @property
    def classes(self) -> int | None: ...
    @property
    def image_size(self) -> int | None: ...
    @property
    def train_size(self) -> int | None: ...
    @property
    def test_size(self) -> int | None: ...

    def where(self, root: Path) -> Path | None:
        """The folder of the data set. None if it needs none."""
        ...

    def look(self, root: Path) -> None:
        """Raise MissingDataError or DamagedDataError if a quick check finds a problem."""
        ...

    def check(self, root: Path) -> None:
        """Read everything and compare checksums, if there are any. Raises the same errors."""
        ...

    def counted(self, root: Path) -> Source:
        """The same data set, with missing sizes counted from its files. Listing them may take a while."""
        ...

    def fetch(self, root: Path, say: Say) -> None:
        """Download it to `root` and verify it."""
        ...

    def load(self, root: Path, options: Options) -> Data: ...


def state(source: Source, root: Path, *, thorough: bool = False) -> tuple[DataState, str]:
    """The state of a data set, and a line that says what to do."""
    try:
        source.check(root) if thorough else source.look(root)
    except MissingDataError as error:
        return "missing", str(error)
    except DamagedDataError as error:
        return "damaged", str(error)
    return "ready", ""
