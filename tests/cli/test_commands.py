"""The command line itself: what it says to a typing error, its help, its version, and a Ctrl-C at any time."""

from __future__ import annotations

import dataclasses
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import kalmannorm
from kalmannorm.lab.recipes.presets import PRESETS
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm_command import main
from kalmannorm_command.app import app, run
from kalmannorm_command.options import EXECUTION, OWN, RECIPE, Shared
from support.saying import said

COMMANDS = typer.main.get_command(app).commands
DATA_SETS = Path(__file__).parents[2] / "docs" / "data.md"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("train --lr 0.1", "unknown option --lr: did you mean --learning-rate? See kalmannorm train --help"),
        ("train --wd 0", "did you mean --weight-decay?"),  # by its initials
        ("train --epoch 3", "did you mean --epochs?"),  # by its beginning
        ("train --dat digits", "did you mean --data-root or --dataset?"),
        ("train --lerning-rate 3", "did you mean --learning-rate?"),  # by its letters
        ("train --batch-size 64", "did you mean --setting?"),  # by another name
        ("train --frobnicate", "unknown option --frobnicate. See"),
        ("train --seed x", "'--seed'"),
        ("train again", "unexpected extra argument"),
        ("compare --seeds 0", "'--seeds'"),
        ("evaluate", "missing argument"),
        ("export run", "missing option '--out'"),
        ("bench --devise cpu", "did you mean --device? See kalmannorm bench step --help"),
        ("data fetsh", "'fetch'"),
        ("tran", "'train'? See kalmannorm --help"),
        ("--verison", "did you mean --version?"),
        ("compare --settings 64,2", "unknown option --settings: did you mean --setting?"),  # as it was called before
        ("bench --output times.csv", "unknown option --output: did you mean --out?"),
        ("data list --root here", "unknown option --root: did you mean --data-root?"),
        ("compare --methods bn,bnk", "--methods: unknown method 'bnk'; did you mean 'bn' or 'bkn'?"),
        ("compare -m bnk", "kalmannorm: -m: unknown method 'bnk'"),  # the option as it was typed
        ("train --method=bnk", "kalmannorm: --method: unknown method 'bnk'"),
        ("compare -s64,3", "kalmannorm: -s: setting (64, 3)"),
        ("train --setting 64", "kalmannorm: --setting: setting '64' is not understood"),
        ("train --precision fp8 --method bn", "kalmannorm: --precision: unknown precision 'fp8'"),
        ("train --learning-rate -1", "kalmannorm: --learning-rate must be"),  # not twice
        ("reproduce cifr", "kalmannorm: unknown experiment 'cifr'"),  # an argument has no option
    ],
)
def test_typing_errors(capsys, arguments, expected):
    assert expected in said(capsys, *arguments.split())


def every_command(command, name=()):
    yield name, command
    for child, inner in getattr(command, "commands", {}).items():
        yield from every_command(inner, (*name, child))


ALL = dict(every_command(typer.main.get_command(app)))


@pytest.mark.parametrize("name", ALL, ids=" ".join)
def test_flags_are_shown_as_flags(capsys, monkeypatch, name):
    shown = help_of(capsys, monkeypatch, *name)
    assert "--help" in shown
    assert "bool" not in shown.lower()


def test_an_option_has_one_spelling():
    """One name in one command, and the same name and letter in all commands."""
    letters: dict[str, set[str]] = {}
    for command in ALL.values():
        for parameter in command.params:
            long = [name for name in parameter.opts if name.startswith("--")]
            assert len(long) <= 1, long
            for letter in set(parameter.opts) - set(long):
                if letter.startswith("-"):
                    letters.setdefault(letter, set()).update(long)
    assert letters["-o"] == {"--out"}
    assert letters["-s"] == {"--setting"}
    assert all(len(names) == 1 for names in letters.values())


def test_version(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"kalmannorm {kalmannorm.__version__}, torch ")


def help_of(capsys, monkeypatch, *command: str) -> str:
    """At a width where nothing needs to be wrapped."""
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 500)
    assert run([*command, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_lines_of_a_help_end_where_the_terminal_does(capsys, monkeypatch, name):
    shown = help_of(capsys, monkeypatch, name)
    for paragraph in COMMANDS[name].help.split("\n\n"):
        assert " ".join(paragraph.split()) in shown


@pytest.mark.parametrize("command", ["train", "compare", "reproduce"])
def test_every_option_says_its_default(capsys, monkeypatch, command):
    lines = help_of(capsys, monkeypatch, command).splitlines()
    for each in (*RECIPE, *EXECUTION):
        (line,) = (line for line in lines if re.search(rf"{each.flag.split('/')[0]} ", line))
        assert re.search(r"\[default: \S.*\]", line), line


def default_text(each: Shared, value: object) -> str | None:
    """How the help has to write a default; None where it explains what no value means."""
    if value is None:
        return None
    if isinstance(value, bool):
        return each.flag.split("/")[0 if value else 1].removeprefix("--")
    return value if isinstance(value, str) else f"{value:g}"


@pytest.mark.parametrize("each", RECIPE, ids=lambda each: each.name)
def test_defaults_of_a_recipe_are_those_that_a_run_has(each):
    """Where data sets differ the help says no number, where they agree it says theirs."""
    values = {getattr(recipe, each.name) for recipe in PRESETS.values()}
    if len(values) > 1:
        assert each.default == OWN
    elif (expected := default_text(each, values.pop())) is not None:
        assert each.default.split()[0] == expected


@pytest.mark.parametrize("each", EXECUTION, ids=lambda each: each.name)
def test_defaults_of_an_execution_are_those_that_a_run_has(each):
    expected = default_text(each, getattr(Execution(), each.name))
    assert expected is None or each.default == expected


def test_options_are_fields():
    named = {field.name for field in dataclasses.fields(Recipe)} - {each.name for each in RECIPE}
    # The width has no option. Every command spells out the others by itself.
    assert named == {"model", "dataset", "method", "gradient_batch", "statistics_batch", "seed", "width"}
    assert {field.name for field in dataclasses.fields(Execution)} == {each.name for each in EXECUTION}


HELP = """
import contextlib, io, sys
import typer
from kalmannorm_command import main
from kalmannorm_command.app import app, run

def every(command, words=()):
    yield [*words, "--help"]
    for name, inner in getattr(command, "commands", {}).items():
        yield from every(inner, (*words, name))

lines = [*every(typer.main.get_command(app)), ["--version"], ["train", "--lr", "1"], ["tran"], ["train", "--seed", "x"]]
for words in lines:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run(words)
    loaded = {"torch", "kalmannorm", "numpy", "matplotlib", "scipy", "lightning_fabric"} & set(sys.modules)
    if loaded:
        sys.exit(f"{' '.join(words)} imports {', '.join(sorted(loaded))}")
print(len(lines))
"""


def test_no_help_and_no_typing_error_imports_the_library():
    """`import torch` takes seconds."""
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 4 + len(COMMANDS)


def test_the_documented_defaults_of_the_data_sets():
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (`[\w-]+` \| \(.*?) \|$", DATA_SETS.read_text(), re.MULTILINE))
    assert set(rows) == set(PRESETS)
    for name, recipe in PRESETS.items():
        values = [recipe.setting, recipe.epochs, recipe.learning_rate, recipe.weight_decay, recipe.schedule]
        assert rows[name] == f"`{recipe.model}` | " + " | ".join(map(str, values))


INTERRUPTED = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background starts with signals ignored
sys.meta_path.insert(0, Interrupting())
from kalmannorm_command import main
main()
"""


@pytest.mark.parametrize(
    "module", ["typer", "torch", "kalmannorm.lab.training.train"], ids=["command line", "library", "command"]
)
def test_interrupted_while_it_imports(tmp_path, module):
    """Most of the first seconds are spent on imports: of the command line, of torch and of what the command needs."""
    code = INTERRUPTED.format(module=module)
    done = subprocess.run(
        [sys.executable, "-c", code, "train", "--epochs", "1"], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stderr, done.stdout) == (130, "kalmannorm: interrupted\n", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("before", [signal.default_int_handler, signal.SIG_IGN], ids=["heeded", "ignored"])
def test_interrupts_are_as_before_once_it_runs(before, monkeypatch):
    found = []
    monkeypatch.setattr(
        "kalmannorm.lab.report.collecting.collect", lambda _: found.append(signal.getsignal(signal.SIGINT))
    )
    monkeypatch.setattr("kalmannorm.lab.report.writing.write_collected", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["kalmannorm", "report", "runs"])
    own = signal.signal(signal.SIGINT, before)
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        signal.signal(signal.SIGINT, own)
    assert found == [before] and ended.value.code == 0
