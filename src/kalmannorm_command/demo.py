"""`kalmannorm demo`: the effect of small batches on batch norm, on handwritten digits, in a few minutes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kalmannorm.lab.comparing.cells import Cell

METHODS = ("bn", "brn", "gn", "bkn", "bkn-learned")
SETTINGS = ((64, 64), (64, 2), (64, 1))
CHANGES = {"epochs": 15.0, "evaluate_every": 3.0}
"""Changes to the preset: fewer epochs and fewer evaluations."""
EXTRA: dict[tuple[str, int], dict[str, Any]] = {
    ("bkn-ws", 2): {"fade_prior": True},
    ("bkn-ws", 1): {"fade_prior": True, "gain": 0.1},
    ("bn-ws", 2): {},
    ("bn-ws", 1): {},
    ("mabn", 2): {},
    ("mabn", 1): {},
}
"""More rows, by method and statistics batch: the recipe for BKN and for batch norm, and Moving Average Batch Norm."""
ANALYSED = {(name, m) for name in ("bn", "bkn") for m in (2, 1)}
"""Runs whose norms are analysed: method and statistics batch."""


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the runs and the report.")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs per method and setting.")] = 3,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Runs in parallel. [default: one per core]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the summary, as JSON.")] = False,
) -> None:
    """Compare norms on digits when 64, 2 or 1 examples share their statistics.

    BN, BRN, GN and BKN. For groups of 2 and 1 also MABN, and the recipe for BKN and BN: WS with an early closing phase.
    Needs no network and no GPU. The same command again skips finished runs.
    """
    from kalmannorm.lab.recipes.recipe import Execution
    from kalmannorm_command.compare import run_and_show

    cells = cells_of(seeds)
    analysed = [name for name, cell in cells if (cell.method, cell.statistics_batch) in ANALYSED and cell.seed == 0]
    # A net this small is as fast on one core as on a GPU, and a machine has more cores than GPUs.
    execution = Execution(device="cpu", tensorboard=False)
    run_and_show(cells, out, execution, jobs=jobs, analyse=analysed, as_json=as_json)


def cells_of(seeds: int) -> list[Cell]:
    """All runs of the demo, seed by seed."""
    from kalmannorm.lab.comparing.cells import grid
    from kalmannorm.lab.comparing.cells import seeds as first_seeds
    from kalmannorm.lab.experiments.catalogue import RECIPE
    from kalmannorm.lab.recipes.presets import preset
    from kalmannorm.lab.recipes.setting import Setting

    found, closing = [], dict(zip(("closing_start", "closing_end"), RECIPE, strict=True))
    for seed in first_seeds(seeds):
        found += grid(preset("digits"), METHODS, [Setting(*setting) for setting in SETTINGS], [seed], CHANGES)
        for (method, m), changes in EXTRA.items():
            setting, own = Setting(SETTINGS[0][0], m), closing if method.endswith("-ws") else {}
            found += grid(preset("digits"), [method], [setting], [seed], {**CHANGES, **own, **changes})
    return found
