"""`kalmannorm bench` on a GPU: what is timed is a CUDA graph, and what is checked is its replay."""

from __future__ import annotations

import pytest
import torch

from kalmannorm.lab.bench import copying, inference, inference_model, op
from kalmannorm.lab.bench.step import bench
from kalmannorm.lab.bench.step_contenders import NONE, Case, Entry, entries
from kalmannorm.lab.bench.timing import Graphed, count_kernels
from kalmannorm.lab.recipes.setting import Setting

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


def test_a_replay_writes_what_the_call_gives_and_is_timed():
    x = torch.randn(1000, device=GPU)
    ready = Graphed(lambda: (x.neg(), x + 1), GPU, 1e-4, unrolled=3)
    x.fill_(2.0)
    negative, more = ready.results()
    assert (negative == -2).all() and (more == 3).all()
    assert 0 < ready.seconds().clock < 1e-3
    assert ready.seconds().processor is None
    assert count_kernels(lambda: (x.neg(), x + 1), GPU) == 2


def test_a_copy_is_measured(monkeypatch):
    monkeypatch.setitem(copying.BYTES, "cuda", 2**26)
    assert copying.copy_speed(GPU) > 1e10


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # inductor, of any GPU that has them
@pytest.mark.parametrize("inductor", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("layout", op.LAYOUTS)
def test_one_norm(layout, inductor):
    (case,) = op.cases([(8, 64, 9, 9)], [layout], "bf16", GPU, "2,N")
    rows = op.measure(case, 5, copy=1e12, inductor=inductor)
    assert [row["contender"] for row in rows if row["statistics_batch"] == "N"][-2:] == ["BKN", "BKN settled"]
    assert all(row["error"] < 2e-2 or row["contender"] == "GroupNorm" for row in rows)
    rows = inference.measure(case, 5, copy=1e12)
    assert all(row["us"] > 0 for row in rows)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_steps(precision):
    case = Case(
        model="cifar-resnet-20", gradient_batch=8, device=GPU, channels_last=True, precision=precision, cuda_graph=True
    )
    contenders = [*entries(8, [8, 2], ["bn", "bkn", "bkn-learned"], fused=True), Entry(NONE, Setting(8, 8))]
    contenders[1:1] = entries(8, [2], ["bn", "bkn", "bkn-ws"], settled=True)[1:]
    rows = bench(case, contenders, 5)
    assert len(rows) == 20 and [row["way"] for row in rows].count("settled") == 3
    assert all(row["kernels"] > 10 and row["ms"] > 0 and row["peak_mib"] > 0 for row in rows)
    assert rows[-1]["kernels"] < rows[0]["kernels"]


def test_inference_of_a_net():
    case = Case(model="cifar-resnet-20", gradient_batch=8, device=GPU, precision="bf16", cuda_graph=True)
    rows = {row["contender"]: row for row in inference_model.measure(case, 2, 5, fused=True)}
    assert rows["BKN population folded"]["kernels"] == rows["BatchNorm folded"]["kernels"]
