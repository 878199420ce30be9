"""The gain q of each layer: along depth when training ended, and along training."""

from __future__ import annotations

import math

from kalmannorm.lab.report.charts import Curves, Figure, Heatmap, Lines, Map, Series, spaced
from kalmannorm.lab.report.collecting import Found
from kalmannorm.lab.report.comparison import Comparison
from kalmannorm.lab.report.curves import common_steps
from kalmannorm.lab.words.spread import spread

_MOST_LAYERS, _MOST_COLUMNS = 120, 60


def final(run: Found) -> dict[str, float]:
    """The gain of each layer, in the order of depth. Norms without a gain are left out."""
    gains = run.result.get("gains") or {}
    return {name: float(q) for name, q in gains.items() if isinstance(q, (int, float))}


def along_depth(comparison: Comparison, slug: str) -> Figure | None:
    layers = list(dict.fromkeys(name for run in comparison.counting for name in final(run)))
    if not layers:
        return None
    place = {name: i for i, name in enumerate(layers)}
    panels = []
    for setting in comparison.settings:
        lines = []
        for variant in comparison.variants:
            runs = [final(run) for run in comparison.seeds(variant, setting)]
            found = [(place[name], spread(run.get(name) for run in runs)) for name in layers]
            known = [(x, value) for x, value in found if value is not None]
            if known:
                means, stds = [value.mean for _, value in known], [value.std for _, value in known]
                counts = [value.n for _, value in known]
                lines.append(Series(variant.label, variant.colour, [x for x, _ in known], means, stds, counts))
        if lines:
            panels.append(Lines(str(setting), lines))
    caption = (
        "The gain q is the weight of the mini-batch statistics, and 1 − q is the weight of the prior. With q = 1 the "
        "layer is batch norm. Layers go from input to output. Values after training: mean and standard deviation over "
        "seeds."
    )
    return Figure(slug, "Gain along depth", caption, [((), Curves(panels, "layer", "gain q", layers))])


def along_training(comparison: Comparison, slug: str) -> Figure | None:
    """One map per method and setting, with layers as rows and epochs as columns; the mean over seeds."""
    maps = []
    for variant in comparison.variants:
        for setting in comparison.settings:
            made = _map(f"{variant.label} {setting}", comparison.seeds(variant, setting))
            if made is not None:
                maps.append(made)
    values = [value for panel in maps for row in panel.values for value in row if value is not None]
    if not values:
        return None
    low, high = math.floor(min(values) * 10) / 10, math.ceil(max(values) * 10) / 10
    chart = Heatmap(maps, "epoch", "layer", "gain q", low, max(high, round(low + 0.1, 1)), diverging=False)
    caption = (
        "Each row is a layer, with the input at the top and the output at the bottom. Values are means over seeds."
    )
    return Figure(slug, "Gain along training", caption, [((), chart)])


def _map(title: str, runs: list[Found]) -> Map | None:
    by_step: dict[int, list[dict[str, float]]] = {}
    epochs: dict[int, float] = {}
    for run in runs:
        for event in run.of("gains"):
            by_step.setdefault(event["step"], []).append(event.get("gains") or {})
            epochs[event["step"]] = event["epoch"]
    layers = list(dict.fromkeys(name for gains in by_step.values() for one in gains for name in one))
    steps = common_steps([[event["step"] for event in run.of("gains")] for run in runs])
    if not layers or len(steps) < 2:
        return None
    layers = [layers[i] for i in spaced(len(layers), _MOST_LAYERS)]
    steps = [steps[i] for i in spaced(len(steps), _MOST_COLUMNS)]
    values = []
    for layer in layers:
        means = [spread(gains.get(layer) for gains in by_step[step]) for step in steps]
        values.append([None if mean is None else mean.mean for mean in means])
    return Map(title, values, [epochs[step] for step in steps], layers)
