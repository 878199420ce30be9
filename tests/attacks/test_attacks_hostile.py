"""A few hostile files; `python benchmarks/attack.py hostile` makes many."""

from __future__ import annotations

from support.attacks import hostile


def test_hostile_files_are_refused_or_read(tmp_path):
    found = hostile.run(30, 1, tmp_path)
    assert not any(found[name] for name in hostile.MUST_BE_ZERO), found
    assert found["files"] == 30 == found["refused"] + found["skipped"] + found["read"]
    assert found["refused"] > 5 and found["read"] > 3
