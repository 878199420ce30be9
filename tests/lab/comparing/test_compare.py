"""Comparisons: cells are skipped, resumed, failed and interrupted one by one, and nothing that was finished is lost."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.text import Text

from kalmannorm.lab.comparing.cells import grid
from kalmannorm.lab.comparing.compare import FailedCellsError, run_cells
from kalmannorm.lab.comparing.live import LiveTable
from kalmannorm.lab.comparing.pool import Outcome, seats
from kalmannorm.lab.comparing.progress import Progress
from kalmannorm.lab.comparing.summary import summarize, table
from kalmannorm.lab.errors import LabError
from kalmannorm.lab.files.records import Run
from kalmannorm.lab.recipes.presets import preset
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.recipes.setting import Setting
from support import cells_trainers as trainers

CPU = Execution(device="cpu", tensorboard=False)


def seeded(count: int, **changes) -> list[tuple[str, Recipe]]:
    return [(f"cell-{seed}", Recipe(seed=seed, **changes)) for seed in range(count)]


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def test_the_grid_is_methods_by_settings_by_seeds():
    cells = grid(preset("digits"), ["bn", "gn", "bkn"], [Setting(64, 64), Setting(64, 2), Setting(32, 2)], range(2))
    settings = {
        name: [cell.setting for _, cell in cells if cell.method == name and cell.seed == 1] for name in ("bn", "gn")
    }
    assert settings["bn"] == [(64, 64), (64, 2), (32, 2)]
    assert settings["gn"] == [(64, 64), (32, 32)]  # the statistics batch is nothing to it
    assert len({name for name, _ in cells}) == len(cells) == 2 * (3 + 3 + 2)
    assert [cell.seed for _, cell in cells] == sorted(cell.seed for _, cell in cells)


def test_the_learning_rate_follows_the_gradient_batch_unless_it_is_given():
    def rates(**changes):
        cells = grid(preset("digits"), ["bn"], [Setting(64, 2), Setting(32, 2)], [0], changes)
        return [cell.learning_rate for _, cell in cells]

    assert rates()[1] == rates()[0] / 2
    assert rates(learning_rate=0.3) == [0.3, 0.3]


@pytest.mark.parametrize(
    ("methods", "setting", "says"), [(["bm"], (64, 2), "unknown method 'bm'"), (["bn"], (64, 3), "does not divide")]
)
def test_a_bad_cell_is_refused_before_any_runs(methods, setting, says):
    with pytest.raises(LabError, match=says):
        grid(preset("digits"), methods, [Setting(*setting)], [0])


def test_another_recipe_in_the_folder_is_an_error_before_any_cell_runs(tmp_path):
    (there, recipe), *_ = cells = seeded(3)
    other = dataclasses.replace(recipe, epochs=7, gain=0.25)
    trainers.describe(other, tmp_path / there)
    trainers.conclude(other, tmp_path / there)
    before = snapshot(tmp_path)
    with pytest.raises(LabError) as error:
        run_cells(cells, tmp_path, CPU, trainer=trainers.troubled)
    for word in (str(tmp_path / there), "epochs 7 there, 20 wanted", "gain 0.25 there, None wanted"):
        assert word in str(error.value)
    assert snapshot(tmp_path) == before


def test_two_cells_of_one_name_are_an_error(tmp_path):
    with pytest.raises(LabError, match="two runs are named cell-0"):
        run_cells([*seeded(1), *seeded(1)], tmp_path, CPU)


@pytest.fixture(scope="module")
def troubled(tmp_path_factory):
    """Everything happens: seed 0 is finished before, 1 diverges, 2 to 5 fail, 6 was broken off."""
    folder = tmp_path_factory.mktemp("troubled")
    cells = seeded(14)
    trainers.describe(cells[0][1], folder / "cell-0")
    trainers.conclude(cells[0][1], folder / "cell-0")
    trainers.describe(cells[6][1], folder / "cell-6")
    before = snapshot(folder / "cell-0")
    with pytest.raises(FailedCellsError) as caught:
        run_cells(cells, folder, CPU, jobs=2, quiet=True, trainer=trainers.troubled)
    assert snapshot(folder / "cell-0") == before, "a finished cell was run again"
    return folder, caught.value


def test_a_cell_that_fails_stops_no_other(troubled):
    folder, error = troubled
    finished = {run.folder.name for run in error.runs}
    assert finished == {f"cell-{seed}" for seed in (0, 1, *range(6, 14))}
    assert all((folder / name / "result.json").is_file() for name in finished)
    assert sorted(error.failures) == ["cell-2", "cell-3", "cell-4", "cell-5"]
    assert error.status != 0


def test_every_failure_is_told_in_one_line(troubled):
    folder, error = troubled
    lines = str(error).splitlines()
    assert len(lines) == 5
    assert "4 of 14 runs failed" in lines[0]
    assert "  cell-2: the data are missing: fetch them" in lines
    assert any("cell-4" in line and "SIGKILL" in line for line in lines)
    assert any("cell-3" in line and "status 7" in line for line in lines)
    (fallen,) = [line for line in lines if "cell-5" in line]
    assert "ZeroDivisionError: a bug" in fallen and "of two lines" not in fallen
    output = (folder / "output" / "cell-5.txt").read_text()
    assert str(folder / "output" / "cell-5.txt") in fallen
    assert "said before the fall" in output and "of two lines" in output


def test_a_diverged_cell_is_a_result_and_marked(troubled):
    _, error = troubled
    (row,) = summarize(error.runs)
    assert (row["finished"], row["diverged"]) == (10, 1)
    assert "10 (1 diverged)" in table([row])


def test_an_unfinished_cell_goes_on(troubled):
    folder, _ = troubled
    assert json.loads((folder / "cell-6" / "seen.json").read_text())["again"]
    assert not json.loads((folder / "cell-7" / "seen.json").read_text())["again"]


def test_workers_live_over_cells_but_not_over_a_fall(troubled):
    folder, _ = troubled
    pids = [json.loads((folder / f"cell-{seed}" / "result.json").read_text())["pid"] for seed in range(6, 14)]
    assert len(set(pids)) < len(pids) and os.getpid() not in pids
    # Whoever fell for a reason unknown may hold memory, or a broken device.
    assert json.loads((folder / "cell-5" / "fallen.json").read_text())["pid"] not in pids


def test_what_printed_nothing_leaves_no_file(troubled):
    folder, _ = troubled
    assert {path.name for path in (folder / "output").iterdir()} == {f"cell-{seed}.txt" for seed in (3, 4, 5)}


def test_one_reason_for_all_is_told_once():
    error = FailedCellsError({"a": "no data", "b": "no data"}, 2, [])
    assert str(error) == "all 2 runs failed: no data"


SCRIPT = """
import sys
from pathlib import Path
from support import cells_trainers as trainers
from kalmannorm.lab.comparing.compare import run_cells
from kalmannorm.lab.errors import LabError
from kalmannorm.lab.recipes.recipe import Execution, Recipe

if __name__ == "__main__":
    cells = [(f"cell-{seed}", Recipe(seed=seed)) for seed in range(6)]
    try:
        run_cells(cells, Path(sys.argv[1]), Execution(device="cpu"), jobs=2, trainer=trainers.patient)
    except LabError as error:
        print(error)
        sys.exit(error.status)
"""


@pytest.fixture
def under_way(tmp_path):
    """A comparison in another process, two of whose cells wait for a signal, and the folder it works in."""
    script = tmp_path / "comparing.py"
    script.write_text(SCRIPT)
    folder = tmp_path / "runs"
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert eventually(lambda: len(list(folder.glob("*/waiting"))) == 2), process.communicate(timeout=1)
    yield process, folder
    process.kill()
    process.communicate()


def eventually(condition, seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def saved(folder: Path) -> list[int]:
    """How many signals each worker got that saved."""
    return [json.loads(path.read_text())["signals"] for path in sorted(folder.glob("*/saved.json"))]


def test_ctrl_c_lets_every_worker_save_and_says_how_to_go_on(under_way):
    process, folder = under_way
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of the group
    printed, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert saved(folder) == [1, 1]  # each was asked once: a second time would break off its saving
    assert Run.read(folder / "cell-0").finished
    assert not list(folder.glob("cell-[345]")), "a cell was begun after Ctrl-C"
    assert "1 of 6 runs are finished" in printed
    assert f"resume with: python comparing.py {folder}" in printed


def test_workers_of_a_killed_comparison_save_and_end(under_way):
    process, folder = under_way
    process.kill()
    assert eventually(lambda: len(saved(folder)) == 2, 20)
    assert not list(folder.glob("cell-[345]"))


def test_one_worker_per_gpu_or_core(monkeypatch):
    cores = len(os.sched_getaffinity(0))
    assert seats("cpu", None) == [("cpu", 1)] * cores
    assert seats("cpu", 1) == [("cpu", cores)]
    assert len(seats("cpu", 5)) == 5
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [seat.device for seat in seats("auto", None)] == ["cuda:0", "cuda:1"]
    assert [seat.device for seat in seats("cuda", 3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [seat.device for seat in seats("cuda:1", 2)] == ["cuda:1", "cuda:1"]
    assert {seat.device for seat in seats("cpu", None)} == {"cpu"}


def run_of(folder: Path, recipe: Recipe, accuracy: float, diverged: bool = False) -> Run:
    trainers.describe(recipe, folder / recipe.name)
    trainers.conclude(recipe, folder / recipe.name, accuracy - recipe.seed, diverged)
    return Run.read(folder / recipe.name)


def test_the_summary_averages_seeds_and_nothing_else(tmp_path):
    runs = [
        run_of(tmp_path, Recipe(method=name, statistics_batch=m, seed=seed), accuracy)
        for name, m, seed, accuracy in [("bn", 2, 0, 90), ("bn", 2, 1, 94), ("bn", 1, 0, 50), ("bkn", 2, 0, 97)]
    ]
    rows = summarize(runs)
    assert [(row["title"], row["setting"]) for row in rows] == [("BN", [64, 2]), ("BN", [64, 1]), ("BKN", [64, 2])]
    assert rows[0]["accuracy"]["population"] == {"mean": 92, "std": pytest.approx(8**0.5), "n": 2}
    assert rows[1]["accuracy"]["population"] == {"mean": 50, "std": None, "n": 1}
    assert "92.0 ± 2.8" in table(rows)
    json.dumps(rows)


def test_recipes_that_differ_otherwise_are_rows_of_their_own(tmp_path):
    runs = [run_of(tmp_path / str(gain), Recipe(gain=gain), 90) for gain in (0.5, 0.9)]
    assert [row["title"] for row in summarize(runs)] == ["BKN, q₀ 0.5", "BKN, q₀ 0.9"]


def heard(step: int, **values) -> dict:
    return {"event": "progress", "step": step, "steps": 100, "epoch": step / 50, "loss": 0.5} | {
        "images_per_second": 640.0,
        **values,
    }


def test_the_time_left_counts_what_waits():
    now = [0.0]
    progress = Progress(seeded(4), workers=2, clock=lambda: now[0])
    assert progress.remaining() is None
    for cell in progress.cells[:2]:
        cell.state = "running"
        cell.hear(heard(0), now[0])
    now[0] = 10.0
    for cell in progress.cells[:2]:
        cell.hear(heard(50), now[0])
    # Both need 10 s more, and the two that wait 20 s each; two workers share it.
    assert progress.remaining() == pytest.approx((10 + 10 + 20 + 20) / 2)


def test_a_resumed_cell_is_not_taken_for_a_quick_one():
    progress = Progress(seeded(1), workers=1, clock=lambda: 10.0)
    cell = progress.cells[0]
    cell.state = "running"
    cell.hear(heard(80), 0.0)
    cell.hear(heard(90), 10.0)
    assert progress.remaining() == pytest.approx(10.0)


@pytest.mark.parametrize(("width", "height"), [(120, 40), (80, 24), (80, 10)])
def test_the_live_table_shows_every_state_in_any_terminal(tmp_path, width, height):
    cells = grid(preset("digits"), ["bn", "gn", "bkn"], [Setting(64, m) for m in (64, 8, 4, 2, 1)], range(2))
    first, *rest = cells
    trainers.describe(first[1], tmp_path / first[0])
    trainers.conclude(first[1], tmp_path / first[0], 97.25)
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True)
    shown = LiveTable(cells, rest, tmp_path, 2, console)
    shown.started(0)
    shown.heard(0, heard(50))
    shown.heard(0, {"event": "evaluate", "modes": {"population": {"accuracy": 88.5}, "batch": {"accuracy": 12.5}}})
    shown.started(1)
    shown.ended(1, Outcome("failed", "it fell"))
    console.print(shown.table())
    text = console.file.getvalue()
    assert all(len(line) <= width for line in Text.from_ansi(text).plain.splitlines())
    assert text.count("\n") <= height
    for word in ("97.2", "88.5", "12.5", "2 of 22 runs", "1 already finished"):
        assert word in text, word
    assert ("640" in text) == (width == 120)
    if height > 20:
        assert "1 failed" in text
