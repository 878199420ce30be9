"""Errors that a user can fix. The command shows them as one line, without a traceback."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class LabError(Exception):
    """A problem whose message says how to fix it. `status` is the exit status of the command."""

    status = 2


class FullDiskError(LabError):
    """The disk is full. `problem` is the message without the remedy."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}: free some, then run the same command again")
        self.problem = problem

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problem,)


class DamagedError(LabError):
    """A file differs from what was written. `problem` is the message without the remedy."""

    def __init__(self, path: Path, found: str, remedy: str) -> None:
        self.problem, self.found = f"{path} is damaged ({found})", found
        super().__init__(f"{self.problem}: {remedy}")
        self._given = path, found, remedy

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._given  # makes it picklable: ranks send errors to each other


class DivergedError(LabError):
    """The loss is NaN or infinite. Results so far are kept."""

    status = 3


class Interrupted(LabError):  # noqa: N818 - it is no error
    """A signal stopped the run. The run can be resumed from the checkpoint that it saved."""

    status = 130


def first_rank() -> bool:
    """Whether this process prints: it is rank 0 of torchrun or srun, or has no launcher."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def tell(text: str) -> None:
    """Print one line on stderr, on rank 0 only."""
    if first_rank():
        print(f"kalmannorm: {text}", file=sys.stderr)


def first_line(error: Exception) -> str:
    """The first line of an exception's message, or the name of its class if the message is empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def one_of(what: str, given: str, choices: Iterable[str]) -> str:
    """Return `given` if it is one of the choices, else raise an error that suggests the most similar one."""
    known = sorted(choices)
    if given in known:
        return given
    swapped = [name for name in known if sorted(name) == sorted(given)]  # letters in another order: bnk is bkn
    close = list(dict.fromkeys([*difflib.get_close_matches(given, known, 1), *swapped]))[:2]
    meant = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    raise LabError(f"unknown {what} {given!r}; {meant}choose from: {', '.join(known)}")


def comma_separated(text: str, example: str) -> list[str]:
    """The entries of a comma-separated list. An empty entry is an error, because a name may have been forgotten."""
    found = [entry.strip() for entry in text.split(",")]
    if not all(found):
        raise LabError(f"{text!r} has an empty entry: give a list such as {example}")
    return found


_TYPED = {"warmup_epochs": "--warmup", "width": "width"}
"""Recipe fields whose option has another name. `width` has no option."""


def option(name: str) -> str:
    """The command-line option of a field of a recipe or an execution."""
    return _TYPED.get(name) or f"--{name.replace('_', '-')}"


def useless(name: str, who: str) -> str:
    """The message for a recipe field that has no effect on a method."""
    return f"{option(name)} has no effect on {who}: leave it out, or choose another method"
