"""The files of a run, written and read. Every file is written atomically.

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
"""Error numbers of a full disk and of an exceeded quota."""


def _partial(path: Path) -> Path:
    """The name of a file while it is being written."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file. After a crash or on a full disk it has the new content or the old one, never a part."""
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
    """Raise if a file cannot be written. Called before the work, so that no result is lost."""
    try:
        if path.is_dir():
            raise LabError(f"{path} is a folder: name a file")
        if path.exists() and not path.is_file():  # a device or a pipe, which a rename would replace
            raise LabError(f"{path} is not a regular file: name another")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = _partial(path)
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise _disk_error(path, error) from error


def usable(folder: Path) -> None:
    """Raise if no file can be written into a folder. A missing folder is not created."""
    try:
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    except OSError as error:
        raise LabError(f"cannot write to {folder}: {error.strerror or error}") from error
    if not there.is_dir():
        raise LabError(f"cannot write to {folder}: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise LabError(f"cannot write to {folder}: no permission in {there}")


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable. Windows has no such call."""
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
    """Turn full-disk errors of other libraries, such as TensorBoard, into ours."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise FullDiskError(f"no space left in {folder}") from error
        raise


def write_protected(
    folder: Path, contents: Mapping[str, bytes], others: Mapping[str, manifest.Entry] | None = None
) -> None:
    """Write files and their digests. `others` are entries of files that exist already.

    The manifest is written first, then the files in the given order. So after a crash each file is absent, or differs
    from its digest, or is right.
    """
    try:
        known = manifest.entries(folder)
    except DamagedError:  # its other entries are lost, but the new files must still be written
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
    """Replace NaN and infinity by null: they are not JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value


def read_json(path: Path, remedy: str | None = None) -> Record:
    """The record in a file, verified if it has a digest. An error about damage ends with `remedy`."""
    if not path.exists():
        raise LabError(f"there is no {path}")
    content = manifest.verified(path.parent, path.name, remedy)
    remedy = remedy or "delete its folder and run it again"
    try:
        record = json.loads(content)
    except RecursionError:
        raise DamagedError(path, "nested too deeply", remedy) from None
    except ValueError as error:  # not UTF-8, not JSON, or a number with thousands of digits
        raise DamagedError(path, str(error), remedy) from None
    if not isinstance(record, dict):
        raise DamagedError(path, "not a JSON object", remedy)
    return record


class Log:
    """Events of a run, one JSON object per line, flushed as they come.

        {"event": "train", "step": 14, "epoch": 1.0, "loss": …, "accuracy": …, "learning_rate": …,
         "images_per_second": …, "seconds": …}      the average since the event before; `seconds` since the start
        {"event": "evaluate", "step": …, "epoch": …, "modes": {"population": {"accuracy": …, "loss": …}, …}}
        {"event": "gains", "step": …, "epoch": …, "gains": {"layer1.0.bn1": 0.48, …}}

    Accuracies are in %. A resumed run passes its `offset` in bytes: later events are dropped and written again.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered, so that `close` has nothing left to write and cannot fail.
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
        """Size and digest of the events so far, for a checkpoint. They are flushed to the disk first."""
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
        """The execution that was saved with the recipe."""
        try:
            return Execution.from_json(self.record["execution"])
        except LabError as error:
            raise LabError(f"{self.folder / 'recipe.json'}: {error}") from None

    @property
    def finished(self) -> bool:
        return (self.folder / "result.json").is_file()

    @property
    def result(self) -> Record | None:
        """The result; None if the run is unfinished."""
        result, wrong = self.result_in_part()
        if wrong:
            raise DamagedError(self.folder / "result.json", wrong[0], self.remedy("it"))
        return result

    def result_in_part(self) -> tuple[Record | None, list[str]]:
        """The readable parts of the result, and complaints about the others."""
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
        """Advice for a finished run with damaged files."""
        again = f"kalmannorm train --resume {self.folder}"
        return f"restore it from a copy, or delete {files} and train the run again with: {again}"

    def events(self, kind: str | None = None) -> list[Record]:
        """The events of the log. An incomplete last line, left by a crash, is ignored."""
        found, wrong = _events(self._log())
        if wrong:
            raise DamagedError(self.folder / "log.jsonl", wrong[0], "delete its folder and run it again")
        return [event for event in found if kind is None or event["event"] == kind]

    def events_in_part(self) -> tuple[list[Record], list[str]]:
        """The readable events, and complaints about the other lines."""
        try:
            return _events(self._log())
        except DamagedError as error:
            return [], [error.found]

    def _log(self) -> bytes:
        """The content of log.jsonl, verified if it has a digest; empty if there is no log yet."""
        path = self.folder / "log.jsonl"
        # While the log grows, its digest is in the newest checkpoint.
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
        """The readable layers of an analysis, and complaints about the others."""
        record, wrong = self.analysis(name), list[str]()
        return None if record is None else shapes.ANALYSES[name](record, "", wrong), wrong


def _events(log: bytes) -> tuple[list[Record], list[str]]:
    """The events in a log, and complaints about lines that are not events."""
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
                wrong.append(f"{place} is not an event")
            continue
        if (fitted := shape(event, place, wrong)) is not None:
            found.append({"event": event["event"], **fitted})
    return found, wrong


_NO_ANALYSIS = "delete it, and analyse the run again"


def describe(folder: Path, recipe: Recipe, execution: Record, origin: Record) -> None:
    """Write recipe.json. A folder with this file is a run."""
    record = {"format": FORMAT, "recipe": recipe.to_json(), "execution": execution, "origin": origin}
    write_protected(folder, {"recipe.json": as_json(record)})


def _recipe_from_format_0(record: Record) -> Record:
    return {"execution": {}, "origin": {}, **record}


def _no_run(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder {folder}"
    # Two levels find a comparison and a folder of comparisons. All levels of a home folder would take minutes.
    inside = sorted(path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/recipe.json"))
    if not inside:
        return f"{folder} is not a run: it holds no recipe.json"
    count = "one" if len(inside) == 1 else f"{len(inside)} of them"
    return f"{folder} is not a run, but it holds {count}: give one, such as {inside[0]}"


def forget_measurements(folder: Path) -> None:
    """Delete the evaluation and the analysis of a run that is resumed: they are outdated."""
    (folder / "evaluation.json").unlink(missing_ok=True)
    shutil.rmtree(folder / "analysis", ignore_errors=True)
