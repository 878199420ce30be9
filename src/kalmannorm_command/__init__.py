"""The console script, outside of the package: to import that takes seconds, and a Ctrl-C in them is no traceback."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """The command `kalmannorm`; until it is loaded, an interruption ends it at once, in one line."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not where signals are ignored, as behind nohup
        signal.signal(signal.SIGINT, _end)
    from kalmannorm.cli import main as command

    signal.signal(signal.SIGINT, before)
    command()


def _end(number: int, frame: FrameType | None) -> None:
    # No exception: whoever is importing might take it for a failure of his own. Nothing is under way yet.
    os.write(2, b"kalmannorm: interrupted\n")
    os._exit(130)
