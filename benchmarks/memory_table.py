"""Writes the tables of docs/memory.md from the records of `memory.py`: `python benchmarks/memory_table.py`.

Every record memory-*.csv has a table there, between `<!-- NAME.csv -->` and `<!-- end of NAME.csv -->`. Nothing between
these lines is written by hand. Places without a record stay empty.
"""

from __future__ import annotations

from pathlib import Path

from measured import ABSENT, RECORDS, ROOT, Row, markdown, placed, read

DOCUMENT = ROOT / "docs" / "memory.md"


def records() -> list[Path]:
    return sorted(RECORDS.glob("memory-*.csv"))


def written(text: str) -> str:
    """The document with every table from its record."""
    for path in records():
        text = placed(text, path.name, table(path), DOCUMENT.name)
    return text


def table(path: Path) -> str:
    rows = read(path)
    if "largest_batch" in rows[0]:
        title, *cells = _largest(rows)
    elif rows[0]["peak_mib"]:
        title, *cells = _by_net(rows, ("peak_mib", "peak_ratio", "ratio", "eager_ratio"))
    else:
        title, *cells = _by_net(rows, ("kept_mib", "kept_ratio"))
    return "\n".join([title, "", *cells, "", _source(path, rows[0]), ""])


COLUMNS = {
    "kept_mib": ("MiB kept", 0),
    "kept_ratio": ("kept ÷ BatchNorm", 2),
    "peak_mib": ("peak MiB", 0),
    "peak_ratio": ("peak ÷ BatchNorm", 2),
    "ratio": ("time as a CUDA graph ÷ BatchNorm", 2),
    "eager_ratio": ("eager time ÷ BatchNorm", 2),
}


def _by_net(rows: list[Row], columns: tuple[str, ...]) -> list[str]:
    """One line per net and way."""
    rows = [row for row in rows if row[columns[0]]]
    headings = ["net", "", *(COLUMNS[name][0] for name in columns)]
    body = [[row["model"], row["way"], *(_number(row[name], COLUMNS[name][1]) for name in columns)] for row in rows]
    first = rows[0]
    batch, _, size, _ = first["shape"].split("x")
    what = "Peak of a training step" if "peak_mib" in columns else "Tensors that autograd keeps"
    return [f"{what}, {batch} images of {size}², {first['precision']}, m = 2:", *markdown(headings, body, 2)]


def _largest(rows: list[Row]) -> list[str]:
    first = rows[0]
    headings = ["net", "", "largest batch", "÷ BatchNorm"]
    body = [[row["model"], row["way"], row["largest_batch"], _number(row["ratio"], 2)] for row in rows]
    limit, size = float(first["limit_gib"]), first["image_size"]
    return [
        f"Largest batch of images of {size}² that fits {limit:g} GiB, {first['precision']}:",
        *markdown(headings, body, 2),
    ]


def _number(value: str, digits: int) -> str:
    return f"{float(value):.{digits}f}" if value else ABSENT


def _source(path: Path, row: Row) -> str:
    versions = f"torch {row['torch']}, Python {row['python']}, commit {row['commit'][:7]}"
    record = f"[record](../benchmarks/records/{path.name})"
    return f"{row['hardware']}, {versions}; `{row['command']}` ({record})."


def main() -> None:
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
