"""A few of the attacks on reports; `python benchmarks/attack.py` makes many."""

from __future__ import annotations

from support.attacks import reports


def test_no_damage_stops_a_report_or_brings_it_a_script(tmp_path):
    counts = reports.run(8, 17, tmp_path)
    assert counts["reports"] == 8 and counts["left_out"] > 4
    assert {name: counts[name] for name in reports.MUST_BE_ZERO} == dict.fromkeys(reports.MUST_BE_ZERO, 0)
