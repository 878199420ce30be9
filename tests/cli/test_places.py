"""Places that cannot be written to, and words that no option takes: one line each, before the work."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.training.train import train
from kalmannorm_command.app import run
from support.saying import said

TINY = Recipe(epochs=1, train_examples=64, test_examples=64)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(TINY, folder, Execution(tensorboard=False))
    return folder


@pytest.fixture
def no_work(monkeypatch):
    """Whatever would take time says that it was reached."""

    def reached(*_, **__):
        raise AssertionError("the place should have been looked at before")

    for name in (
        "training.train.Training",
        "comparing.compare.perform",
        "report.writing.content",
        "export.shipped",
        "analysis.analyse.variance_gap",
    ):
        monkeypatch.setattr(f"kalmannorm.lab.{name}", reached)
    monkeypatch.setattr("kalmannorm.lab.training.evaluate._scores", reached)


def places(folder: Path) -> dict[str, Path]:
    """Where nothing can be written, also by root."""
    (folder / "file").write_text("")
    return {
        "too long": folder / ("x" * 300),
        "below a file": folder / "file" / "deep" / "down",
    }


@pytest.mark.parametrize("place", ["too long", "below a file"])
@pytest.mark.parametrize(
    "command",
    [["train"], ["compare"], ["demo"], ["reproduce", "cifar", "--dataset", "digits"]],
    ids=lambda words: words[0],
)
def test_folders(capsys, tmp_path, no_work, command, place):
    out = places(tmp_path)[place]
    line = said(capsys, *command, "--out", str(out))
    assert line.startswith(f"kalmannorm: cannot write to {out}: ")


def test_a_run_that_is_resumed_below_a_name_too_long(capsys, tmp_path):
    for command in (["train", "--resume"], ["evaluate"], ["analyse"], ["report"]):
        for place in places(tmp_path).values():
            said(capsys, *command, str(place))


@pytest.mark.parametrize("place", ["too long", "below a file"])
@pytest.mark.parametrize("command", ["report", "export", "bench"])
def test_files(capsys, finished, tmp_path, no_work, command, place):
    out = places(tmp_path)[place]
    out = out.with_name(out.name + ".pt2")
    words = {"report": ["report", str(finished)], "export": ["export", str(finished)], "bench": ["bench", "op"]}[
        command
    ]
    assert str(out) in said(capsys, *words, "-o", str(out))


@pytest.mark.parametrize("command", ["report", "export", "bench"])
def test_what_is_no_regular_file_is_not_replaced(capsys, finished, tmp_path, no_work, command):
    """As /dev/stdout, which is a link to a pipe or a terminal."""
    fifo = tmp_path / "fifo.pt2"
    os.mkfifo(fifo)
    words = {"report": ["report", str(finished)], "export": ["export", str(finished)], "bench": ["bench", "op"]}[
        command
    ]
    for out in (fifo, tmp_path):
        said(capsys, *words, "-o", str(out))
    assert "is not a regular file" in said(capsys, *words, "-o", str(fifo))
    assert fifo.is_fifo()


@pytest.mark.parametrize(
    ("command", "name"), [("evaluate", "evaluation.json"), ("analyse", "analysis"), ("report", "figures")]
)
def test_a_place_that_is_taken_is_found_before_the_work(capsys, finished, tmp_path, no_work, command, name):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    if command == "evaluate":
        (folder / name).mkdir()
    else:
        (folder / name).write_text("")
    more = ["--out", str(folder / "page.html"), "--figures", str(folder / name)] if command == "report" else []
    assert str(folder / name) in said(capsys, command, str(folder), *more)


def test_a_folder_without_permission(capsys, tmp_path, monkeypatch, no_work):
    """Bits do not stop root, who may run the tests."""
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    for command in (["train"], ["compare"]):
        assert f"no permission in {tmp_path}" in said(capsys, *command, "--out", str(tmp_path / "a" / "b"))


def test_a_data_root_below_a_file(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert run(["data", "fetch", "cifar10", "--data-root", str(tmp_path / "file")]) == 2
    err = capsys.readouterr().err
    assert "cannot write to" in err and str(tmp_path / "file") in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("a\0b", "a control character"),
        ("a\nb", "a control character"),
        (os.fsdecode(b"r\xff"), "not UTF-8"),
        ("x" * 100_000, "100,000 characters"),
        ("", "empty"),
    ],
    ids=["NUL", "newline", "not UTF-8", "long", "empty"],
)
@pytest.mark.parametrize("command", [["train", "--out"], ["evaluate"], ["bench", "--model"], ["report"]])
def test_words_that_no_option_takes(capsys, tmp_path, monkeypatch, command, word, expected):
    monkeypatch.chdir(tmp_path)
    line = said(capsys, *command, word)
    assert expected in line and len(line) < 500
    if command[-1].startswith("--"):
        assert command[-1] in line
        assert expected in said(capsys, *command[:-1], f"{command[-1]}={word}")
    assert not list(tmp_path.iterdir())


def test_brackets_in_names_are_no_markup(capsys, finished, tmp_path, monkeypatch):
    """rich takes [/b] for the end of something, and raises where nothing began."""
    folder = tmp_path / "[red]run[/b]"
    shutil.copytree(finished, folder)
    for command in (["train", "--resume", str(folder)], ["analyse", str(folder), "--batches", "1"]):
        assert run(command) == 0
        out, err = capsys.readouterr()
        assert str(folder) in out + err
    assert run(["data", "list", "--data-root", str(folder)]) == 0
    assert str(folder) in capsys.readouterr().out.replace("\n", "")


def test_a_report_on_a_folder_whose_name_is_not_utf8(capsys, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "runs" / os.fsdecode(b"r\xff"))
    page = tmp_path / "page.html"
    assert run(["report", str(tmp_path / "runs"), "--out", str(page), "--no-draw"]) == 0
    assert "r\\udcff" in page.read_text(encoding="utf-8")


def test_an_error_of_the_file_system_that_nobody_foresaw(capsys, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(5, "Input/output error", str(tmp_path / "disk"))

    monkeypatch.setattr("kalmannorm.lab.training.train.train", fail)
    assert said(capsys, "train", "--json") == f"kalmannorm: {tmp_path / 'disk'}: Input/output error\n"
