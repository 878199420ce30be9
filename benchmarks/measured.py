"""Writes the tables of docs/performance.md from the records of `kalmannorm bench`: `python benchmarks/measured.py`.

Every record op-*.csv, steps-*.csv, inference-*.csv and host-*.csv has a table there, between `<!-- NAME.csv -->` and
`<!-- end of NAME.csv -->`. Nothing between these lines is written by hand. The table of a new record is added at the
end; move it to its place.
"""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "records"
DOCUMENT = ROOT / "docs" / "performance.md"
KINDS = ("op-*.csv", "steps-*.csv", "inference-*.csv", "host-*.csv")

Row = dict[str, str]
ABSENT = "–"


def records() -> list[Path]:
    return sorted(path for kind in KINDS for path in RECORDS.glob(kind))


def read(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def written(text: str) -> str:
    """The document with every table from its record."""
    for path in records():
        text = placed(text, path.name, table(path), DOCUMENT.name)
    return text


def placed(text: str, name: str, content: str, document: str) -> str:
    """`text` with `content` between the two lines that name a record, or at the end if it has no such lines yet."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    if begin not in text and end not in text:
        text = f"{text.rstrip()}\n\n{begin}{end}\n"
    if text.count(begin) != 1 or text.count(end) != 1:
        sys.exit(f"{document} needs the lines {begin.strip()} and {end} once each, around the table")
    before, rest = text.split(begin)
    return before + begin + content + end + rest.split(end)[1]


def table(path: Path) -> str:
    rows = read(path)
    first = rows[0]
    if "method" in first:
        lines = _steps(rows)
    elif "model" in first:
        lines = _nets(rows)
    elif "forward_us" in first:
        lines = _host(rows)
    else:
        lines = _norms(rows)
    title, *cells = lines
    return "\n".join([title, "", *cells, "", _source(path, rows), ""])


def _source(path: Path, rows: list[Row]) -> str:
    row, threads = rows[0], int(rows[0]["threads"])
    machine = f"{row['hardware']}, {threads} thread{'' if threads == 1 else 's'}"
    if row["device"] == "cpu":
        machine += f", load up to {max(float(other['load'] or 0) for other in rows):.1f}"
    commit, _, dirty = row["commit"].partition("-")
    versions = f"torch {row['torch']}, Python {row['python']}, commit {commit[:7]}{' with changes' if dirty else ''}"
    record = f"[record](../benchmarks/records/{path.name})"
    command = f"`{row['command']}`"
    if any(other["command"] != row["command"] for other in rows):
        command += ", and the like for the others"
    return f"{row['rounds']} rounds; {machine}, {versions}; {command} ({record})."


def markdown(headings: list[str], body: list[list[str]], words: int) -> list[str]:
    """The first `words` columns are words, the others numbers."""
    rule = ["---"] * words + ["--:"] * (len(headings) - words)
    return ["| " + " | ".join(cells) + " |" for cells in (headings, rule, *body)]


def _norms(rows: list[Row]) -> list[str]:
    """One line per shape and layout, one column per contender: ratios to BatchNorm."""
    first = rows[0]
    inference = first["level"] == "inference"
    names = list(dict.fromkeys(_named(row) for row in rows))
    own = [name for name in names if name.startswith("BKN")]
    other = "ratio_groupnorm" if inference else "ratio_inductor"
    headings = ["shape", "layout", f"{names[0]}, µs", *names[1:]]
    against = any(row[other] for row in rows)
    if against:
        headings += [f"{name} ÷ {'GroupNorm' if inference else 'compiled'}" for name in own]
    headings += [f"{name}, % of copy" for name in own]
    body = []
    for key in dict.fromkeys((row["shape"], row["layout"]) for row in rows):
        found = {_named(row): row for row in rows if (row["shape"], row["layout"]) == key}
        cells = [key[0].replace("x", "×"), key[1], f"{float(found[names[0]]['us']):.1f}"]
        cells += [_cell(found, name, "ratio", 2) for name in names[1:]]
        if against:
            cells += [_cell(found, name, other, 2) for name in own]
        body.append([*cells, *(_cell(found, name, "copy_percent", 0) for name in own)])
    what = "In inference" if inference else f"Forward and backward, {first['level']}"
    title = f"{what}{', with ReLU' if first['relu'] == 'True' else ''}, {first['dtype']}, time / BatchNorm:"
    return [title, *markdown(headings, body, 2)]


def _named(row: Row) -> str:
    name = "BatchNorm compiled" if "inductor" in row["contender"] else row["contender"]
    grouped = row["statistics_batch"] and not name.startswith("BatchNorm")
    return f"{name}, m = {row['statistics_batch']}" if grouped else name


def _cell(found: dict[str, Row], name: str, column: str, digits: int) -> str:
    value = found[name][column] if name in found else ""
    return f"{float(value):.{digits}f}" if value else ABSENT


def _steps(rows: list[Row]) -> list[str]:
    """Records of settled nets also show eager steps: they say what the recipe costs in a plain loop."""
    first = rows[0]
    eager = any("settled" in row["way"] for row in rows) and all(row["eager_ms"] for row in rows)
    graph = ", as a CUDA graph" if first["cuda_graph"] == "True" else ""
    title = f"Training step, {first['model']}, {_images(first)}{graph}{', and eager' if eager else ''}:"
    kernels = ["kernels"] if first["kernels"] else []
    loop = ["eager, ms", "ratio", "p20 – p80"] if eager else []
    headings = ["", "setting", "ms", "ratio", "p20 – p80", *loop, *kernels, "peak MiB", "ratio of peaks"]
    body = [
        [
            " ".join(filter(None, (row["method"], row["way"]))),
            row["setting"],
            f"{float(row['ms']):.2f}",
            f"{float(row['ratio']):.2f}",
            f"{float(row['ratio_p20']):.2f} – {float(row['ratio_p80']):.2f}",
            *(_eager(row) if eager else []),
            *([row["kernels"]] if kernels else []),
            f"{float(row['peak_mib']):.0f}",
            f"{float(row['peak_ratio']):.3f}",
        ]
        for row in rows
    ]
    return [title, *markdown(headings, body, 2)]


def _eager(row: Row) -> list[str]:
    return [
        f"{float(row['eager_ms']):.1f}",
        f"{float(row['eager_ratio']):.2f}",
        f"{float(row['eager_ratio_p20']):.2f} – {float(row['eager_ratio_p80']):.2f}",
    ]


def _nets(rows: list[Row]) -> list[str]:
    first = rows[0]
    graph = ", as a CUDA graph" if first["cuda_graph"] == "True" else ""
    title = f"Inference, {first['model']} {first['setting']}, {_images(first)}{graph}:"
    kernels = ["kernels"] if first["kernels"] else []
    headings = ["", "ms", "ratio", "p20 – p80", "÷ GroupNorm", *kernels]
    body = [
        [
            row["contender"],
            f"{float(row['ms']):.2f}",
            f"{float(row['ratio']):.2f}",
            f"{float(row['ratio_p20']):.2f} – {float(row['ratio_p80']):.2f}",
            f"{float(row['ratio_groupnorm']):.2f}",
            *([row["kernels"]] if kernels else []),
        ]
        for row in rows
    ]
    return [title, *markdown(headings, body, 1)]


def _host(rows: list[Row]) -> list[str]:
    parts = ("forward", "backward", "phase")
    body = [
        [
            row["norm"],
            *(f"{float(row[f'{part}_us']):.0f}" for part in parts),
            f"{float(row['us']):.0f}",
            f"{float(row['ratio']):.2f}",
            f"{float(row['ratio_p20']):.2f} – {float(row['ratio_p80']):.2f}",
        ]
        for row in rows
    ]
    title = "Host time of a convolution, a norm and a ReLU, kernels of BKN not launched, µs:"
    headings = ["", "forward", "backward", "`phase.step`", "all", "ratio", "p20 – p80"]
    return [title, *markdown(headings, body, 1)]


def _images(row: Row) -> str:
    return f"{re.sub('x', '×', row['shape'])} {row['layout']}, {row['precision']}"


def main() -> None:
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
