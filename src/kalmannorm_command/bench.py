"""`kalmannorm bench step|op|inference`. Without one of these words, it is step."""

from __future__ import annotations

import typer

from kalmannorm_command.bench_inference import inference
from kalmannorm_command.bench_op import op
from kalmannorm_command.bench_step import step
from kalmannorm_command.commands import Command, Group


class _StepUnlessNamed(Group):
    def parse_args(self, ctx, args):  # type: ignore[no-untyped-def] # typer does not export click's types
        help_wanted = args[:1] in (["-h"], ["--help"])
        if not help_wanted and (not args or args[0].startswith("-")):
            args = ["step", *args]
        return super().parse_args(ctx, args)


bench = typer.Typer(
    help="Time a training step (the default), one norm, or inference, beside BatchNorm in the same run.",
    cls=_StepUnlessNamed,
)
bench.command("step", cls=Command)(step)
bench.command("op", cls=Command)(op)
bench.command("inference", cls=Command)(inference)
