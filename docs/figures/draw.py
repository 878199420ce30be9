"""Draws `micro-batch.svg` and `micro-batch.png`, the README's picture, from `records/`: `make figures`.

Nothing is trained here: `measure.py` makes the records. Every number is read from them.
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
STATISTICS_BATCH = 2  # of the left panel

Record = dict[str, Any]


def read(name: str) -> list[Record]:
    return [json.loads(line) for line in (HERE / "records" / name).read_text().splitlines()]


def title(axes: Axes, headline: str, explanation: str, left: float = 0.0) -> None:
    axes.text(left, 1.17, headline, transform=axes.transAxes, fontsize=13, fontweight="bold")
    axes.text(left, 1.085, explanation, transform=axes.transAxes, fontsize=10, color=QUIET)


def draw_deviation(axes: Axes, records: list[Record]) -> None:
    """One bar per layer and method: where σ of a batch lies, as a multiple of the σ that inference uses."""
    records = [record for record in records if record["statistics_batch"] == STATISTICS_BATCH]
    shown = (("BN", "batch norm", BATCH_NORM, -0.18), ("BKN weights", "BKN", KALMAN, 0.18))
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
    column = 1.5
    axes.text(column, 0.73, "BKN's trust\nin the batch", color=KALMAN, ha="center", va="center", fontsize=9.5)
    for record in kalman:
        axes.text(
            column, record["layer"] + 0.18, f"{100 * record['gain']:.0f} %", color=KALMAN, ha="center", va="center"
        )

    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks([0.8, 1, 1.25], ["× 0.8", "equal", "× 1.25"])
    axes.set_xlim(min(record["p5"] for record in records) - 0.02, 1.62)
    axes.set_yticks([record["layer"] for record in kalman], [f"layer {record['layer']}" for record in kalman])
    axes.set_ylim(len(kalman) + 0.5, 0.5)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_xlabel("σ of a batch ÷ σ used at inference (digits; 90 % of channels and batches)")
    title(
        axes,
        f"Batches of {STATISTICS_BATCH}: σ jumps about, and BKN steadies it",
        "BKN predicts σ from the layer before and learns its trust in the batch",
    )


def draw_accuracy(axes: Axes, records: list[Record]) -> None:
    """One row per norm and statistics batch: mean and range over seeds, at inference by population and by example."""
    rows = (
        ("BN", 128, "batch norm, batch 128", QUIET),
        ("BN", 2, "batch norm, batch 2", BATCH_NORM),
        ("GN warmed up", 128, "group norm", QUIET),
        ("BKN learned", 2, "BKN learned, batch 2", KALMAN_LEARNED),
        ("BKN weights", 2, "BKN, batch 2", KALMAN),
    )
    means = {}
    for row, (method, size, _, colour) in enumerate(rows):
        own = [r["accuracy"] for r in records if r["method"] == method and (size in (r["statistics_batch"], None))]
        modes = ["population"] if method.startswith("GN") else ["population", "example"]
        for mode in modes:
            scores = [accuracy[mode] for accuracy in own]
            mean = means[method, size, mode] = statistics.mean(scores)
            fill = colour if mode == "population" else "white"
            axes.plot([min(scores), max(scores)], [row, row], color=colour, linewidth=1.4, zorder=2)
            axes.plot(mean, row, "o", color=colour, markerfacecolor=fill, markersize=9, markeredgewidth=2, zorder=3)
        for mode in modes[-1:] if method == "BN" and size == 128 else modes:  # there the two marks are one
            value = means[method, size, mode]
            weight = "bold" if mode == modes[-1] else "normal"
            axes.text(value, row - 0.27, f"{value:.1f}", color=colour, ha="center", va="center", fontweight=weight)
    baseline = means["BN", 128, "population"]
    axes.axvline(baseline, color=QUIET, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    axes.set_yticks(range(len(rows)), [label for _, _, label, _ in rows])
    for tick, (_, _, _, colour) in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_color(colour)
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.set_xlim(77.5, 88.5)
    axes.xaxis.set_major_locator(MultipleLocator(2))
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_xlabel("test accuracy %;  ● population statistics,  ○ example inference", x=0.28)
    lost = [baseline - means[method, 2, "population"] for method in ("BN", "BKN weights")]
    seeds, epochs = len({record["seed"] for record in records}), records[0]["epochs"]
    title(
        axes,
        f"Batch 2 costs batch norm {lost[0]:.1f} points, BKN {lost[1]:.1f}",
        f"CIFAR-10, the paper's Inception net, {epochs:g} epochs; mean and range of {seeds} seeds",
        left=-0.44,
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
    left, right = figure.add_axes((0.055, 0.125, 0.42, 0.67)), figure.add_axes((0.685, 0.125, 0.3, 0.67))
    for axes in (left, right):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(GRID)
        axes.tick_params(length=0)
    draw_deviation(left, read("deviation.jsonl"))
    draw_accuracy(right, read("cifar10.jsonl"))
    figure.savefig(HERE / "micro-batch.svg", metadata={"Date": None})
    figure.savefig(HERE / "micro-batch.png", dpi=1600 / 12)


if __name__ == "__main__":
    main()
