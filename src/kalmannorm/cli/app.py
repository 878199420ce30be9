"""Every command, one file each; this one only gathers them."""

from __future__ import annotations

import sys

import click
import typer

from kalmannorm.lab.errors import LabError

app = typer.Typer(
    name="kalmannorm",
    help="Train, compare and look at normalizers when only 1 to 8 examples share their statistics.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run(arguments: list[str] | None = None) -> int:
    """The exit status of a command line."""
    try:
        status = app(arguments, standalone_mode=False)
    except LabError as error:
        print(f"kalmannorm: {error}", file=sys.stderr)
        return 2
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        print("kalmannorm: interrupted", file=sys.stderr)
        return 130
    return status if isinstance(status, int) else 0
