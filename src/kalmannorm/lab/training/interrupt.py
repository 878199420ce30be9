"""Ctrl-C and SIGTERM end a run after the current step, with a checkpoint."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

import torch

from kalmannorm.lab.errors import Interrupted
from kalmannorm.lab.training.fabric import Fabric


class Signals:
    """While entered, the first SIGINT or SIGTERM is only recorded. A second Ctrl-C stops the run at once.

    After a Ctrl-C `torchrun` also sends a SIGTERM. So a second signal within one second is ignored.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.since is None:
            self.since = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self.since > 1:
            raise Interrupted("stopped at once; --resume continues from the last checkpoint")

    def stop(self, fabric: Fabric) -> bool:
        """Whether any rank got a signal. All ranks get the same answer, so they end at the same step."""
        asked = self.since is not None
        if fabric.world_size == 1:
            return asked
        return bool(fabric.all_reduce(torch.tensor(float(asked), device=fabric.device), reduce_op="sum"))
