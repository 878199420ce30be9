"""Every command, one file each; this one only gathers them."""

from __future__ import annotations

import os
import sys

import typer

from kalmannorm.cli.analyse import analyse
from kalmannorm.cli.bench import bench
from kalmannorm.cli.compare import compare
from kalmannorm.cli.data import data
from kalmannorm.cli.demo import demo
from kalmannorm.cli.evaluate import evaluate
from kalmannorm.cli.export import export
from kalmannorm.cli.report import report
from kalmannorm.cli.reproduce import reproduce
from kalmannorm.cli.train import train
from kalmannorm.lab.errors import LabError

app = typer.Typer(
    name="kalmannorm",
    help="Train, compare and look at normalizers when only 1 to 8 examples share their statistics.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo)
app.command("train")(train)
app.command("compare")(compare)
app.command("evaluate")(evaluate)
app.command("analyse")(analyse)
app.command("report")(report)
app.command("reproduce")(reproduce)
app.add_typer(bench, name="bench")
app.command("export")(export)
app.add_typer(data, name="data")


def run(arguments: list[str] | None = None) -> int:
    """The exit status of a command line; 2 and one line on stderr for what the user can mend."""
    try:
        app(arguments)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except LabError as error:
        if os.environ.get("RANK", "0") == "0":  # once, not once per rank
            print(f"kalmannorm: {error}", file=sys.stderr)
        return error.status
    return 0
