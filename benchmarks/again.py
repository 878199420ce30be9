"""Takes records again on this machine, by the commands that they name.

    python benchmarks/again.py h200 -o folder    # all whose names hold "h200", a CSV of the same name for each
    python benchmarks/again.py h200 --list       # only say which, and how

One after the other, because two would wait for each other. What was measured is put into benchmarks/records by whoever
has looked at it; `python benchmarks/measured.py` then writes the tables. Launches have a sweep of their own.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

from measured import RECORDS, ROOT, read

from kalmannorm.lab.bench.output import write_csv


def command_of(path: Path) -> list[str]:
    """As its first row has it, without the file that it was written to; none where it names no command."""
    words = shlex.split(read(path)[0].get("command", ""))
    for option in ("-o", "--output"):
        if option in words:
            at = words.index(option)
            del words[at : at + 2]
    return words


def program(words: list[str]) -> list[str]:
    """With this Python, whether the package is installed or not."""
    name, *arguments = words
    return [sys.executable, *(["-m", "kalmannorm"] if name == "kalmannorm" else []), *arguments]


def take(words: list[str], output: Path) -> int:
    status = subprocess.run([*program(words), "-o", str(output)], cwd=ROOT).returncode
    if status == 0:
        rows = [{name: value for name, value in row.items() if name != "command"} for row in read(output)]
        write_csv(output, rows, {"command": shlex.join(words)})
    return status


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help='part of the names of records, as "h200" or "steps-resnet101"')
    parser.add_argument("-o", "--output", type=Path, help="a folder for what is measured")
    parser.add_argument("--list", action="store_true", help="only say what would be run")
    options = parser.parse_args()
    found = {path.name: command_of(path) for path in sorted(RECORDS.glob(f"*{options.name}*.csv"))}
    chosen = {name: words for name, words in found.items() if words}
    if not chosen:
        parser.error(f"no record with a command has {options.name!r} in its name")
    if options.list:
        for name, words in chosen.items():
            print(f"{name}: {shlex.join(words)}")
        return
    if options.output is None:
        parser.error("-o FOLDER: where to write what is measured")
    options.output.mkdir(parents=True, exist_ok=True)
    failed = []
    for name, words in chosen.items():
        start = time.monotonic()
        status = take(words, options.output.resolve() / name)
        print(
            f"{name}: {'taken' if status == 0 else f'failed, exit {status}'}, {time.monotonic() - start:.0f} s",
            flush=True,
        )
        failed += [name] if status else []
    if failed:
        sys.exit(f"not taken: {', '.join(failed)}")


if __name__ == "__main__":
    main()
