"""What conversion costs, measured in processes of their own: a resident peak is never given back."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def measured(task):
    """Seconds and MiB; one thread, because two would wait for each other where other tests run beside."""
    command = [sys.executable, str(BENCHMARKS / "conversion.py"), "--task", task, "--threads", "1"]
    return map(float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


def test_conversion_of_resnet101_is_quick_and_small():
    _, forward = measured("forward")
    seconds, peak = measured("weights copy")
    assert seconds < 5
    assert peak < 1.3 * forward


def test_the_record_says_the_same():
    with (BENCHMARKS / "records" / "conversion.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5
    assert all(float(row["seconds"]) < 5 and float(row["peak_ratio"]) < 1.3 for row in rows)
