"""Attacks the library and the lab, counts what goes wrong, and records the counts for docs/reliability.md.

    python benchmarks/attack.py                          # every area, with the counts below: hours on two cores
    python benchmarks/attack.py numbers flips=50         # these areas, the second with 50 attacks
    python benchmarks/attack.py kills --seed 7 --limit 600
    python benchmarks/attack.py --table                  # only write the document again, from the record

An area is a module of tests/support/attacks with `run(count, seed, folder)`, which returns counts by name, and
MUST_BE_ZERO, the names of those that must be zero. The test suite makes a few attacks of each area. This command makes
many, each area in a process of its own, so that a crash or a hang of one does not stop the others. A run replaces the
lines of its areas in benchmarks/records/attack.jsonl and keeps those of the others. The exit status is 1 if a count
that must be zero is not, or if an area did not finish.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measured import RECORDS, ROOT, markdown, placed

RECORD = RECORDS / "attack.jsonl"
DOCUMENT = ROOT / "docs" / "reliability.md"
TESTS = ROOT / "tests"
AREAS = {"numbers": 100_000, "flips": 400, "options": 3_000, "hostile": 300, "kills": 20, "reports": 100}
"""The areas, in the order of the table, and the default number of attacks of each."""

Row = dict[str, Any]


def attack(area: str, count: int, seed: int, limit: float | None = None, tests: Path = TESTS) -> Row:
    """One line of the record, without its origin."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=f"attack-{area}-", ignore_cleanup_errors=True) as scratch:
        result = Path(scratch) / "result.json"
        (folder := Path(scratch) / "folder").mkdir()
        words = [sys.executable, __file__, "--inside", area, str(count), str(seed), folder, result, tests]
        # In a session of its own, so that all processes of the area can be ended together.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}  # one thread, as in the test suite
        process = subprocess.Popen([str(word) for word in words], cwd=ROOT, env=environment, start_new_session=True)
        try:
            status = process.wait(limit)
            error = "" if result.exists() else f"ended with exit status {status} before it counted"
        except subprocess.TimeoutExpired:
            error = f"stopped after {limit:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # if none of its processes is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        found = {"counts": {}, "must_be_zero": []} if error else json.loads(result.read_text(encoding="utf-8"))
    seconds = round(time.perf_counter() - start)
    return {"area": area, "attacks": count, **found, "error": error, "seconds": seconds, "seed": seed}


def inside(area: str, count: int, seed: int, folder: Path, result: Path, tests: Path) -> None:
    """The process of one area."""
    sys.path.insert(0, str(tests))  # as pytest does
    module = importlib.import_module(f"support.attacks.{area}")
    counts = module.run(count, seed, folder)
    result.write_text(json.dumps({"counts": counts, "must_be_zero": list(module.MUST_BE_ZERO)}), encoding="utf-8")


def faults(row: Row) -> list[str]:
    """The problems of an area, as sentences. Empty if there are none."""
    if row["error"]:
        return [f"{row['area']}: {row['error']}"]
    found = {name: row["counts"].get(name) for name in row["must_be_zero"]}
    return [f"{row['area']}: {name} is {count}, and must be 0" for name, count in found.items() if count != 0]


def read() -> list[Row]:
    return [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()] if RECORD.exists() else []


def keep(rows: list[Row]) -> None:
    """Write these lines into the record. They replace older ones of the same areas."""
    by_area = {row["area"]: row for row in [*read(), *rows]}
    ordered = sorted(by_area.values(), key=lambda row: list(AREAS).index(row["area"]))
    RECORD.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ordered), encoding="utf-8")


def table(rows: list[Row]) -> list[str]:
    return markdown(
        ["area", "must be zero", "counted", "seed", "attacks", "seconds"],
        [
            [row["area"], row["error"] or _told(row, True), _told(row, False), str(row["seed"])]
            + [f"{row[name]:,}" for name in ("attacks", "seconds")]
            for row in rows
        ],
        3,
    )


def _told(row: Row, zero: bool) -> str:
    told = {name: count for name, count in row["counts"].items() if (name in row["must_be_zero"]) is zero}
    return ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in told.items())


def section(rows: list[Row]) -> str:
    """The document's section about the record."""
    if not rows:
        return "Nothing has been recorded yet.\n"
    text = [*table(rows), ""]
    for source in dict.fromkeys(map(_source, rows)):
        own = ", ".join(row["area"] for row in rows if _source(row) == source)
        text.append(f"- {own}: {source}")
    return "\n".join([*text, "", f"All numbers are from [{RECORD.name}](../benchmarks/records/{RECORD.name}).", ""])


def _source(row: Row) -> str:
    commit, _, dirty = row["commit"].partition("-")
    versions = f"torch {row['torch']}, Python {row['python']}, commit {commit[:7]}{' with changes' if dirty else ''}"
    return f"{row['hardware']}, {versions}; `{row['command']}`."


def written(text: str) -> str:
    """The document with the table of the record."""
    return placed(text, RECORD.name, section(read()), DOCUMENT.name)


def document() -> None:
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


def chosen(words: list[str]) -> dict[str, int]:
    """Areas and counts from words such as `flips` and `flips=50`. Without words, all areas."""
    found = {}
    for word in words:
        area, _, count = word.partition("=")
        if area not in AREAS:
            raise ValueError(f"there is no area {area!r}: choose from {', '.join(AREAS)}")
        if count and not (count.isdecimal() and int(count) > 0):
            raise ValueError(f"{word}: the number of attacks must be a whole number of at least 1")
        found[area] = int(count) if count else AREAS[area]
    return found or dict(AREAS)


def main() -> int:
    if sys.argv[1:2] == ["--inside"]:
        area, count, seed, *places = sys.argv[2:]
        inside(area, int(count), int(seed), *map(Path, places))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = ", ".join(f"{area}={count}" for area, count in AREAS.items())
    parser.add_argument("areas", nargs="*", metavar="AREA[=COUNT]", help=f"areas to attack; default: {defaults}")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices of every area")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="stop an area that takes longer")
    parser.add_argument("--no-record", action="store_true", help="print the table and write nothing")
    parser.add_argument("--table", action="store_true", help="attack nothing; write the document from the record")
    options = parser.parse_args()
    try:
        areas = chosen(options.areas)
    except ValueError as error:
        parser.error(str(error))
    if options.table:
        document()
        return 0
    rows = _attacked(areas, options.seed, options.limit)
    if not options.no_record:
        keep(rows)
        document()
    print("\n".join(table(rows)))
    found = [fault for row in rows for fault in faults(row)]
    print("\n".join(found) if found else "every count that must be zero is zero")
    return 1 if found else 0


def _attacked(areas: dict[str, int], seed: int, limit: float | None) -> list[Row]:
    from kalmannorm.lab.machine.origin import origin  # imported here, because the processes of areas do not need it

    source, rows = origin("torchvision", "triton"), []
    del source["threads"]  # of this process, which does not attack
    for area, count in areas.items():
        print(f"{area}: {count:,} attacks", flush=True)
        rows.append({**attack(area, count, seed, limit), **source})
    return rows


if __name__ == "__main__":
    sys.exit(main())
