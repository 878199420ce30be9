"""Sends the events of a run to the log on disk, to TensorBoard and to a `watch` function."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kalmannorm.lab.files.manifest import Entry
from kalmannorm.lab.files.records import Log, Record

Watch = Callable[[Record], None]


class Logbook:
    """Rank 0 passes a folder. On other ranks the folder is None, and nothing is written."""

    def __init__(self, folder: Path | None, watch: Watch | None, *, step: int, offset: int, tensorboard: bool) -> None:
        self.watch = watch
        self.log = Log(folder / "log.jsonl", offset) if folder is not None else None
        self.board: Any = None
        self._shown = 0.0
        if folder is not None and tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # TensorBoard hides events from `step` on that an earlier start wrote: they are written again.
            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step)

    def written(self) -> Entry:
        """Size and digest of the log so far. Only rank 0 has one."""
        assert self.log is not None
        return self.log.written()

    def write(self, event: str, step: int, **values: Any) -> None:
        if self.log is None:
            return
        self.log.write(event, step=step, **values)
        if self.board is not None:
            for name, value in _scalars(values):
                self.board.add_scalar(f"{event}/{name}", value, step)
        if self.watch is not None:
            self.watch({"event": event, "step": step, **values})

    def due(self) -> bool:
        """Whether to report progress now: at most four times per second."""
        return self.watch is not None and self.log is not None and time.monotonic() - self._shown > 0.25

    def progress(self, **values: Any) -> None:
        """Report progress to `watch`. It is not logged."""
        self._shown = time.monotonic()
        if self.watch is not None:
            self.watch({"event": "progress", **values})

    def close(self) -> None:
        if self.log is not None:
            self.log.close()
        if self.board is not None:
            self.board.close()


def _scalars(values: Record, prefix: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and name not in ("steps", "epoch"):
            found.append((prefix + name, float(value)))
    return found
