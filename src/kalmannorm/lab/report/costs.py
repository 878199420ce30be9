"""Speed and memory of each method, measured during training."""

from __future__ import annotations

from collections.abc import Callable

from kalmannorm.lab.machine.origin import in_words
from kalmannorm.lab.report.charts import Bar, BarGroup, Bars, Figure
from kalmannorm.lab.report.comparison import Comparison
from kalmannorm.lab.words.spread import Spread
from kalmannorm.lab.words.wording import number, size


def hardware(comparison: Comparison) -> list[str]:
    """The kinds of machines of the runs that count."""
    named = (in_words(str((run.run.record.get("origin") or {}).get("hardware") or "")) for run in comparison.counting)
    return [name for name in dict.fromkeys(named) if name]


def speed(comparison: Comparison, slug: str) -> Figure | None:
    caption = "Training speed; mean and standard deviation over seeds."
    places = hardware(comparison)
    if len(places) == 1:
        caption += f" On {places[0]}."
    elif places:
        caption += f" The runs are from {len(places)} kinds of machines: do not compare their speeds."
    return _figure(
        comparison, slug, "Images per second", "images/s", caption, "images_per_second", lambda v: number(v.mean)
    )


def memory(comparison: Comparison, slug: str) -> Figure | None:
    caption = "The largest amount of GPU memory that torch allocated during training. Runs on a CPU are not measured."
    return _figure(
        comparison, slug, "Peak memory", "peak memory", caption, "peak_memory", lambda value: size(value.mean)
    )


def _figure(
    comparison: Comparison,
    slug: str,
    title: str,
    unit: str,
    caption: str,
    key: str,
    text: Callable[[Spread], str],
) -> Figure | None:
    groups = []
    for setting in comparison.settings:
        bars = []
        for variant in comparison.variants:
            value = comparison.measured(variant, setting, key)
            if value is not None:
                bars.append(Bar(variant.label, variant.colour, value.mean, value.std, value.n, text(value)))
        if bars:
            groups.append(BarGroup(str(setting), bars))
    return Figure(slug, title, caption, [((), Bars(groups, unit))]) if groups else None
