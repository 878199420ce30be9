"""Explains the words of the page: settings, ways of inference, and the methods on it."""

from __future__ import annotations

from collections.abc import Sequence

from kalmannorm._norms.grouped import INFERENCE_MODES
from kalmannorm.lab.recipes.methods import METHODS
from kalmannorm.lab.report.comparison import Chapter
from kalmannorm.lab.report.markup import Markup, element
from kalmannorm.lab.words.naming import grouped, order
from kalmannorm.lab.words.wording import counted

_MODES = {
    "population": "Every test image is normalized with the moving averages of training, as BatchNorm does in eval().",
    "batch": "Groups of test images share their statistics, as in training, and so depend on each other.",
    "example": "Every test image is normalized by itself, as if it were in a group with average images.",
}


def glossary(chapters: Sequence[Chapter]) -> Markup | None:
    """The words that these chapters use. None if there are no runs."""
    comparisons = [comparison for chapter in chapters for comparison in chapter.comparisons]
    if not comparisons:
        return None
    settings = [setting for comparison in comparisons for setting in comparison.settings]
    setting = min(settings, key=lambda setting: (setting.statistics_batch == 1, setting.statistics_batch))
    gradient, statistics = setting
    share = f"in groups of {statistics} that share their statistics" if statistics > 1 else "each in a group of its own"
    words = {str(setting): f"A setting: each optimizer step sees {counted(gradient, 'image')}, {share}."}
    methods = sorted({variant.method for comparison in comparisons for variant in comparison.variants}, key=order)
    if any(not grouped(method) for method in methods):
        words[f"({gradient}, –)"] = "The same setting for a method that has no groups."
    modes = {mode for comparison in comparisons for mode in comparison.modes}
    words |= {mode: _MODES[mode] for mode in INFERENCE_MODES if mode in modes}
    words |= {METHODS[method].title: METHODS[method].words for method in methods}
    pairs = [element("div", element("dt", word), element("dd", meaning)) for word, meaning in words.items()]
    return element("dl", *pairs, class_="glossary")
