"""The command line as a whole: its subcommands, its version, and how errors end."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from kalmannorm_command.analyse import analyse
from kalmannorm_command.bench import bench
from kalmannorm_command.commands import Command, Group
from kalmannorm_command.compare import compare
from kalmannorm_command.data import data
from kalmannorm_command.demo import demo
from kalmannorm_command.evaluate import evaluate
from kalmannorm_command.export import export
from kalmannorm_command.report import report
from kalmannorm_command.reproduce import reproduce
from kalmannorm_command.train import train
from kalmannorm_command.usage import RefusedError, UsageError, check_words, line, with_option
from kalmannorm_command.version import versions

app = typer.Typer(
    name="kalmannorm",
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # wraps paragraphs to the width of the terminal
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo", cls=Command)(demo)
app.command("train", cls=Command)(train)
app.command("compare", cls=Command)(compare)
app.command("evaluate", cls=Command)(evaluate)
app.command("analyse", cls=Command)(analyse)
app.command("report", cls=Command)(report)
app.command("reproduce", cls=Command)(reproduce)
app.add_typer(bench, name="bench")
app.command("export", cls=Command)(export)
app.add_typer(data, name="data")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(versions())
        raise typer.Exit


@app.callback()
def everything(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the versions of kalmannorm and torch."),
    ] = False,
) -> None:
    """Train, compare and analyse normalizers for batches of very few examples per device."""


def run(arguments: list[str] | None = None) -> int:
    """Run a command line and return its exit status. A mistake of the user is 2, with one line on stderr."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        check_words(words)
        status = app(arguments, prog_name="kalmannorm", standalone_mode=False)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except RefusedError as error:
        return _told(str(error), 2)
    except UsageError as error:
        return _told(line(error), 2)
    except Exception as error:
        text, status = _explained(error)
        return _told(with_option(text, words), status)
    if status == 130:  # typer returns it after a Ctrl-C that no command handled
        return _told("interrupted", 130)
    return status if isinstance(status, int) else 0


def _explained(error: Exception) -> tuple[str, int]:
    """The line and the exit status for an error of a command that was running. Raises errors that are bugs."""
    from kalmannorm.lab.errors import LabError
    from kalmannorm.lab.machine.memory import ran_out

    if isinstance(error, LabError):
        return str(error), error.status
    if isinstance(error, OSError):  # an error of the file system that no command expected
        return f"{error.filename}: {error.strerror}" if error.filename else str(error), 2
    if ran_out(error):
        return "out of memory: give smaller batches or images, or another --device", 2
    raise error


def _told(text: str, status: int) -> int:
    """Print the line, on rank 0 only."""
    if text and os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print(f"kalmannorm: {text}", file=sys.stderr)
    return status
