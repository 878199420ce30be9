"""The variance gap: the difference between a layer's statistics on a batch and the moving averages of inference.

Rows are channels, and columns are batches. A cell is (posterior variance - running variance) / running variance. All
maps of a figure share one colour scale. At most 2 % of the cells lie beyond its ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kalmannorm.lab.files.records import Record
from kalmannorm.lab.report.charts import Chart, Figure, Heatmap, Map, spaced
from kalmannorm.lab.report.collecting import Found
from kalmannorm.lab.report.comparison import Comparison
from kalmannorm.lab.words.wording import number

_MOST_CELLS, _MOST_LAYERS = 100_000, 12
CAPTION = (
    "Relative difference between the variance that normalizes a batch and the moving average that inference uses. "
    "Rows are channels, and columns are batches. The middle of the scale means no gap. All maps, settings and layers "
    "have the same scale."
)
Labelled = tuple[str, Record]
"""A panel's title and the record of the run's analysis."""


def gap_of(run: Found) -> Record | None:
    record = run.analyses.get("variance-gap", {})
    return record if record.get("layers") else None


def variance_gap(comparison: Comparison, slug: str) -> Figure | None:
    """For every setting and layer one map per method, side by side, from the first seed that was analysed."""
    groups: list[tuple[str, list[Labelled]]] = []
    for setting in comparison.settings:
        shown: list[Labelled] = []
        for variant in comparison.variants:
            records = (gap_of(run) for run in comparison.seeds(variant, setting))
            record = next((record for record in records if record is not None), None)
            if record is not None:
                shown.append((variant.label, record))
        if shown:
            groups.append((str(setting), shown))
    title = "Variance on a batch against the moving average"
    return gap_figure(slug, title, groups)


def gap_figure(slug: str, title: str, groups: Sequence[tuple[str, list[Labelled]]]) -> Figure | None:
    """`groups` are pairs of a setting and the maps to show side by side."""
    names = list(dict.fromkeys(layer["name"] for _, shown in groups for _, r in shown for layer in r["layers"]))
    names = [names[i] for i in spaced(len(names), _MOST_LAYERS)]
    count = sum(layer["name"] in names for _, shown in groups for _, r in shown for layer in r["layers"])
    if not count:
        return None
    room = max(300, _MOST_CELLS // count)
    limit = _limit([record for _, shown in groups for _, record in shown], names)
    charts: list[tuple[tuple[str, ...], Chart]] = []
    for group, shown in groups:
        for name in names:
            layers = [(label, layer) for label, r in shown for layer in r["layers"] if layer["name"] == name]
            if layers:
                maps = [_map(label, layer, room) for label, layer in layers]
                chart = Heatmap(maps, "batch", "channel", "gap", -limit, limit, diverging=True, note=_note(layers))
                charts.append(((group, name), chart))
    # The page opens with the largest gap: the smallest statistics batch, in a layer of middle depth.
    last = [i for i, (chosen, _) in enumerate(charts) if chosen[0] == charts[-1][0][0]]
    return Figure(slug, title, CAPTION, charts, ("Setting", "Layer"), start=last[len(last) // 2])


def _map(label: str, layer: Record, room: int) -> Map:
    """Rows and columns are picked, not averaged: an average would hide the noise, which is the result."""
    gap: list[list[Any]] = layer["gap"]
    channels, batches = len(gap), min(len(row) for row in gap)
    rows = spaced(channels, max(8, min(channels, int((room / 2) ** 0.5))))
    columns = spaced(batches, max(8, room // len(rows)))
    return Map(label, [[gap[r][c] for c in columns] for r in rows], columns, [str(r) for r in rows])


def _note(layers: Sequence[tuple[str, Record]]) -> str:
    means = [f"{label} {number(r['mean_abs'], 3)}" for label, r in layers if r.get("mean_abs") is not None]
    return f"Mean |gap|: {', '.join(means)}." if means else ""


def _limit(records: Sequence[Record], names: Sequence[str]) -> float:
    sizes = sorted(
        abs(value)
        for record in records
        for layer in record["layers"]
        if layer["name"] in names
        for row in layer["gap"]
        for value in row
        if value is not None
    )
    if not sizes:
        return 1.0
    end = sizes[int(0.98 * (len(sizes) - 1))]
    steps = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0)
    return next((step for step in steps if step >= end), 30.0)
