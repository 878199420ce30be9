"""What the lab knows of a data set before it is read: its sizes, whether it is there, how to get and to load it."""

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
    """A data set by name. Sizes are None where only the user's own files tell."""

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
        """The folder it lies in; None: it needs none."""
        ...

    def look(self, root: Path) -> None:
        """Raise MissingDataError or DamagedDataError if a quick look finds something wrong."""
        ...

    def check(self, root: Path) -> None:
        """The same by reading everything and comparing checksums, where there are any."""
        ...

    def counted(self, root: Path) -> Source:
        """The same, with the sizes that its files tell where nothing else does; they may take a while to list."""
        ...

    def fetch(self, root: Path, say: Say) -> None:
        """Bring it to `root`, verified."""
        ...

    def load(self, root: Path, options: Options) -> Data: ...


def state(source: Source, root: Path, *, thorough: bool = False) -> tuple[DataState, str]:
    """How a data set is, and the line that says what to do about it."""
    try:
        source.check(root) if thorough else source.look(root)
    except MissingDataError as error:
        return "missing", str(error)
    except DamagedDataError as error:
        return "damaged", str(error)
    return "ready", ""
