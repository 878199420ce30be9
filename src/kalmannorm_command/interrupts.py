"""Ctrl-C while modules are imported: one line and status 130, never a traceback."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ending_at_once() -> Iterator[None]:
    """While entered, a Ctrl-C ends the process at once. Nothing may be under way that needs an orderly end."""
    before = signal.getsignal(signal.SIGINT)
    # Signals may be ignored, as behind nohup, or handled by a program that calls `run`. Then they stay so.
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: FrameType | None) -> None:
    # An exception would not do: the module that is being imported might catch it as a failure of its own import.
    os.write(2, b"kalmannorm: interrupted\n")
    os._exit(130)
