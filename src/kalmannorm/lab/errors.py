"""What a user can mend: shown as one line, without a traceback."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class LabError(Exception):
    """A mistake or a mishap that the message says how to mend; `status` is what the command then exits with."""

    status = 2


class FullDiskError(LabError):
    """There is no space left; `problem` says where, without what to do about it."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}: free some, then run the same command again")
        self.problem = problem

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problem,)


class DamagedError(LabError):
    """A file is not what was written; `problem` says which and what was found, without what to do about it."""

    def __init__(self, path: Path, found: str, remedy: str) -> None:
        self.problem, self.found = f"{path} is damaged ({found})", found
        super().__init__(f"{self.problem}: {remedy}")
        self._given = path, found, remedy

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._given  # ranks send errors to each other


class DivergedError(LabError):
    """The loss is no longer a number; what was finished before is kept."""

    status = 3


class Interrupted(LabError):  # noqa: N818 - no mistake of anyone's
    """A run was asked to stop by a signal, and can go on from the checkpoint that it saved."""

    status = 130


def tell(text: str) -> None:
    """One line on stderr; once, not once per rank."""
    if os.environ.get("RANK", "0") == "0":
        print(f"kalmannorm: {text}", file=sys.stderr)


def first_line(error: Exception) -> str:
    """Of what an exception says, or its name where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def one_of(what: str, given: str, choices: Iterable[str]) -> str:
    """`given`, if it is among the choices; else an error that names the nearest."""
    known = sorted(choices)
    if given in known:
        return given
    close = difflib.get_close_matches(given, known, 1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    raise LabError(f"unknown {what} {given!r}; {meant}choose from: {', '.join(known)}")


_TYPED = {"warmup_epochs": "--warmup", "width": "width"}
"""Fields of a recipe whose option has another name; the width has no option."""


def option(name: str) -> str:
    """How a field of a recipe or an execution is given on the command line."""
    return _TYPED.get(name) or f"--{name.replace('_', '-')}"


def useless(name: str, who: str) -> str:
    """The line that says that a field of a recipe does nothing for a method."""
    return f"{option(name)} does nothing for {who}: leave it out, or choose another method"
