"""`python benchmarks/attack.py`: the counts of every area, the record, the table of docs/reliability.md."""

from __future__ import annotations

import fcntl
import json
import time

import attack
import pytest

AREA = """
import fcntl, os, subprocess, sys, time

MUST_BE_ZERO = ("wrong",)

def run(count, seed, folder):
    (folder / "scratch").write_text("here")
    {body}
    return {{"calls": count, "wrong": seed}}
"""
ORIGIN = {"hardware": "two cores", "torch": "2.10.0", "python": "3.11.7", "commit": "a" * 40, "command": "attack"}


@pytest.fixture
def areas(tmp_path):
    """Writes an area that does as it is told, and attacks with it."""
    folder = tmp_path / "support" / "attacks"
    folder.mkdir(parents=True)

    def attacked(body="pass", seed=0, limit=60.0):
        (folder / "numbers.py").write_text(AREA.format(body=body))
        return attack.attack("numbers", 5, seed, limit, tmp_path)

    return attacked


def test_counts_are_kept_and_those_that_must_be_zero_are_judged(areas):
    row = areas()
    assert (row["counts"], row["must_be_zero"]) == ({"calls": 5, "wrong": 0}, ["wrong"])
    assert attack.faults(row) == []
    assert attack.faults(areas(seed=3)) == ["numbers: wrong is 3, and must be 0"]
    assert attack.faults({**row, "counts": {"calls": 5}}) == ["numbers: wrong is None, and must be 0"]


def free(path):
    """Whether no living process holds the lock."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_an_area_that_dies_is_a_fault(areas):
    assert attack.faults(areas("os._exit(9)")) == ["numbers: ended with exit status 9 before it counted"]


def test_an_area_that_hangs_is_ended_with_what_it_has_started(areas, tmp_path):
    (lock := tmp_path / "lock").touch()
    child = "[sys.executable, '-c', 'import time; time.sleep(60)'], pass_fds=[held.fileno()]"
    body = f"held = open({str(lock)!r}); fcntl.flock(held, fcntl.LOCK_EX); subprocess.Popen({child}); time.sleep(60)"
    assert attack.faults(areas(body, limit=1.0)) == ["numbers: stopped after 1 s"]
    deadline = time.monotonic() + 10
    while not free(lock):
        assert time.monotonic() < deadline, "the child lives on"


def test_areas_and_counts_are_chosen_by_words():
    assert attack.chosen([]) == attack.AREAS
    assert attack.chosen(["kills", "flips=50"]) == {"kills": attack.AREAS["kills"], "flips": 50}
    for words, message in ((["flip"], "no area 'flip': choose from numbers"), (["flips=0"], "flips=0: the number of")):
        with pytest.raises(ValueError, match=message):
            attack.chosen(words)


def test_the_record_keeps_the_other_areas_and_the_table_says_what_it_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(attack, "RECORD", tmp_path / "attack.jsonl")
    begin, end = "<!-- attack.jsonl -->\n", "<!-- end of attack.jsonl -->\n"
    assert attack.written(begin + "old" + end) == begin + "Nothing has been recorded yet.\n" + end
    base = {"attacks": 5, "counts": {"calls": 1234, "wrong": 0}, "must_be_zero": ["wrong"], "error": "", **ORIGIN}
    rows = [{"area": area, "seconds": 7, "seed": 3, **base} for area in ("kills", "numbers")]
    attack.keep(rows)
    attack.keep([{**rows[0], "error": "stopped after 60 s", "counts": {}, "command": "again"}])
    assert [json.loads(line)["area"] for line in attack.RECORD.read_text().splitlines()] == ["numbers", "kills"]
    text = attack.written(begin + end)
    assert "| numbers | wrong 0 | calls 1,234 | 3 | 5 | 7 |\n| kills | stopped after 60 s |  | 3 | 5 | 7 |\n" in text
    assert "- numbers: two cores, torch 2.10.0, Python 3.11.7, commit aaaaaaa; `attack`.\n- kills: " in text
    assert attack.written(text) == text


def test_the_document_says_what_the_record_says():
    text = attack.DOCUMENT.read_text(encoding="utf-8")
    assert attack.written(text) == text, "run python benchmarks/attack.py --table"
    assert [fault for row in attack.read() for fault in attack.faults(row)] == []
