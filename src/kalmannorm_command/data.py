"""`kalmannorm data list|fetch|check`: list data sets, download them, verify them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kalmannorm_command.commands import Command, Group

if TYPE_CHECKING:
    from kalmannorm.lab.data.source import Source

data = typer.Typer(help="List, fetch and check data sets.", no_args_is_help=True, cls=Group)

Root = Annotated[
    Path | None,
    typer.Option(
        "--data-root",
        help="Folder of the data sets. [default: $KALMANNORM_DATA, or kalmannorm in the user's cache folder]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON.")]


@data.command("list", cls=Command)
def list_sets(root: Root = None, as_json: AsJson = False) -> None:
    """List all data sets: sizes, folder, and state (by a quick check)."""
    from kalmannorm.lab.data.catalogue import SOURCES

    _show([_record(source, root, thorough=False) for source in SOURCES.values()], root, as_json)
    if not as_json:
        typer.echo("Download: kalmannorm data fetch NAME. Any folder with train/ and val/ is a data set: folder:PATH.")


@data.command("check", cls=Command)
def check(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of data sets, or folder:PATH. [default: all that are present]")
    ] = None,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Read data sets completely and compare checksums. The exit status is 1 if one is damaged, or named and missing."""
    from kalmannorm.lab.data.catalogue import SOURCES, find

    sources = [find(name) for name in names] if names else list(SOURCES.values())
    records = [_record(source, root, thorough=True) for source in sources]
    _show(records, root, as_json)
    accepted = ("ready",) if names else ("ready", "missing")
    wrong = [record for record in records if record["state"] not in accepted]
    for record in wrong:
        typer.echo(f"kalmannorm: {record['problem']}", err=True)
    if wrong:
        raise typer.Exit(1)


@data.command("fetch", cls=Command)
def fetch(
    names: Annotated[list[str], typer.Argument(help="Names from kalmannorm data list.")],
    folder: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Instead of a download: a folder with train/CLASS/*.png and test/CLASS/*.png. cifar100 only."
        ),
    ] = None,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Download data sets and verify them. Complete data sets are not downloaded again."""
    from kalmannorm.lab.data.catalogue import find
    from kalmannorm.lab.data.cifar import CIFAR100
    from kalmannorm.lab.data.files import at_home, data_root
    from kalmannorm.lab.data.source import state
    from kalmannorm.lab.errors import LabError

    sources = [find(name) for name in names]
    if folder is not None:
        if names != [CIFAR100.name]:
            raise LabError(f"--from: only {CIFAR100.name} can be read from image files, not {', '.join(names)}")
        if not folder.is_dir():
            raise LabError(f"--from: there is no folder {folder}")
        find(CIFAR100.name).fetch_from(at_home(folder), data_root(root))  # type: ignore[attr-defined]
    for source in sources:
        if state(source, data_root(root), thorough=True)[0] != "ready":
            source.fetch(data_root(root), lambda line: typer.echo(line, err=True))
    _show([_record(source, root, thorough=False) for source in sources], root, as_json)


def _record(source: Source, root: Path | None, *, thorough: bool) -> dict[str, Any]:
    from kalmannorm.lab.data.files import data_root
    from kalmannorm.lab.data.source import state

    found, problem = state(source, data_root(root), thorough=thorough)
    if thorough and found == "ready":
        source = source.counted(data_root(root))
    where = source.where(data_root(root))
    return {
        "name": source.name,
        "classes": source.classes,
        "image_size": source.image_size,
        "train_size": source.train_size,
        "test_size": source.test_size,
        "state": found,
        "where": None if where is None else str(where),
        "problem": problem or None,
    }


def _show(records: list[dict[str, Any]], root: Path | None, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(records, indent=1))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from kalmannorm.lab.data.files import data_root

    root = data_root(root)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("data set", "classes", "image", "training", "test", "state"):
        right = heading in ("classes", "training", "test")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    table.add_column("folder", overflow="fold")
    colours = {"ready": "green", "missing": "dim", "damaged": "red"}
    for record in records:
        sizes = ["?" if record[key] is None else f"{record[key]:,}" for key in ("classes", "train_size", "test_size")]
        side, state = record["image_size"], record["state"]
        table.add_row(
            escape(record["name"]),
            sizes[0],
            f"{side}×{side}",
            *sizes[1:],
            f"[{colours[state]}]{state}[/]",
            escape((record["where"] or "scikit-learn").replace(f"{root}/", "")),
        )
    console = Console()
    console.print(table)
    if any(record["where"] and Path(record["where"]).is_relative_to(root) for record in records):
        console.print(f"Folders are in {root}", soft_wrap=True, highlight=False, markup=False)
