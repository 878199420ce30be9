"""The mechanism: a prediction and the noisy estimate of a group are fused into the posterior, weighted by the gain.

The numbers are those of one channel of a trained net and one group of two images. The errors of prior and group are
typical of the layer (`measure.py`).
"""

from __future__ import annotations

import numpy as np
from look import Theme, canvas, plain, records
from matplotlib.axes import Axes
from matplotlib.figure import Figure

RECORDS = ("docs/figures/records/one-group.json",)


def curve(x: np.ndarray, moments: list[float]) -> np.ndarray:
    mean, var = moments
    return np.exp(-((x - mean) ** 2) / (2 * var)) / np.sqrt(2 * np.pi * var)


def shown(axes: Axes, x: np.ndarray, moments: list[float], colour: str, words: str) -> None:
    """A belief N(mean, var), its σ in numbers, and one line of words below its title."""
    y = curve(x, moments)
    axes.fill_between(x, y, color=colour, alpha=0.22, linewidth=0)
    axes.plot(x, y, color=colour, linewidth=2.4)
    axes.text(0.02, 0.97, f"σ = {moments[1] ** 0.5:.2f}", transform=axes.transAxes, va="top", color=colour, fontsize=13)
    axes.text(0.5, -0.09, words, transform=axes.transAxes, ha="center", va="top", linespacing=1.4)


def draw(theme: Theme) -> Figure:
    (record,) = records(RECORDS[0])
    prior, batch, posterior, truth = (record[name] for name in ("prior", "observation", "posterior", "large_batch"))
    gain, m = record["gain"], record["statistics_batch"]
    figure = canvas(theme, 12, 4.0)
    reach = 3.2 * max(var for _, var in (prior, batch, truth)) ** 0.5
    x = np.linspace(truth[0] - reach, truth[0] + reach, 400)
    top = 1.35 * max(curve(x, moments).max() for moments in (prior, batch, posterior, truth))
    left, middle, right = (figure.add_axes((place, 0.19, 0.26, 0.6)) for place in (0.03, 0.37, 0.71))
    titles = (
        (left, "1. Predict", "the prior", theme.learned),
        (middle, "2. Observe", f"a group of {m}", theme.batch),
        (right, "3. Update", "the posterior", theme.kalman),
    )
    for axes, headline, name, colour in titles:
        plain(axes, theme)
        axes.set_xlim(x[0], x[-1])
        axes.set_ylim(0, top)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_title(f"{headline}: {name}", color=colour, fontsize=14, fontweight="bold", pad=14)
    shown(left, x, prior, theme.learned, "from the norm before, through the\nlayers between: no example is needed")
    values = record["values"]
    middle.plot(values, [0.02 * top] * len(values), "|", color=theme.batch, markersize=14, alpha=0.8)
    shown(middle, x, batch, theme.batch, f"mean and variance of {len(values)} values:\nall that batch norm uses")
    right.plot(x, curve(x, truth), color=theme.text, linewidth=1.4, linestyle=(0, (4, 3)))
    shown(right, x, posterior, theme.kalman, "normalizes the group. The weight q,\nthe gain, is learned by each norm")
    large = f"– – σ = {truth[1] ** 0.5:.2f}\nof 896 images"
    right.text(0.98, 0.97, large, transform=right.transAxes, va="top", ha="right", fontsize=11, linespacing=1.4)
    for place, sign in ((0.335, "+"), (0.675, "→")):
        figure.text(place, 0.48, sign, ha="center", va="center", fontsize=30, color=theme.quiet)
    for axes, name, weight in ((left, "1 − q", 1 - gain), (middle, "q", gain)):
        words = f"weight {name} = {weight:.2f}"
        axes.text(0.98, 0.97, words, transform=axes.transAxes, va="top", ha="right", color=theme.quiet, fontsize=12)
    return figure
