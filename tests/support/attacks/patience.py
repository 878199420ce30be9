"""A time limit for one attack: what takes longer counts as a hang."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class HangError(BaseException):
    """It took too long; no `Exception`, so that nothing that is attacked can catch it."""


@contextmanager
def patience(seconds: int, release: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Raise `HangError` after so many seconds; `release` is called before, to end waits that Python cannot."""

    def late(*_: Any) -> None:
        release()
        raise HangError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
