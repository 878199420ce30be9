"""Accuracy against the statistics batch, and accuracy and loss during training, with their spread over seeds."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kalmannorm.lab.files.records import Record
from kalmannorm.lab.report.charts import Bar, BarGroup, Bars, Chart, Curves, Figure, Lines, Series, spaced
from kalmannorm.lab.report.collecting import Found
from kalmannorm.lab.report.comparison import Comparison
from kalmannorm.lab.words.spread import Spread, spread
from kalmannorm.lab.words.wording import accuracy

_MOST_POINTS = 100
_PERCENT = (0.0, 100.0)
TRAINING = "training"


def against_setting(comparison: Comparison, slug: str) -> Figure | None:
    """The accuracy of each method at each statistics batch, one panel per way of inference."""
    if not comparison.modes:
        return None
    if len(comparison.settings) < 2:
        return _bars(comparison, slug)
    panels = []
    for mode in comparison.modes:
        lines = []
        for variant in comparison.variants:
            found: list[tuple[int, Spread]] = []
            for place, setting in enumerate(comparison.settings):
                value = comparison.accuracy(variant, setting, mode)
                if value is not None:
                    found.append((place, value))
            if found:
                lines.append(_series(variant.label, variant.colour, found))
        panels.append(Lines(f"{mode} inference", lines))
    names = [str(setting) for setting in comparison.settings]
    chart = Curves(panels, "setting", "test accuracy, %", names, bounds=_PERCENT, aside=True)
    caption = (
        "Final test accuracy: mean and standard deviation over seeds. A setting is (gradient batch, statistics batch)."
    )
    return Figure(slug, "Accuracy against setting", caption, [((), chart)])


def _series(label: str, colour: int, found: Sequence[tuple[float, Spread]], steps: Sequence[int] = ()) -> Series:
    return Series(
        label,
        colour,
        [x for x, _ in found],
        [value.mean for _, value in found],
        [value.std for _, value in found],
        [value.n for _, value in found],
        steps,
    )


def _bars(comparison: Comparison, slug: str) -> Figure | None:
    setting, groups = comparison.settings[0], []
    for mode in comparison.modes:
        bars = []
        for variant in comparison.variants:
            value = comparison.accuracy(variant, setting, mode)
            if value is not None:
                bars.append(Bar(variant.label, variant.colour, value.mean, value.std, value.n, accuracy(value)))
        groups.append(BarGroup(f"{mode} inference", bars))
    caption = f"Final test accuracy at {setting}: mean and standard deviation over seeds."
    return Figure(slug, "Accuracy", caption, [((), Bars(groups, "test accuracy, %"))])


def along_training(comparison: Comparison, slug: str) -> Figure | None:
    """One chart per quantity and way of measuring it, one panel per setting."""
    charts: list[tuple[tuple[str, ...], Chart]] = []
    for quantity in ("accuracy", "loss"):
        for measured in (*comparison.modes, TRAINING):
            panels = []
            for setting in comparison.settings:
                lines = []
                for variant in comparison.variants:
                    runs = comparison.seeds(variant, setting)
                    line = curve(variant.label, variant.colour, runs, measured, quantity)
                    if line is not None:
                        lines.append(line)
                panels.append(Lines(str(setting), lines))
            if any(panel.series for panel in panels):
                charts.append(((quantity, measured), chart_of(panels, measured, quantity)))
    caption = "Mean over seeds. The band is one standard deviation to either side."
    return (
        Figure(slug, "Accuracy and loss along training", caption, charts, ("Quantity", "Measured")) if charts else None
    )


def chart_of(panels: list[Lines], measured: str, quantity: str) -> Curves:
    of = "training" if measured == TRAINING else "test"
    label = f"{of} {quantity}" + (", %" if quantity == "accuracy" else "")
    bounds = _PERCENT if quantity == "accuracy" else None
    return Curves(panels, "epoch", label, log=quantity == "loss", bounds=bounds, settle=0.15)


def curve(label: str, colour: int, runs: Sequence[Found], measured: str, quantity: str) -> Series | None:
    """The mean over seeds at every measured step. A diverged run continues with its final accuracy."""
    logs = [_points(run, measured, quantity) for run in runs]
    epochs = {step: epoch for log in logs for step, (epoch, _) in log.items()}
    found: list[tuple[int, float, Spread]] = []
    for step in common_steps(logs):
        values = []
        for run, log in zip(runs, logs, strict=True):
            if step in log:
                values.append(log[step][1])
            elif run.state == "diverged" and quantity == "accuracy" and step > max(log, default=0):
                values.append((run.result.get("accuracy") or {}).get(measured))
        value = spread(values)
        if value is not None:
            found.append((step, epochs[step], value))
    if not found:
        return None
    found = [found[place] for place in spaced(len(found), _MOST_POINTS)]
    return _series(label, colour, [(epoch, value) for _, epoch, value in found], [step for step, _, _ in found])


def common_steps(logs: Sequence[Collection[int]]) -> list[int]:
    """The steps at which all seeds were measured; at other steps the mean would jump. Two kinds of seeds are excepted:
    a diverged seed, after its end, and a seed that was measured only once."""
    followed = [log for log in logs if len(log) > 1]
    steps = {step for log in logs for step in log}
    return sorted(step for step in steps if all(step in log or step > max(log) for log in followed))


def _points(run: Found, measured: str, quantity: str) -> dict[int, tuple[float, float | None]]:
    """By step: the epoch and the value."""
    if measured == TRAINING:
        return {event["step"]: (event["epoch"], event.get(quantity)) for event in run.of("train")}
    found: dict[int, tuple[float, float | None]] = {}
    for event in run.of("evaluate"):
        mode: Record = (event.get("modes") or {}).get(measured) or {}
        if quantity in mode:
            found[event["step"]] = (event["epoch"], mode[quantity])
    return found
