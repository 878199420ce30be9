"""Measures records again on this machine, with the commands that they name.

    python benchmarks/again.py h200 -o folder    # all with "h200" in their names, one CSV of the same name for each
    python benchmarks/again.py h200 --list       # only print which, and the commands

They run one after the other, because two at once would disturb each other. Check the results, then copy them to
benchmarks/records by hand. `python benchmarks/measured.py` then writes the tables. Launches have their own sweep.
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
    """The command in the record's first row, without the output file. Empty if it has none."""
    words = shlex.split(read(path)[0].get("command", ""))
    for option in ("-o", "--out", "--output"):
        if option in words:
            at = words.index(option)
            del words[at : at + 2]
    return words


def program(words: list[str]) -> list[str]:
    """The command with this Python, whether the package is installed or not."""
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
    parser.add_argument("name", help='part of the names of records, such as "h200" or "steps-resnet101"')
    parser.add_argument("-o", "--output", type=Path, help="a folder for the results")
    parser.add_argument("--list", action="store_true", help="only print the commands")
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
        parser.error("-o FOLDER: the folder for the results")
    options.output.mkdir(parents=True, exist_ok=True)
    failed = []
    for name, words in chosen.items():
        start = time.monotonic()
        status = take(words, options.output.resolve() / name)
        print(
            f"{name}: {'measured' if status == 0 else f'failed, exit {status}'}, {time.monotonic() - start:.0f} s",
            flush=True,
        )
        failed += [name] if status else []
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
