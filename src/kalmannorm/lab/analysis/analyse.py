"""Analyses a run: the prior, observation and posterior of each norm, and how far they differ from inference.

RUN/analysis/layers.json          {"layers": [LayerStatistics, …], "examples", "step"}
RUN/analysis/variance-gap.json    {"layers": [LayerGap, …], "overall", "statistics_batch", "examples", "of", "step"}
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from kalmannorm.lab.analysis.gap import LayerGap, overall, variance_gap
from kalmannorm.lab.analysis.layers import LayerStatistics, layer_statistics
from kalmannorm.lab.bounds import at_least
from kalmannorm.lab.files.records import Record, writable, write_json

__all__ = ["Analysis", "LayerGap", "LayerStatistics", "analyse", "layer_statistics", "variance_gap"]


@dataclass(frozen=True)
class Analysis:
    """The analysis of one run after `step` of its `steps`. Both lists are in the order of the model."""

    layers: list[LayerStatistics]
    gaps: list[LayerGap]
    step: int
    steps: int

    @property
    def overall(self) -> dict[str, float]:
        return overall(self.gaps)

    @property
    def gains(self) -> dict[str, float]:
        """The gain q of every norm with a prior."""
        return {layer.name: layer.gain for layer in self.layers if layer.gain is not None}

    def summary(self) -> Record:
        """One row per layer without the channels, for scripts and tables."""
        gaps = {gap.name: gap for gap in self.gaps}
        rows = []
        for layer in self.layers:
            gap = gaps[layer.name]
            row = {"name": layer.name, "channels": layer.channels, "gain": layer.gain, "prior_error": _error(layer)}
            row |= {name: getattr(gap, name) for name in self.overall}
            rows.append(row)
        return {"layers": rows, "overall": self.overall, "step": self.step, "steps": self.steps}


def _error(layer: LayerStatistics) -> float | None:
    """The average |prior variance - observed variance|, relative to the observed variance."""
    if layer.prior_var is None:
        return None
    pairs = zip(layer.prior_var, layer.observed_var, strict=True)
    return sum(abs(prior - seen) / max(seen, 1e-12) for prior, seen in pairs) / layer.channels


def analyse(
    folder: Path,
    *,
    batches: int = 4,
    max_groups: int | None = None,
    device: str = "auto",
    data_root: Path | None = None,
    workers: int = 4,
) -> Analysis:
    """Analyse a run, finished or at its last checkpoint, and write the results into its folder.

    The statistics of layers are averages over `batches` gradient batches of training images, augmented as in training.
    The variance gap is computed over the whole training set, or its first `max_groups` groups, without augmentation.
    """
    from kalmannorm.lab.training.loading import load_run

    at_least(1).check("batches", batches)
    if max_groups is not None:
        at_least(1).check("max_groups", max_groups)
    loaded = load_run(folder, device=device, data_root=data_root, workers=workers)
    recipe, data = loaded.run.recipe, loaded.data
    writable(folder / "analysis" / "layers.json")
    training = data.train_batches(recipe.gradient_batch, seed=recipe.seed, epoch=0, augment=recipe.augment)
    batches = min(batches, data.train_size // recipe.gradient_batch)
    layers = layer_statistics(loaded.model, (images for images, _ in itertools.islice(training, batches)))
    gaps = variance_gap(
        loaded.model, data, recipe.statistics_batch, batch=max(recipe.gradient_batch, 256), max_groups=max_groups
    )
    found = Analysis(layers, gaps, loaded.step, loaded.steps)
    seen = batches * recipe.gradient_batch
    write_json(
        folder / "analysis" / "layers.json",
        {"layers": [layer.to_json() for layer in layers], "examples": seen, "step": loaded.step},
    )
    write_json(
        folder / "analysis" / "variance-gap.json",
        {
            "layers": [gap.to_json() for gap in gaps],
            "overall": found.overall,
            "statistics_batch": recipe.statistics_batch,
            "examples": gaps[0].batches * recipe.statistics_batch,
            "of": data.train_size,
            "step": loaded.step,
        },
    )
    return found
