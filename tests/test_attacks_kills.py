"""Killed at a random moment, a run goes on to the same end: one attack here, many by `python benchmarks/attack.py`."""

from __future__ import annotations

from attacks import kills


def test_a_killed_run_ends_as_if_nothing_had_happened(tmp_path):
    counts = kills.run(1, 2, tmp_path)
    assert counts["kills"] == counts["restarts"] == 1, "the run ended before it was killed: give another seed"
    assert [counts[name] for name in kills.MUST_BE_ZERO] == [0, 0]
