"""Under Slurm every task of srun is a rank. The batch script of examples/ starts a run and resumes it when requeued."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kalmannorm.lab.errors import LabError
from kalmannorm.lab.files import checkpoint
from kalmannorm.lab.machine.ranks import Ranks, ranks
from kalmannorm.lab.training.meeting import slurm
from kalmannorm_command.app import run
from support import srun
from support.lab_runs import ENVIRONMENT, losses, weights
from support.saying import said
from support.wide import wide

SCRIPT = Path(__file__).parents[3] / "examples" / "slurm_train.sh"
WORDS = ["--setting", "64,2", "--epochs", "3", "--precision", "float64", "--learning-rate", "0.01"]
WORDS += ["--log-every", "1", "--save-every", "5", "--evaluate-every", "0", "--no-tensorboard"]
STEP = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "4"}
STEP |= {"SLURM_PROCID": "6", "SLURM_LOCALID": "2", "SLURM_NODEID": "1"}


@pytest.fixture
def cluster(tmp_path):
    """A job of two nodes with one task each, as sbatch describes it to a script."""
    tools = tmp_path / "tools"
    tools.mkdir()
    shutil.copy(srun.__file__, tools / "srun")
    (tools / "scontrol").write_text('#!/bin/sh\necho "$@" >> "$SCONTROL"\n')
    (tools / "kalmannorm").write_text(f'#!/bin/sh\nexec {sys.executable} -m kalmannorm "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"JOB_ID": "4711", "JOB_NAME": "kalmannorm-train", "NODELIST": "localhost,elsewhere", "NTASKS": "2"}
    job |= {"NNODES": "2", "NTASKS_PER_NODE": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    return {
        **ENVIRONMENT,
        **{f"SLURM_{name}": value for name, value in job.items()},
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "MASTER_PORT": str(port),  # Slurm's own choice follows from the job's number, and may be taken here
        "SRUN_PID": str(tmp_path / "srun.pid"),
        "SCONTROL": str(tmp_path / "scontrol.txt"),
    }


def test_the_batch_script_trains_and_goes_on_when_requeued(cluster, tmp_path):
    folder, alone = tmp_path / "run", tmp_path / "alone"
    words = ["bash", str(SCRIPT), *WORDS, "--out", str(folder)]
    job = subprocess.Popen(words, env=cluster, stderr=subprocess.PIPE, text=True)
    while job.poll() is None and not checkpoint.checkpoints(folder):
        time.sleep(0.01)
    os.kill(int(Path(cluster["SRUN_PID"]).read_text()), signal.SIGTERM)  # as --signal=TERM@120 has it sent
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 130, errors
    assert errors.count("--resume") == 1, "rank 0 alone speaks"
    assert not (folder / "result.json").exists(), "the run ended before the signal came: make it longer"
    assert Path(cluster["SCONTROL"]).read_text() == "requeue 4711\n"
    again = cluster | {"SLURM_RESTART_COUNT": "1"}
    done = subprocess.run(words, env=again, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("inference") == 1, "rank 0 alone prints the result"
    assert run(["train", *WORDS, "--out", str(alone)]) == 0
    torch.testing.assert_close(losses(folder), losses(alone), rtol=1e-9, atol=1e-9)
    for name, value in weights(folder).items():
        torch.testing.assert_close(value, weights(alone)[name], rtol=1e-8, atol=1e-8, msg=name)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, Ranks(6, 8, 2, 4)),
        ({"SLURM_STEP_ID": None}, Ranks()),  # a command in a batch script, without srun
        ({"SLURM_NTASKS": "1"}, Ranks()),
        (
            {"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            Ranks(3, 4, 1, 2),  # torchrun inside a job
        ),
    ],
    ids=["srun", "batch", "one-task", "torchrun"],
)
def test_who_is_which_rank(monkeypatch, more, expected):
    for name, value in (STEP | more).items():
        if value is not None:
            monkeypatch.setenv(name, value)
    assert ranks() == expected


def test_a_command_without_srun_trains_alone(monkeypatch, tmp_path):
    """Fabric would take the tasks of the job for ranks."""
    for name, value in STEP.items():
        if name != "SLURM_STEP_ID":
            monkeypatch.setenv(name, "0" if name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID") else value)
    quick = ["--train-examples", "128", "--test-examples", "64", "--epochs", "1", "--no-tensorboard"]
    assert run(["train", *quick, "--out", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "result.json").is_file()


def test_mistakes_are_told(monkeypatch, capsys, tmp_path):
    for name, value in (STEP | {"SLURM_PROCID": "0"}).items():
        monkeypatch.setenv(name, value)
    line = said(capsys, "compare", "--out", str(tmp_path / "runs"))
    assert "start the command once, without them" in line
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    with pytest.raises(LabError, match="give --ntasks-per-node to sbatch"):
        slurm()


@wide
def test_the_batch_script_of_a_comparison(cluster, tmp_path):
    """The workers are tasks of srun. Their runs must not take this for ranks."""
    folder = tmp_path / "runs"
    words = ["bash", str(SCRIPT.with_name("slurm_compare.sh")), "--methods", "bn,bkn", "--setting", "64,2"]
    words += ["--seeds", "1", "--epochs", "1", "--train-examples", "128", "--device", "cpu", "--threads", "1"]
    dask = f"{cluster['PATH']}{os.pathsep}{Path(sys.executable).parent}"
    own = cluster | {"PATH": dask, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    words += ["--out", str(folder)]
    with subprocess.Popen(
        words,
        env=own,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    ) as job:
        try:
            _, errors = job.communicate(timeout=300)
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing is left of the job
                os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 0, errors
    assert len(list(folder.glob("*/result.json"))) == 2
    assert (folder / "report.html").is_file()
    assert not list(tmp_path.glob("scheduler-*.json"))
