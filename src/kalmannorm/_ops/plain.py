"""A switch for each thread: PyTorch operations instead of kernels."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Plain(threading.local):
    active = False


PLAIN = _Plain()


@contextmanager
def without_kernels() -> Iterator[None]:
    """Use PyTorch operations in this thread, for runs without gradients whose numbers nobody reads.

    Kernels would be built for them, which takes far longer than the run.
    """
    before = PLAIN.active
    PLAIN.active = True
    try:
        yield
    finally:
        PLAIN.active = before
