"""A few attacks on the command line; `python benchmarks/attack.py options` makes many."""

from __future__ import annotations

from support.attacks import options


def test_odd_values_end_in_one_line(tmp_path):
    found = options.run(20, 1, tmp_path)
    assert not any(found[name] for name in options.MUST_BE_ZERO), found
    assert found["commands"] == 20 == found["refused"] + found["accepted"]
    assert min(found["refused"], found["accepted"]) > 5
