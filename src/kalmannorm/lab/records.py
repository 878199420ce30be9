"""What a run leaves behind, and how it is read again. Every file is written whole or not at all.

    RUN/recipe.json        {"recipe": …, "execution": …, "origin": …}; a folder that holds one is a run
    RUN/log.jsonl          one event per line, see `Log`
    RUN/result.json        at the end: accuracies in each way of inference, speed, memory, gains
    RUN/wiring.svg         for BKN: what feeds every norm
    RUN/analysis/*.json    what `kalmannorm analyse` measured
    RUN/evaluation.json    what `kalmannorm evaluate` measured, and at which step
    RUN/checkpoint/        model.safetensors and resume.pt, see `checkpoint.py`
    RUN/tensorboard/       event files

A comparison is a folder of runs; an experiment is one with an `experiment.json` beside them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kalmannorm.lab import shapes
from kalmannorm.lab.errors import FullDiskError, LabError
from kalmannorm.lab.recipe import Recipe

Record = dict[str, Any]

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the system says of a full disk, or of a user's full share of it."""


def _partial(path: Path) -> Path:
    """What a file is written as until it is whole."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def write_atomically(path: Path, content: bytes) -> None:
    """The new content, whole, or the old one: a crash or a full disk leaves no half-written file."""
    partial = _partial(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise _disk_error(path, error) from error


def writable(path: Path) -> None:
    """Raise before the work, not after it, where a file cannot be written: found by trying."""
    try:
        if path.is_dir():
            raise LabError(f"{path} is a folder: name a file")
        if path.exists() and not path.is_file():  # a device or a pipe, which a rename would replace
            raise LabError(f"{path} is no regular file: name another")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = _partial(path)
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise _disk_error(path, error) from error


def usable(folder: Path) -> None:
    """Raise before the work where no file can be written into a folder; one that is not there is not made."""
    try:
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    except OSError as error:
        raise LabError(f"cannot write to {folder}: {error.strerror or error}") from error
    if not there.is_dir():
        raise LabError(f"cannot write to {folder}: {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise LabError(f"cannot write to {folder}: no permission in {there}")


def sync_folder(folder: Path) -> None:
    """A rename is on the disk when its folder is; Windows knows no such thing."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            raise _disk_error(folder, error) from error
        finally:
            os.close(descriptor)


def _disk_error(path: Path, error: OSError) -> LabError:
    if error.errno in FULL:
        return FullDiskError(f"no space left to write {path}")
    return LabError(f"cannot write {path}: {error.strerror or error}")


@contextlib.contextmanager
def full_disks_told(folder: Path) -> Iterator[None]:
    """By our error also where other libraries write, as those of event files."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise FullDiskError(f"no space left in {folder}") from error
        raise


def write_json(path: Path, record: Record | list[Any]) -> None:
    write_atomically(path, (json.dumps(_plain(record), indent=1, allow_nan=False) + "\n").encode())


def _plain(value: Any) -> Any:
    """NaN and infinity are not JSON: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value


def read_json(path: Path, remedy: str = "delete its folder and run it again") -> Record:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LabError(f"there is no {path}") from None
    except RecursionError:
        raise _damaged(path, "nested too deeply", remedy) from None
    except (OSError, ValueError) as error:  # no UTF-8, no JSON, or a number of thousands of digits
        raise _damaged(path, str(error), remedy) from None
    if not isinstance(record, dict):
        raise _damaged(path, "no JSON object", remedy)
    return record


def _damaged(path: Path, problem: str, remedy: str) -> LabError:
    return LabError(f"{path} is damaged ({problem}): {remedy}")


class Log:
    """Events of a run, one JSON object per line, flushed as they come.

        {"event": "train", "step": 14, "epoch": 1.0, "loss": …, "accuracy": …, "learning_rate": …,
         "images_per_second": …, "seconds": …}      the average since the event before; `seconds` since the start
        {"event": "evaluate", "step": …, "epoch": …, "modes": {"population": {"accuracy": …, "loss": …}, …}}
        {"event": "gains", "step": …, "epoch": …, "gains": {"layer1.0.bn1": 0.48, …}}

    Accuracies are in %. `offset` is where a resumed run goes on: what came after its checkpoint is written again.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: what was written is on its way to the disk, and closing has nothing left that could fail.
            self._file: IO[bytes] = path.open("r+b" if path.exists() else "w+b", buffering=0)
        except OSError as error:
            raise _disk_error(path, error) from error
        self._file.truncate(min(offset, path.stat().st_size))
        self._file.seek(0, os.SEEK_END)

    def write(self, event: str, **values: Any) -> None:
        try:
            self._file.write((json.dumps(_plain({"event": event, **values}), allow_nan=False) + "\n").encode())
        except OSError as error:
            raise _disk_error(self.path, error) from error

    @property
    def offset(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class Run:
    """A run on disk."""

    folder: Path
    recipe: Recipe
    record: Record
    """The whole of recipe.json."""

    @classmethod
    def read(cls, folder: Path) -> Run:
        if not (folder / "recipe.json").is_file():
            raise LabError(_no_run(folder))
        record = read_json(folder / "recipe.json")
        if not isinstance(record.get("recipe"), dict) or not isinstance(record.get("execution", {}), dict):
            raise LabError(f"{folder / 'recipe.json'} is damaged (no recipe): delete its folder and run it again")
        try:
            recipe = Recipe.from_json(record["recipe"]).checked()
        except LabError as error:
            raise LabError(f"{folder / 'recipe.json'}: {error}") from None
        return cls(folder, recipe, record)

    @property
    def finished(self) -> bool:
        return (self.folder / "result.json").is_file()

    @property
    def result(self) -> Record | None:
        """What it came to; None while it runs."""
        result, wrong = self.result_in_part()
        if wrong:
            raise _damaged(self.folder / "result.json", wrong[0], _NO_RESULT)
        return result

    def result_in_part(self) -> tuple[Record | None, list[str]]:
        """The parts of the result that can be read, and what is wrong with the others."""
        if not self.finished:
            return None, []
        path, wrong = self.folder / "result.json", list[str]()
        result = read_json(path, _NO_RESULT)
        if not isinstance(result.get("accuracy"), dict):
            raise _damaged(path, "no accuracy", _NO_RESULT)
        if not isinstance(result.get("diverged", False), bool):
            raise _damaged(path, "diverged is neither true nor false", _NO_RESULT)
        return {"diverged": False} | shapes.RESULT(result, "", wrong), wrong

    def events(self, kind: str | None = None) -> list[Record]:
        """Events of the log; a last line that a crash cut short is left out."""
        found, wrong = self.events_in_part()
        if wrong:
            raise _damaged(self.folder / "log.jsonl", wrong[0], "delete its folder and run it again")
        return [event for event in found if kind is None or event["event"] == kind]

    def events_in_part(self) -> tuple[list[Record], list[str]]:
        """The events that can be read, and what is wrong with the other lines."""
        path = self.folder / "log.jsonl"
        try:
            lines = path.read_bytes().splitlines() if path.is_file() else []
        except OSError as error:
            return [], [error.strerror or str(error)]
        found: list[Record] = []
        wrong: list[str] = []
        for number, line in enumerate(lines):
            place = f"line {number + 1}"
            try:
                event = json.loads(line)
                shape = shapes.EVENTS[event["event"]]
            except (ValueError, TypeError, KeyError, RecursionError):
                if number < len(lines) - 1:
                    wrong.append(f"{place} is no event")
                continue
            if (fitted := shape(event, place, wrong)) is not None:
                found.append({"event": event["event"], **fitted})
        return found, wrong

    def analysis(self, name: str) -> Record | None:
        path = self.folder / "analysis" / f"{name}.json"
        return read_json(path, _NO_ANALYSIS) if path.is_file() else None

    def analysis_in_part(self, name: str) -> tuple[Record | None, list[str]]:
        """The layers of an analysis that can be read, and what is wrong with the others."""
        record, wrong = self.analysis(name), list[str]()
        return None if record is None else shapes.ANALYSES[name](record, "", wrong), wrong


_NO_RESULT = "delete it, and resume the run"
_NO_ANALYSIS = "delete it, and analyse the run again"


def _no_run(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder {folder}"
    # A comparison, or a folder of comparisons; all that lies in a home folder would take minutes.
    inside = sorted(path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/recipe.json"))
    if not inside:
        return f"{folder} is not a run: it holds no recipe.json"
    count = "one" if len(inside) == 1 else f"{len(inside)} of them"
    return f"{folder} is not a run, but holds {count}: give one, such as {inside[0]}"


def forget_measurements(folder: Path) -> None:
    """What was measured of a run that now goes on: it is no longer true."""
    (folder / "evaluation.json").unlink(missing_ok=True)
    shutil.rmtree(folder / "analysis", ignore_errors=True)


def find_runs(*folders: Path) -> Iterator[Run]:
    """Every run in these folders, at any depth, in the order of their names."""
    for folder in folders:
        if not folder.is_dir():
            raise LabError(f"there is no folder {folder}")
        for path in sorted(folder.rglob("recipe.json")):
            yield Run.read(path.parent)
