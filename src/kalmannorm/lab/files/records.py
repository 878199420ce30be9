"""What a run leaves behind, and how it is read again. Every file is written whole or not at all.

    RUN/recipe.json        {"format": …, "recipe": …, "execution": …, "origin": …}; a folder that holds one is a run
    RUN/log.jsonl          one event per line, see `Log`
    RUN/result.json        at the end: accuracies in each way of inference, speed, memory, gains
    RUN/wiring.svg         for BKN: what feeds every norm
    RUN/analysis/*.json    what `kalmannorm analyse` measured
    RUN/evaluation.json    what `kalmannorm evaluate` measured, and at which step
    RUN/checkpoint/        model.safetensors, resume.pt and their digests, see `checkpoint.py`
    RUN/model.safetensors  at the end: the weights
    RUN/manifest.json      digests of recipe.json and, at the end, of log, result and weights, see `manifest.py`
    RUN/tensorboard/       event files

A comparison is a folder of runs; an experiment is one with an `experiment.json` beside them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kalmannorm.lab.errors import DamagedError, FullDiskError, LabError
from kalmannorm.lab.files import manifest, shapes
from kalmannorm.lab.files.formats import FORMAT, upgraded
from kalmannorm.lab.recipes.recipe import Execution, Recipe

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


def write_protected(
    folder: Path, contents: Mapping[str, bytes], others: Mapping[str, manifest.Entry] | None = None
) -> None:
    """Files with their digests, and the digests of `others` that are there already.

    The manifest comes first, then the files in the order given: whatever a crash leaves is absent or verified.
    """
    try:
        known = manifest.entries(folder)
    except DamagedError:  # what it said of other files is lost, and that must not cost what is written now
        known = {}
    fresh = {name: manifest.entry(content) for name, content in contents.items()}
    write_atomically(folder / manifest.NAME, manifest.written({**known, **(others or {}), **fresh}))
    for name, content in contents.items():
        write_atomically(folder / name, content)


def write_json(path: Path, record: Record | list[Any]) -> None:
    write_atomically(path, as_json(record))


def as_json(record: Record | list[Any]) -> bytes:
    return (json.dumps(_plain(record), indent=1, allow_nan=False) + "\n").encode()


def _plain(value: Any) -> Any:
    """NaN and infinity are not JSON: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value


def read_json(path: Path, remedy: str | None = None) -> Record:
    """The record in a file, verified where it has a digest; `remedy` is what to do where it is damaged."""
    if not path.exists():
        raise LabError(f"there is no {path}")
    content = manifest.verified(path.parent, path.name, remedy)
    remedy = remedy or "delete its folder and run it again"
    try:
        record = json.loads(content)
    except RecursionError:
        raise DamagedError(path, "nested too deeply", remedy) from None
    except ValueError as error:  # no UTF-8, no JSON, or a number of thousands of digits
        raise DamagedError(path, str(error), remedy) from None
    if not isinstance(record, dict):
        raise DamagedError(path, "no JSON object", remedy)
    return record


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
        self._digest = hashlib.sha256(self._file.read(offset))
        self._file.truncate()

    def write(self, event: str, **values: Any) -> None:
        line = (json.dumps(_plain({"event": event, **values}), allow_nan=False) + "\n").encode()
        try:
            self._file.write(line)
        except OSError as error:
            raise _disk_error(self.path, error) from error
        self._digest.update(line)

    def written(self) -> manifest.Entry:
        """What a checkpoint knows the log by: size and digest of the events so far, which are then on the disk."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _disk_error(self.path, error) from error
        return {"bytes": self._file.tell(), "sha256": self._digest.hexdigest()}

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
        path = folder / "recipe.json"
        record = upgraded(read_json(path), path, (_recipe_from_format_0,))
        if not isinstance(record.get("recipe"), dict) or not isinstance(record.get("execution"), dict):
            raise DamagedError(path, "no recipe", "delete its folder and run it again")
        try:
            recipe = Recipe.from_json(record["recipe"]).checked()
        except LabError as error:
            raise LabError(f"{path}: {error}") from None
        return cls(folder, recipe, record)

    @property
    def execution(self) -> Execution:
        """How it ran."""
        try:
            return Execution.from_json(self.record["execution"])
        except LabError as error:
            raise LabError(f"{self.folder / 'recipe.json'}: {error}") from None

    @property
    def finished(self) -> bool:
        return (self.folder / "result.json").is_file()

    @property
    def result(self) -> Record | None:
        """What it came to; None while it runs."""
        result, wrong = self.result_in_part()
        if wrong:
            raise DamagedError(self.folder / "result.json", wrong[0], self.remedy("it"))
        return result

    def result_in_part(self) -> tuple[Record | None, list[str]]:
        """The parts of the result that can be read, and what is wrong with the others."""
        if not self.finished:
            return None, []
        path, remedy, wrong = self.folder / "result.json", self.remedy("it"), list[str]()
        result = read_json(path, remedy)
        if not isinstance(result.get("accuracy"), dict):
            raise DamagedError(path, "no accuracy", remedy)
        if not isinstance(result.get("diverged", False), bool):
            raise DamagedError(path, "diverged is neither true nor false", remedy)
        return {"diverged": False} | shapes.RESULT(result, "", wrong), wrong

    def remedy(self, files: str) -> str:
        """What to do where the end of a run is damaged."""
        again = f"kalmannorm train --resume {self.folder}"
        return f"restore it from a copy, or delete {files} and train the run again with: {again}"

    def events(self, kind: str | None = None) -> list[Record]:
        """Events of the log; a last line that a crash cut short is left out."""
        found, wrong = _events(self._log())
        if wrong:
            raise DamagedError(self.folder / "log.jsonl", wrong[0], "delete its folder and run it again")
        return [event for event in found if kind is None or event["event"] == kind]

    def events_in_part(self) -> tuple[list[Record], list[str]]:
        """The events that can be read, and what is wrong with the other lines."""
        try:
            return _events(self._log())
        except DamagedError as error:
            return [], [error.found]

    def _log(self) -> bytes:
        """The content of log.jsonl, verified where it has a digest; nothing where there is none yet."""
        path = self.folder / "log.jsonl"
        # The digest of a log that still grows is in the newest checkpoint.
        if self.finished and path.name in manifest.entries(self.folder):
            return manifest.verified(self.folder, path.name)
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise DamagedError(path, error.strerror or str(error), "restore it from a copy") from error

    def analysis(self, name: str) -> Record | None:
        path = self.folder / "analysis" / f"{name}.json"
        return read_json(path, _NO_ANALYSIS) if path.is_file() else None

    def analysis_in_part(self, name: str) -> tuple[Record | None, list[str]]:
        """The layers of an analysis that can be read, and what is wrong with the others."""
        record, wrong = self.analysis(name), list[str]()
        return None if record is None else shapes.ANALYSES[name](record, "", wrong), wrong


def _events(log: bytes) -> tuple[list[Record], list[str]]:
    """The events in a log, and what is wrong with the lines that hold none."""
    lines = log.splitlines()
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


_NO_ANALYSIS = "delete it, and analyse the run again"


def describe(folder: Path, recipe: Recipe, execution: Record, origin: Record) -> None:
    """Write recipe.json, which makes a folder a run."""
    record = {"format": FORMAT, "recipe": recipe.to_json(), "execution": execution, "origin": origin}
    write_protected(folder, {"recipe.json": as_json(record)})


def _recipe_from_format_0(record: Record) -> Record:
    return {"execution": {}, "origin": {}, **record}


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
