"""The paths on which norms feed a call of a norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Path(NamedTuple):
    """One way in which norms feed a call.

    The number of the call, the step of the prior, posteriors that it reads, and norms that must have run, by their
    first calls.
    """

    call: int
    target: int | None
    sources: tuple[int, ...]
    needs: frozenset[int]


def longest(paths: Sequence[Path], ran: dict[int, int]) -> int:
    """The index of the path with the most norms, all of which ran. Of several, the one whose last norm ran last.

    -1 if there is none.
    """
    best, found = (-1, -1), -1
    for index, path in enumerate(paths):  # simple enough for compilers
        latest = -1
        for norm in path.needs:
            if norm not in ran:
                break
            latest = max(latest, ran[norm])
        else:
            if (len(path.needs), latest) > best:
                best, found = (len(path.needs), latest), index
    return found
