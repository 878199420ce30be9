"""What normalizes one test image in each inference. The images are scikit-learn's digits."""

from __future__ import annotations

import numpy as np
from look import Theme, arrow, box, canvas, drawing
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

RECORDS = ()
SIDE = 0.95  # of an image


def image(axes: Axes, theme: Theme, pixels: np.ndarray, left: float, top: float, colour: str, words: str) -> None:
    axes.imshow(
        pixels, cmap="gray", extent=(left, left + SIDE, top + SIDE, top), vmin=0, vmax=16, aspect="auto", zorder=2
    )
    axes.add_patch(Rectangle((left, top), SIDE, SIDE, fill=False, edgecolor=colour, lw=2.4, zorder=3))
    axes.text(left + SIDE / 2, top - 0.13, words, ha="center", va="bottom", fontsize=10, color=colour, linespacing=1.2)


def draw(theme: Theme) -> Figure:
    from sklearn.datasets import load_digits

    digits = load_digits()
    test, neighbour, average = digits.images[-2], digits.images[12], digits.images.mean(0)
    figure = canvas(theme, 12, 5.3)
    axes = drawing(figure, 12, 5.3)
    panels = (
        ("population", theme.good, "moving averages\nof the training", "no", "yes"),
        ("batch", theme.batch, "posterior of this group", "yes", "no"),
        ("example", theme.kalman, "posterior of this image\nand m − 1 average ones", "no", "no"),
    )
    for number, (name, colour, source, depends, folds) in enumerate(panels):
        left = 0.25 + 4 * number
        middle = left + 1.75
        axes.text(left, 0.4, f'"{name}"', fontsize=15, fontweight="bold", color=colour)
        if number == 0:
            axes.text(left + 1.75, 0.4, "default", fontsize=11, color=theme.quiet, va="baseline")
        image(axes, theme, test, left + 0.1, 1.15, theme.text, "test image")
        if name == "population":
            axes.text(left + 1.25, 1.15 + SIDE / 2, "adds nothing to\nthe statistics", va="center", color=theme.quiet)
        if name == "batch":
            image(axes, theme, neighbour, left + 1.55, 1.15, colour, "other test image")
        if name == "example":
            image(axes, theme, average, left + 1.55, 1.15, colour, "average of\nthe training")
        if name != "population":
            box(axes, theme, (left + 2.75, 1.3, 0.8, 0.65), "prior", colour=theme.learned)
            arrow(axes, theme, (left + 3.15, 1.98), (left + 2.75, 2.62))
            arrow(axes, theme, (left + 2.02, 2.13), (middle + 0.12, 2.62))
            arrow(axes, theme, (left + 0.58, 2.13), (middle - 0.6, 2.62))
        box(axes, theme, (left, 2.65, 3.5, 0.85), source, colour=colour, bold=True)
        arrow(axes, theme, (middle, 3.52), (middle, 3.9))
        axes.text(middle, 4.08, "mean and σ that normalize the test image", ha="center", va="center", fontsize=10)
        axes.text(left, 4.55, f"depends on other test images: {depends}", color=theme.quiet, fontsize=10.5)
        axes.text(left, 4.88, f"folds into a convolution: {folds}", color=theme.quiet, fontsize=10.5)
    return figure
