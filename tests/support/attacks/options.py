"""Odd values for random options of random commands: each ends in one line or is accepted.

Commands and options are those that the application has, so a new option is attacked from its first day. Whatever takes
time is replaced by something that stops, after all checks have passed: an attack takes a few hundredths of a second.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import shutil
import sys
import traceback
import urllib.error
import warnings
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import typer

from kalmannorm.lab.data.files import OutOfReachError
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.training.train import train
from kalmannorm_command.app import app
from kalmannorm_command.app import run as command
from support.attacks.patience import HangError, patience

MUST_BE_ZERO = ("tracebacks",)
PATIENCE = 120
"""Seconds until an attack counts as one that hangs."""
MOST_THREADS = 1024

_words = str.split
NUMBERS = _words(
    """0 -1 1 2 3 7 64 1_0 0.5 -0.0 1e308 1e-320 nan inf -inf 1e400 0x10 true None ½ ٣ １２ ² 1000000 1e39 1e300 2.5
    1e-9 8193"""
)
NUMBERS += [str(10**30), str(-(10**30)), str(2**63), "9" * 40, "9" * 400, "9" * 4000, "-" + "9" * 400]
PLACES = _words(
    """.. . ~ ~nosuchuser/x a/b/c a.pt2 a.onnx a.safetensors a.png .png a.html [/b] [red] * /dev/null /dev/full - --
    /proc/self/mem /proc/nothing/x.html file/below.pt2 file fifo.pt2 fifo.html loop/x run run/recipe.json 😀 {} %s $x"""
)
PLACES += ["x" * 300, "x" * 300 + ".pt2", "x" * 250 + ".html", "é" * 200, "/".join(["y" * 200] * 19), "a b", "'\""]
WORDS = _words(
    """, ,, 0,0 64,2 (64,2) 64x2 2,4 0,64 128,999999999999 999999999999,128 1000000000039,999999999999 -64,2 64,2,1 N
    2,N 0,N 8x8x8x8 0x1x1x1 00x3x3x3 99999999x99999999x9x9 8x8 -8x8x8x8 1x1x1x1 auto cpu CPU cpu:0 cpu:3 cuda cuda:-1
    cuda:99 cuda:99999999999999999999 mps meta gpu : cpu: digits cifar10 imagenet folder: folder:/ folder:/dev/null
    folder:~nosuchuser/x folder:[/b] folder:. digits,digits bn bkn gn bn,bkn bn,,bkn bkn-learned bm digits-net resnet18
    timm/ timm/resnet26d resnet18/.. vit_b_16 ../digits-net sgd adamw cosine step float32 bf16 fp16 float64 layer op
    NHWC NHWC,NCHW nhwc population example,batch population,population cifar speed parameters variance-gap moderate ---
    -h --json --nothing = --out="""
)
WORDS += ["1" * 4000 + ",2", "1" * 4000, "e\u0301", "x" * 3000]
NEVER = ["", " ", "\t", "a\0b", "a\nb", "\x1b[31m", os.fsdecode(b"r\xff\xfe"), "\u202e\u0000", "x" * 5000]
"""What no option takes."""
ODD = [*NUMBERS, *PLACES, *WORDS, *NEVER]
_NUMERIC = {
    field.name for kind in (Recipe, Execution) for field in fields(kind) if re.search("int|float", str(field.type))
}
_NUMERIC |= {"seeds", "jobs", "budget", "batch", "batches", "max_groups", "rounds"}
_PLACES = {"out", "output", "plot", "figures", "data_root", "root", "resume"}


class AcceptedError(Exception):
    """All checks have passed, and the work would begin."""


def run(count: int, seed: int, folder: Path) -> dict[str, int]:
    """`count` commands; "refused" ones say why in one line, "accepted" ones would begin to work, or were done."""
    choose = random.Random(seed)
    known = list(_commands(typer.main.get_command(app), []))
    found = {"commands": 0, "refused": 0, "accepted": 0, "tracebacks": 0}
    with _scratch(folder), _without_work():
        for number in range(count):
            words = _attack(choose, known)
            fault = _fault(words, found)
            found["commands"] += 1
            if fault:
                found["tracebacks"] += 1
                print(f"options: attack {number} of seed {seed}: {ascii(words)[:3000]}\n{fault}", file=sys.stderr)
    return found


def _commands(command: Any, words: list[str]) -> Iterator[tuple[list[str], list[Any]]]:
    """Every command that does something, and its parameters."""
    inside = getattr(command, "commands", None)
    if inside is None:
        yield words, list(command.params)
    for name, each in (inside or {}).items():
        yield from _commands(each, [*words, name])


def _attack(choose: random.Random, known: list[tuple[list[str], list[Any]]]) -> list[str]:
    name, parameters = choose.choice(known)
    words = list(name)
    for parameter in (each for each in parameters if each.param_type_name == "argument"):
        if parameter.required or choose.random() < 0.7:
            words.append(_argument(choose, name))
    if name == ["export"] and choose.random() < 0.8:
        words += ["-o", "model.pt2"]
    options = [each for each in parameters if each.param_type_name == "option"]
    if name in (["reproduce"], ["compare"]) and choose.random() < 0.8:
        words += ["--dataset", "digits"]
    for option in choose.sample(options, min(len(options), choose.choice((1, 1, 1, 2, 3)))):
        flag = choose.choice([*option.opts, *option.secondary_opts])
        if getattr(option, "is_flag", False):
            words.append(flag)
        elif flag.startswith("--") and choose.random() < 0.3:
            words.append(f"{flag}={_value(choose, option)}")
        else:
            words += [flag, _value(choose, option)]
    return words


def _value(choose: random.Random, option: Any) -> str:
    """Mostly of a kind that it may well be given."""
    kind = NUMBERS if option.name in _NUMERIC else PLACES if option.name in _PLACES else WORDS
    return choose.choice(kind if choose.random() < 0.75 else ODD)


def _argument(choose: random.Random, name: list[str]) -> str:
    """What most of these commands are about, and sometimes anything."""
    if choose.random() < 0.3:
        return choose.choice(ODD)
    if name[0] == "data":
        return choose.choice(("digits", "cifar10", "tiny-imagenet", "imagenet"))
    return choose.choice(("cifar", "speed", "parameters")) if name == ["reproduce"] else "run"


def _fault(words: list[str], found: dict[str, int]) -> str | None:
    """What went wrong; None where the command was accepted or refused, which is counted."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    try:
        with patience(PATIENCE), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = command(words)
    except AcceptedError:
        status = 0
    except (Exception, HangError):
        return traceback.format_exc()
    err.flush()
    said = err.buffer.getvalue().decode()
    if status == 0:
        found["accepted"] += 1
        return None
    lines = [line for line in said.split("\n") if line.startswith("kalmannorm: ")]
    # `data fetch` tells what it tries, `data check` names every set that is not whole.
    alone = words[0] == "data" or said.count("\n") == 1
    if status in (1, 2) and lines and alone and "Traceback" not in said:
        found["refused"] += 1
        return None
    return f"status {status}, and on stderr:\n{said}"


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[None]:
    """The current folder, with a finished run and a few odd things in it."""
    home, before = folder / "options", Path.cwd()
    home.mkdir(parents=True)
    recipe = Recipe(gradient_batch=16, epochs=1, train_examples=16, test_examples=16)
    train(recipe, home / "run", Execution(device="cpu", tensorboard=False))
    (home / "file").touch()
    os.mkfifo(home / "fifo.pt2")
    os.mkfifo(home / "fifo.html")
    (home / "loop").symlink_to("loop")
    os.chdir(home)
    try:
        with mock.patch.dict(os.environ, {"KALMANNORM_DATA": str(home / "data")}):
            yield
    finally:
        os.chdir(before)
        shutil.rmtree(home)


@contextlib.contextmanager
def _without_work() -> Iterator[None]:
    """Nothing is trained, timed, drawn or downloaded, and no more threads are started than a machine may have."""

    def accepted(*_: Any, **__: Any) -> None:
        raise AcceptedError

    def few(count: int) -> None:
        assert count <= MOST_THREADS, f"{count} threads"

    lab = "kalmannorm.lab"
    works = [
        "training.train.model_of", "comparing.compare.perform", "experiments.speed.time_steps",
        "bench.step_contenders.Case.batch", "bench.copying.copy_speed", "training.evaluate._scores",
        "analysis.analyse.layer_statistics", "export.shipped", "report.writing.content",
    ]  # fmt: skip
    with contextlib.ExitStack() as patches:
        for name in works:
            patches.enter_context(mock.patch(f"{lab}.{name}", accepted))
        replaced = {
            f"{lab}.bench.op.inductor_missing": lambda _: None,
            f"{lab}.data.resident.Split.resized": lambda self, _: self,
            f"{lab}.data.cifar.Cifar._from_torchvision": mock.Mock(side_effect=OutOfReachError("no network")),
            f"{lab}.data.cifar.Cifar._from_npm": mock.Mock(side_effect=OutOfReachError("no network")),
            "torchvision.datasets.utils.download_and_extract_archive": mock.Mock(
                side_effect=urllib.error.URLError("no network")
            ),
        }
        for name, other in replaced.items():
            patches.enter_context(mock.patch(name, other))
        patches.enter_context(mock.patch.object(torch, "set_num_threads", few))
        patches.enter_context(warnings.catch_warnings())
        yield
