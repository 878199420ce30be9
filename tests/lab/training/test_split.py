"""One setting, computed in one pass with groups, by accumulation, or over ranks: the numbers are the same."""

from __future__ import annotations

import subprocess

import pytest
import torch

from kalmannorm_command.app import run
from support.lab_runs import ENVIRONMENT, kalmannorm, launcher, losses, weights
from support.wide import narrow, wide

SETTING = [
    "--setting",
    "128,2",
    "--epochs",
    "2.9",
    "--learning-rate",
    "0.01",
    "--log-every",
    "1",
    "--evaluate-every",
    "0",
]
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}


@pytest.fixture(
    scope="module",
    params=narrow([("bkn", "float64"), ("bkn", "float32"), ("brn", "float64")], [("bkn", "float64")]),
    ids="-".join,
)
def case(request):
    """A method and a precision; Batch Renorm corrects towards running statistics that must not move in between."""
    return request.param


@pytest.fixture(scope="module")
def in_one_pass(case, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "groups"
    assert run(["train", *SETTING, "--method", case[0], "--precision", case[1], "--out", str(folder)]) == 0
    assert len(losses(folder)) >= 20
    return folder


@pytest.mark.parametrize(
    ("ranks", "options"), [(1, ["--micro-batch", "32"]), pytest.param(2, [], marks=wide), (2, ["--micro-batch", "48"])]
)
def test_same_loss_curve(in_one_pass, case, tmp_path, ranks, options):
    folder = tmp_path / "run"
    method, precision = case
    words = ["train", *SETTING, "--method", method, "--precision", precision, *options, "--out", str(folder)]
    if ranks == 1:
        assert run(words) == 0
    else:
        kalmannorm(*words, ranks=ranks)
    tolerance = TOLERANCE[precision]
    torch.testing.assert_close(losses(folder), losses(in_one_pass), rtol=tolerance, atol=tolerance)
    expected = weights(in_one_pass)
    for name, value in weights(folder).items():  # running statistics and their counts, too
        torch.testing.assert_close(value, expected[name], rtol=10 * tolerance, atol=10 * tolerance, msg=name)


ENDS = """
import atexit, os, pathlib
from torch import distributed
left = pathlib.Path(os.environ["RANK"])
atexit.register(lambda: left.write_text(str(distributed.is_initialized())))  # handlers run last to first
import torch
from kalmannorm.lab.training.device import launched
from kalmannorm.lab.recipes.recipe import Execution, Recipe
launched(Recipe(), Execution(device="cpu")).all_reduce(torch.ones(3))
"""


@wide
def test_ranks_part_before_python_ends(tmp_path):
    """Else a thread of gloo's may abort a rank that has finished."""
    (tmp_path / "ends.py").write_text(ENDS)
    command = [*launcher(2), "ends.py"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["False", "False"]
