"""Damage to a run's files is found or does no harm: a few attacks; `python benchmarks/attack.py` makes many."""

from __future__ import annotations

from support.attacks import flips


def test_flips(tmp_path):
    counts = flips.run(12, 0, tmp_path)
    assert counts["flips"] == 12 and counts["refused"] and counts["fell_back"] and counts["harmless"], counts
    assert not any(counts[name] for name in flips.MUST_BE_ZERO), counts
