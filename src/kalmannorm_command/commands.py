"""Commands that import the library after their options have been parsed."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from kalmannorm_command.interrupts import ending_at_once


class Command(TyperCommand):
    """Imports `kalmannorm` just before it runs. Its help and its typing errors need no library."""

    def invoke(self, ctx):  # type: ignore[no-untyped-def] # typer does not export click's types
        with ending_at_once():
            import kalmannorm  # noqa: F401
        found: Any = super().invoke(ctx)
        return found
