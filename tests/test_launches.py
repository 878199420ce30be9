"""Which launches are chosen, against the sweep of an H200 that they were chosen from; its record needs no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
launches = pytest.importorskip("launches")

MEASURED = launches.measured(launches.RECORD)


def named(key):
    case, direction = key
    return f"{launches.word(case)}-{'NHWC' if case.shape.channels_last else 'NCHW'}-{direction}"


def test_the_record_is_of_these_cases():
    assert {case for case, _ in MEASURED} == set(launches.CASES)


@pytest.mark.parametrize("key", MEASURED, ids=named)
def test_near_the_best(key):
    times, chosen = MEASURED[key], launches.tile(launches.chosen(*key))
    if chosen not in times:
        pytest.skip("not among what was measured")
    assert times[chosen] <= 1.2 * min(times.values())


BOTH = launches.measured(launches.RECORD_OF_BOTH)


def test_the_record_of_both_is_of_these_cases():
    assert {case for case, _ in BOTH} == set(launches.CASES_OF_BOTH)


@pytest.mark.parametrize("key", BOTH, ids=named)
def test_near_the_best_with_the_backward_behind(key):
    times = BOTH[key]
    assert times[launches.tile(launches.chosen(*key))] <= 1.1 * min(times.values())


def test_nearly_all_was_measured():
    missing = [named(key) for key in MEASURED if launches.tile(launches.chosen(*key)) not in MEASURED[key]]
    assert len(missing) <= 3, missing


@pytest.mark.parametrize("case", launches.CASES[::7], ids=lambda case: named((case, "")))
def test_a_sweep_tries_what_is_chosen_and_more(case):
    tried = set(launches.candidates(case))
    assert {launches.chosen(case, direction) for direction in ("forward", "backward")} < tried
    assert len(tried) >= 5
