"""Draws `micro-batch.svg` and `micro-batch.png`, the README's picture, from `records/`: `make figures`.

Nothing is trained here; `measure.py` makes the records. Every number in the picture is read from them.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed to write files
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MultipleLocator, NullLocator

HERE = Path(__file__).parent
BATCH_NORM, KALMAN, KALMAN_LEARNED = "#c8500a", "#0a5a99", "#3d84bd"  # apart for the colour-blind; each 4:1 on white
TEXT, QUIET, GRID = "#1b1f24", "#57606a", "#d8dee4"
STATISTICS_BATCH = 1  # of the left panel

Record = dict[str, Any]


def read(name: str) -> list[Record]:
    return [json.loads(line) for line in (HERE / "records" / name).read_text().splitlines()]


def title(axes: Axes, headline: str, explanation: str) -> None:
    axes.text(0, 1.17, headline, transform=axes.transAxes, fontsize=13, fontweight="bold")
    axes.text(0, 1.085, explanation, transform=axes.transAxes, fontsize=10, color=QUIET)


def draw_deviation(axes: Axes, records: list[Record]) -> None:
    """One bar per layer and method: where σ of a batch lies, as a multiple of the σ that inference uses."""
    records = [record for record in records if record["statistics_batch"] == STATISTICS_BATCH]
    shown = (("BN", "batch norm", BATCH_NORM, -0.18), ("BKN weights", "BKN weights", KALMAN, 0.18))
    for method, label, colour, offset in shown:
        own = [record for record in records if record["method"] == method]
        for record in own:
            row = record["layer"] + offset
            axes.plot([record["p5"], record["p95"]], [row, row], color=colour, linewidth=9, solid_capstyle="butt")
        widest = own[-1]
        axes.text(
            widest["p95"] + 0.02,
            widest["layer"] + offset,
            label,
            color=colour,
            va="center",
            fontweight="bold",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    axes.axvline(1, color=TEXT, linewidth=0.8, zorder=3)

    # The learned gain says how the filter did it: a column of numbers at the right edge.
    kalman = [record for record in records if record["method"] == "BKN weights"]
    column = 1.86
    axes.text(column, 0.73, "BKN's trust\nin the batch", color=KALMAN, ha="center", va="center", fontsize=9.5)
    for record in kalman:
        axes.text(
            column, record["layer"] + 0.18, f"{100 * record['gain']:.0f} %", color=KALMAN, ha="center", va="center"
        )

    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks([0.6, 0.8, 1, 1.25, 1.6], ["× 0.6", "× 0.8", "equal", "× 1.25", "× 1.6"])
    axes.set_xlim(0.57, 2.08)
    axes.set_yticks([record["layer"] for record in kalman], [f"layer {record['layer']}" for record in kalman])
    axes.set_ylim(len(kalman) + 0.5, 0.5)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_xlabel("σ of a batch ÷ σ used at inference, for 90 % of channels and batches")
    title(
        axes,
        f"Batches of {STATISTICS_BATCH}: σ jumps about, and BKN steadies it",
        "BKN predicts σ from the layer before and learns how far to trust the batch",
    )


def draw_accuracy(axes: Axes, records: list[Record]) -> None:
    """Accuracy against the statistics batch, at inference with population statistics, as batch norm's users have it."""
    sizes = sorted({record["statistics_batch"] for record in records}, reverse=True)
    lines = (
        ("BN", "batch norm", BATCH_NORM, "-", 2.4),
        ("BKN learned", "BKN learned", KALMAN_LEARNED, "--", 1.4),
        ("BKN weights", "BKN weights", KALMAN, "-", 2.4),
    )
    lost = {}
    for method, label, colour, style, width in lines:
        scores = [
            [r["accuracy"]["population"] for r in records if r["method"] == method and r["statistics_batch"] == size]
            for size in sizes
        ]
        means = [statistics.mean(values) for values in scores]
        below = [mean - min(values) for mean, values in zip(means, scores, strict=True)]
        above = [max(values) - mean for mean, values in zip(means, scores, strict=True)]
        look = {"color": colour, "linestyle": style, "linewidth": width, "marker": "o", "markersize": 5}
        axes.errorbar(sizes, means, (below, above), elinewidth=1.2, **look)
        axes.text(0.87, means[-1], f"{label}\n{means[-1]:.1f} %", color=colour, va="center", fontweight="bold")
        lost[method] = means[0] - means[-1]
    axes.set_xscale("log", base=2)
    axes.set_xlim(76, 0.92)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(MultipleLocator(2))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_xlabel("examples that share their statistics")
    seeds = len({record["seed"] for record in records})
    title(
        axes,
        f"Batch 1 costs batch norm {lost['BN']:.0f} points, BKN {lost['BKN weights']:.0f} to {lost['BKN learned']:.0f}",
        f"Test accuracy on digits in %, mean and range of {seeds} seeds",
    )


def main() -> None:
    plt.rcParams.update(
        {
            "font.family": "DejaVu Sans",
            "font.size": 10.5,
            "text.color": TEXT,
            "axes.labelcolor": TEXT,
            "xtick.color": QUIET,
            "ytick.color": QUIET,
            "axes.axisbelow": True,
            "svg.hashsalt": "kalmannorm",  # equal records give equal files
        }
    )
    figure = plt.figure(figsize=(12, 4.7), facecolor="white")
    left, right = figure.add_axes((0.055, 0.125, 0.455, 0.67)), figure.add_axes((0.565, 0.125, 0.335, 0.67))
    for axes in (left, right):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(GRID)
        axes.tick_params(length=0)
    draw_deviation(left, read("deviation.jsonl"))
    draw_accuracy(right, read("accuracy.jsonl"))
    figure.savefig(HERE / "micro-batch.svg", metadata={"Date": None})
    figure.savefig(HERE / "micro-batch.png", dpi=1600 / 12)


if __name__ == "__main__":
    main()
