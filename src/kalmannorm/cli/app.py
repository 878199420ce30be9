"""Every command, one file each; this one only gathers them."""

from __future__ import annotations

import sys
from typing import Annotated

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
from kalmannorm.cli.usage import UsageError, check_words, line
from kalmannorm.lab.errors import LabError, tell

app = typer.Typer(
    name="kalmannorm",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # which wraps paragraphs anew, for a terminal of any width
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


def _version(wanted: bool) -> None:
    if wanted:
        import torch

        import kalmannorm

        typer.echo(f"kalmannorm {kalmannorm.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def everything(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version, and nothing else.")
    ] = False,
) -> None:
    """Train, compare and look at normalizers when only 1 to 8 examples share their statistics."""


def run(arguments: list[str] | None = None) -> int:
    """The exit status of a command line; 2 and one line on stderr for what the user can mend."""
    try:
        check_words(sys.argv[1:] if arguments is None else arguments)
        status = app(arguments, prog_name="kalmannorm", standalone_mode=False)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except UsageError as error:
        return _told(line(error), 2)
    except LabError as error:
        return _told(str(error), error.status)
    except OSError as error:  # where a file system fails in a way that nobody foresaw
        return _told(f"{error.filename}: {error.strerror}" if error.filename else str(error), 2)
    except (MemoryError, RuntimeError) as error:
        from kalmannorm.lab.machine.memory import ran_out

        if not ran_out(error):
            raise
        return _told("out of memory: give smaller batches or images, or another --device", 2)
    if status == 130:  # typer's own, after a Ctrl-C that no command took up
        return _told("interrupted", 130)
    return status if isinstance(status, int) else 0


def _told(text: str, status: int) -> int:
    if text:
        tell(text)
    return status
