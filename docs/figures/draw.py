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
from matplotlib.ticker import FixedLocator, NullLocator

HERE = Path(__file__).parent
BATCH_NORM, KALMAN, KALMAN_LEARNED = "#c8500a", "#0b63a5", "#6aa5d3"  # apart in hue and in lightness
TEXT, QUIET, GRID = "#1b1f24", "#57606a", "#d8dee4"
STATISTICS_BATCH = 1  # of the left panel

Record = dict[str, Any]


def read(name: str) -> list[Record]:
    return [json.loads(line) for line in (HERE / "records" / name).read_text().splitlines()]


def title(axes: Axes, headline: str, explanation: str) -> None:
    axes.text(0, 1.155, headline, transform=axes.transAxes, fontsize=13.5, fontweight="bold", color=TEXT)
    axes.text(0, 1.055, explanation, transform=axes.transAxes, fontsize=10.5, color=QUIET)


def draw_deviation(axes: Axes, records: list[Record]) -> None:
    """One bar per layer and method: where σ of a batch lies, as a multiple of the σ that inference uses."""
    records = [record for record in records if record["statistics_batch"] == STATISTICS_BATCH]
    for method, colour, offset in (("BN", BATCH_NORM, -0.17), ("BKN weights", KALMAN, 0.17)):
        for record in records:
            if record["method"] == method:
                row = record["layer"] + offset
                axes.plot([record["p5"], record["p95"]], [row, row], color=colour, linewidth=9, solid_capstyle="butt")
    layers = sorted({record["layer"] for record in records})
    last = {record["method"]: record for record in records if record["layer"] == layers[-1]}
    axes.text(
        last["BN"]["p95"] + 0.015, layers[-1] - 0.17, "batch norm", color=BATCH_NORM, va="center", fontweight="bold"
    )
    axes.text(
        last["BKN weights"]["p95"] + 0.015, layers[-1] + 0.17, "BKN", color=KALMAN, va="center", fontweight="bold"
    )
    axes.text(1.2, layers[0], "no layer before it:\nthe batch alone", color=QUIET, va="center", fontsize=9.5)
    axes.axvline(1, color=TEXT, linewidth=0.8, zorder=3)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([0.6, 0.8, 1, 1.25, 1.6]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks([0.6, 0.8, 1, 1.25, 1.6], ["× 0.6", "× 0.8", "equal", "× 1.25", "× 1.6"])
    axes.set_xlim(0.58, 1.75)
    axes.set_yticks(layers, [f"layer {layer}" for layer in layers])
    axes.set_ylim(layers[-1] + 0.55, layers[0] - 0.55)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_xlabel("σ of a training batch ÷ σ used at inference")
    title(
        axes,
        f"Batches of {STATISTICS_BATCH}: batch norm trains on noisy statistics",
        "Bars hold the middle 90 % of all channels and batches",
    )


def draw_accuracy(axes: Axes, records: list[Record]) -> None:
    sizes = sorted({record["statistics_batch"] for record in records}, reverse=True)
    lines = (
        ("BN", "batch norm", BATCH_NORM, "o", 2.4),
        ("BKN learned", "BKN, transition learned", KALMAN_LEARNED, "s", 1.4),
        ("BKN weights", "BKN, from the weights", KALMAN, "o", 2.4),
    )
    for method, label, colour, marker, width in lines:
        scores = [
            [r["accuracy"]["population"] for r in records if r["method"] == method and r["statistics_batch"] == size]
            for size in sizes
        ]
        means = [statistics.mean(values) for values in scores]
        spread = [
            [mean - min(values) for mean, values in zip(means, scores, strict=True)],
            [max(values) - mean for mean, values in zip(means, scores, strict=True)],
        ]
        axes.errorbar(
            range(len(sizes)), means, spread, color=colour, marker=marker, markersize=5, linewidth=width, elinewidth=1.2
        )
        axes.text(
            len(sizes) - 0.85, means[-1], f"{label}\n{means[-1]:.1f} %", color=colour, va="center", fontweight="bold"
        )
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_xlim(-0.2, len(sizes) + 0.6)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_yticks(range(86, 101, 2), [f"{value} %" for value in range(86, 101, 2)])
    axes.set_xlabel("examples that share their statistics")
    seeds = len({record["seed"] for record in records})
    title(axes, "BKN keeps its accuracy", f"Test accuracy on digits; mean and range of {seeds} seeds")


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
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), facecolor="white")
    for axes in (left, right):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(GRID)
        axes.tick_params(length=0)
    draw_deviation(left, read("deviation.jsonl"))
    draw_accuracy(right, read("accuracy.jsonl"))
    figure.subplots_adjust(left=0.06, right=0.985, top=0.81, bottom=0.13, wspace=0.17)
    figure.savefig(HERE / "micro-batch.svg", metadata={"Date": None})
    figure.savefig(HERE / "micro-batch.png", dpi=1600 / 12)


if __name__ == "__main__":
    main()
