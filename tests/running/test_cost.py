"""What conversion costs, measured in processes of their own: a resident peak is never given back. And what the priors
of a forward cost, in operations.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from torch.utils._python_dispatch import TorchDispatchMode

from kalmannorm import convert
from support.wide import narrow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def measured(task):
    """Seconds of a processor and MiB; with one thread no less than by the clock where nothing runs beside it."""
    command = [sys.executable, str(BENCHMARKS / "conversion.py"), "--task", task, "--threads", "1"]
    _, seconds, peak = map(float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    return seconds, peak


@pytest.mark.parametrize("place", narrow(["inplace", "copy"], ["copy"]))
def test_conversion_of_resnet101_is_quick_and_small(place):
    """As small as a forward, of a copy where one is made."""
    _, forward = measured(f"forward {place}")
    seconds, peak = measured(f"weights {place}")
    assert seconds < 5
    assert peak < 1.05 * forward


def test_the_record_says_the_same():
    with (BENCHMARKS / "records" / "conversion.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    assert all(float(row["seconds"]) < 5 for row in rows)
    assert all(float(row["own_ratio"]) < 1.05 for row in rows if row["task"].startswith("weights"))
    assert all(float(row["own_ratio"]) < 1.3 for row in rows)  # learned transitions have parameters of their own


VIEWS = {"view", "_unsafe_view", "select", "slice", "detach", "unsqueeze", "squeeze", "expand", "transpose", "permute"}
VIEWS |= {"t", "unbind", "split", "split_with_sizes", "as_strided"}


class Operations(TorchDispatchMode):
    """Counts what computes or copies anything."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ not in VIEWS
        return func(*args, **(kwargs or {}))


def operations(model, x):
    """Of a forward and of its backward, once everything is ready."""
    model(x).sum().backward()
    with Operations() as forward:
        y = model(x)
    with Operations() as backward:
        y.sum().backward()
    return forward.count, backward.count


def test_priors_of_resnet50_cost_few_operations():
    """Beside the same norms without priors. Step by step it was 4,350 and 6,700, views counted."""
    x = torch.randn(2, 3, 32, 32)
    ghost = operations(convert(torchvision.models.resnet50(), to="ghost", statistics_batch_size=2), x)
    kalman = operations(convert(torchvision.models.resnet50(), x, statistics_batch_size=2), x)
    assert kalman[0] - ghost[0] < 16 * 53
    assert kalman[1] - ghost[1] < 25 * 53
