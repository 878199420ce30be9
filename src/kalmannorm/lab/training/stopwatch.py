"""Measures training time, without evaluation and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Runs inside `running()`, except inside `paused()`."""

    def __init__(self) -> None:
        self._before = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        return self._before + (0.0 if self._since is None else time.perf_counter() - self._since)

    @seconds.setter
    def seconds(self, value: float) -> None:
        self._before = value

    @contextmanager
    def running(self) -> Iterator[None]:
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._before, self._since = self.seconds, None

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._before, self._since = self.seconds, None
        try:
            yield
        finally:
            self._since = time.perf_counter()
