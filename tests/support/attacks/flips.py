"""Damage to a run's files: bits flipped, bytes zeroed or replaced, ends cut off, files gone, manifests of other things.

Each attack damages one file of a run, finished or not, then reads the run's records, loads its weights and resumes it.
All of it must end in the undisturbed numbers, perhaps from the checkpoint before, or in a `LabError` of one line. Some
attacks are on folders without digests, as those of format 0: other numbers are then counted as "unverified", since
nothing can tell them, but a traceback is a fault there too. The counts are

    flips         attacks made
    refused       ended in one line that says what to do
    fell_back     went on from the checkpoint before, said so, and came to the same numbers
    harmless      nothing was said, and the numbers are the same
    unverified    other numbers, of a folder without digests
    silent        other numbers, and nothing was said: a fault
    tracebacks    ended in another exception, or in an error of several lines: a fault
"""

from __future__ import annotations

import contextlib
import io
import random
import shutil
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kalmannorm.lab.errors import LabError
from kalmannorm.lab.files import manifest
from kalmannorm.lab.files.records import Run
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.training.loading import load_run
from kalmannorm.lab.training.train import train
from support.lab_runs import among_few_objects, numbers, weights

MUST_BE_ZERO = ("silent", "tracebacks")
COUNTS = ("flips", "refused", "fell_back", "harmless", "unverified", *MUST_BE_ZERO)
RECIPE = Recipe(
    method="bkn-learned", gradient_batch=8, epochs=2, train_examples=24, test_examples=8, width=0.1, evaluate_every=0
)
EXECUTION = Execution(device="cpu", threads=1, tensorboard=False, save_every=2, log_every=1)


def run(count: int, seed: int, folder: Path) -> dict[str, int]:
    with among_few_objects():
        return _run(count, seed, folder)


def _run(count: int, seed: int, folder: Path) -> dict[str, int]:
    runs = _runs(folder)
    expected = _numbers(runs["finished"])
    counts = Counter(dict.fromkeys(COUNTS, 0))
    for attack in range(count):
        draw = random.Random(f"{seed}-{attack}")
        victim, verified = draw.choice(sorted(runs)), draw.random() < 0.75
        copy = folder / "attacked"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(runs[victim], copy)
        if not verified:
            for digests in copy.rglob(manifest.NAME):
                digests.unlink()
        path = draw.choice(sorted(each for each in copy.rglob("*") if each.is_file()))
        damage = draw.choice(DAMAGES)
        damage(path, draw)
        said = f"attack {attack} of seed {seed}: {damage.__name__} in {victim}/{path.relative_to(copy)}"
        counts["flips"] += 1
        counts[_outcome(copy, expected, verified, f"{said}{'' if verified else ', without digests'}")] += 1
    return dict(counts)


def _outcome(folder: Path, expected: dict[str, Any], verified: bool, said: str) -> str:
    heard = io.StringIO()
    try:
        with contextlib.redirect_stderr(heard):
            found = _numbers(folder)
    except LabError as error:
        if "\n" not in str(error):
            return "refused"
        print(f"{said}: several lines: {error}", file=sys.stderr)
        return "tracebacks"
    except Exception:
        print(f"{said}:\n{traceback.format_exc()}", file=sys.stderr)
        return "tracebacks"
    if found == expected:
        return "fell_back" if "instead" in heard.getvalue() else "harmless"
    if not verified:
        return "unverified"
    print(f"{said}: other numbers", file=sys.stderr)
    return "silent"


def _numbers(folder: Path) -> dict[str, Any]:
    """What a user is shown of a run once it has been looked at and resumed."""
    before = Run.read(folder)
    finished = before.result is not None
    if finished:
        before.events()
    loaded = load_run(folder, device="cpu")  # as evaluate, analyse and export do it; at whichever step the run is
    result = train(before.recipe, folder, EXECUTION, resume=True)
    state = loaded.model.state_dict() if finished else weights(folder)
    return {
        "recipe": before.recipe,
        "accuracy": result["accuracy"],
        "loss": result["loss"],
        "weights": {name: state[name].tolist() for name in sorted(state)},
        "log": numbers(folder),
    }


def _runs(folder: Path) -> dict[str, Path]:
    """The same run at its end, and stopped in its fifth step of six, with checkpoints of steps 2 and 4."""

    def crash(event: dict[str, Any]) -> None:
        if event.get("step") == 5:
            raise InterruptedError

    train(RECIPE, folder / "finished", EXECUTION)
    with contextlib.suppress(InterruptedError):
        train(RECIPE, folder / "unfinished", EXECUTION, watch=crash)
    return {name: folder / name for name in ("finished", "unfinished")}


def flip_a_bit(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes() or b"\0")
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def change_a_character(path: Path, draw: random.Random) -> None:
    """Into one that text is made of: a digit of a JSON file becomes another one."""
    content = bytearray(path.read_bytes() or b"\0")
    digits = [place for place, byte in enumerate(content) if chr(byte).isdigit()] or range(len(content))
    content[draw.choice(digits)] = draw.choice(b"0123456789-.eE")
    path.write_bytes(content)


def zero_a_part(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    start = draw.randrange(len(content) + 1)
    stop = min(start + draw.choice([1, 16, 512]), len(content))
    content[start:stop] = bytes(stop - start)
    path.write_bytes(content)


def replace_a_part(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    start = draw.randrange(len(content) + 1)
    content[start : start + 64] = draw.randbytes(64)
    path.write_bytes(content)


def cut_off(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.choice([0, draw.randrange(len(content) + 1)])])


def remove(path: Path, draw: random.Random) -> None:
    path.unlink()


def list_something_else(path: Path, draw: random.Random) -> None:
    """In a manifest beside the file, whose own digest is right."""
    files = draw.choice([[], None, {path.name: {}}, {path.name: "x"}, {path.name: {"bytes": "1", "sha256": None}}])
    path.with_name(manifest.NAME).write_bytes(manifest.sealed({"format": 1, "files": files}))


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (
    flip_a_bit,
    change_a_character,
    zero_a_part,
    replace_a_part,
    cut_off,
    remove,
    list_something_else,
)
