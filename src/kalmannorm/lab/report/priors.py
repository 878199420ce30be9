"""Predicted against observed statistics of each channel, for every layer of a filter."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from kalmannorm.lab.files.records import Record
from kalmannorm.lab.report.charts import Chart, Cloud, Figure, Scatter, spaced
from kalmannorm.lab.report.comparison import Comparison
from kalmannorm.lab.words.wording import number

_MOST_POINTS, _MOST_LAYERS = 6_000, 24

Pair = tuple[int, float, float]
"""Of a channel: its number, the prior and the observed value."""


def prior_against_observed(comparison: Comparison, slug: str) -> Figure | None:
    """One chart per method, setting and layer, from the first seed that was analysed."""
    analysed: list[tuple[str, int, list[Record]]] = []
    for variant in comparison.variants:
        for setting in comparison.settings:
            for run in comparison.seeds(variant, setting):
                layers = run.analyses.get("layers", {}).get("layers") or []
                layers = [layer for layer in layers if layer.get("prior_var")]
                if layers:
                    layers = [layers[i] for i in spaced(len(layers), _MOST_LAYERS)]
                    analysed.append((f"{variant.label} {setting}", variant.colour, layers))
                    break
    if not analysed:
        return None
    room = max(12, _MOST_POINTS // sum(len(layers) for _, _, layers in analysed))
    charts: list[tuple[tuple[str, ...], Chart]] = []
    for label, colour, layers in analysed:
        for layer in layers:
            charts.append(((label, layer["name"]), _scatter(layer, colour, room)))
    caption = (
        "Each point is a channel. On the line the prior equals the observation. "
        "Values are averages over training batches."
    )
    last = [i for i, (chosen, _) in enumerate(charts) if chosen[0] == analysed[0][0]]
    title = "Prior against observed statistics"
    return Figure(slug, title, caption, charts, ("Method", "Layer"), start=last[len(last) // 2])


def _scatter(layer: Record, colour: int, room: int) -> Scatter:
    """The note is about all channels. At most `room` of them are drawn."""
    variances = _pairs(layer, "var", lambda prior, observed: prior > 0 and observed > 0)
    means = _pairs(layer, "mean", lambda prior, observed: True)
    notes = []
    if variances:
        ratio = statistics.median(p / o for _, p, o in variances)
        notes.append(f"Median prior / observed variance {number(ratio, 2)}")
        shape = _correlation([math.log(p) for _, p, _ in variances], [math.log(o) for _, _, o in variances])
        notes += [f"correlation of their logarithms {number(shape, 2)}"] if shape is not None else []
    shape = _correlation([p for _, p, _ in means], [o for _, _, o in means])
    notes += [f"correlation of means {number(shape, 2)}"] if shape is not None else []
    notes += [f"gain q {number(layer['gain'], 2)}"] if layer.get("gain") is not None else []
    clouds = [_cloud("Variance", True, variances, room), _cloud("Mean", False, means, room)]
    return Scatter([cloud for cloud in clouds if cloud.x], colour, "; ".join(notes) + "." if notes else "")


def _pairs(layer: Record, kind: str, fits: Callable[[float, float], bool]) -> list[Pair]:
    both = zip(layer[f"prior_{kind}"], layer[f"observed_{kind}"], strict=True)
    return [(c, p, o) for c, (p, o) in enumerate(both) if p is not None and o is not None and fits(p, o)]


def _cloud(title: str, log: bool, pairs: Sequence[Pair], room: int) -> Cloud:
    points = [pairs[i] for i in spaced(len(pairs), room)]
    channels = [c for c, _, _ in points]
    kind = title.lower()
    return Cloud(
        title, f"prior {kind}", f"observed {kind}", log, [p for _, p, _ in points], [o for _, _, o in points], channels
    )


def _correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """None where either does not vary."""
    try:
        return statistics.correlation(one, other)
    except statistics.StatisticsError:
        return None
