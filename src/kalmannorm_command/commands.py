"""Commands that import the library after their options have been parsed, and show flags as flags."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

from kalmannorm_command.interrupts import ending_at_once


def _flags_as_flags(parameters: list[Any]) -> list[Any]:
    """A flag takes no value, so the help must not show one (typer writes `--json <bool>`)."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class Group(TyperGroup):
    """A command that has subcommands."""

    def get_params(self, ctx):  # type: ignore[no-untyped-def] # typer does not export click's types
        return _flags_as_flags(super().get_params(ctx))


class Command(TyperCommand):
    """Imports `kalmannorm` just before it runs. Its help and its typing errors need no library."""

    def get_params(self, ctx):  # type: ignore[no-untyped-def]
        return _flags_as_flags(super().get_params(ctx))

    def invoke(self, ctx):  # type: ignore[no-untyped-def] # typer does not export click's types
        with ending_at_once():
            import kalmannorm  # noqa: F401
        found: Any = super().invoke(ctx)
        return found
