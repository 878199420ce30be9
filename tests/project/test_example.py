"""The examples run as they stand, and reach what their texts say."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples"


def main_of(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


def test_the_own_loop_trains_and_ships(capsys):
    plain = main_of("own_loop")(epochs=2)
    lines = capsys.readouterr().out.splitlines()
    assert not any(isinstance(module, nn.BatchNorm2d) for module in plain.modules())
    *_, population, folded = [line.split(": ")[-1] for line in lines]
    assert population == folded
    assert float(folded.removesuffix(" %")) > 70


def test_fine_tuning_starts_where_the_pretrained_model_stopped():
    found = main_of("fine_tune")(steps=60)
    assert found["converted"] == found["pretrained"]
    assert found["fine-tuned"] > found["pretrained"]


def test_micro_batches_are_one_batch():
    assert main_of("accumulation")() < 1e-5


def test_two_processes_learn_the_same():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run():
        script = [*command, str(EXAMPLES / "distributed.py")]
        return subprocess.run(script, env=environment, capture_output=True, text=True, timeout=300)

    done = run()
    # DDP of torch 2.10 keeps its gloo group, whose threads live on behind `destroy_process_group`. If one of them lets
    # go of a tensor while Python shuts down, the process aborts with these words, after all its work (pytorch #190489).
    if "terminate called without an active exception" in done.stderr and "equal: True" in done.stdout:
        done = run()
    assert done.returncode == 0, done.stderr
    assert re.search(r"2 processes, gains .*'module\.4': 0\.5\d+.*, equal: True", done.stdout)


@pytest.mark.filterwarnings("ignore")  # of MONAI's imports
def test_volumes_at_batch_1():
    assert main_of("volumes")(steps=20) > 0.3


@pytest.mark.filterwarnings("ignore")  # of Lightning
def test_lightnings_trainer():
    found = main_of("lightning_trainer")(epochs=1)
    assert found["accuracy"] > 0.5
    assert found["kalman/gain"] != 0.5


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_hugging_faces_trainer():
    found = main_of("hugging_face_trainer")(steps=40)
    assert found["last"] < 0.9 * found["first"]


def test_segmentation_at_batch_2():
    assert main_of("segmentation")(steps=20) > 40


@pytest.mark.parametrize(("name", "options"), [("detection", {"steps": 15, "scenes": 1}), ("video", {"steps": 10})])
def test_the_loss_falls_at_batch_1(name, options):
    first, last = main_of(name)(**options)
    assert last < 0.8 * first


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_onnx_files_give_the_results_of_torch(tmp_path):
    assert all(difference < 1e-5 for difference in main_of("export_onnx")(str(tmp_path)).values())


def test_every_example_is_run_here():
    text = Path(__file__).read_text(encoding="utf-8")
    assert not [path.name for path in EXAMPLES.glob("*.py") if path.stem not in text]
