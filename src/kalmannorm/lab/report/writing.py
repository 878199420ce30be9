"""Writes a page from folders of runs, its figures as files, and a summary for scripts."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path

from kalmannorm.lab.files.records import Record, usable, writable, write_atomically
from kalmannorm.lab.report import svg
from kalmannorm.lab.report.charts import Figure
from kalmannorm.lab.report.collecting import Collected, collect
from kalmannorm.lab.report.comparison import Chapter, Comparison, chapters
from kalmannorm.lab.report.page import Content, content, page
from kalmannorm.lab.report.sentences import on_gains, on_speed, sentences, what
from kalmannorm.lab.report.wiring import drawings

Tell = Callable[[str], None]


def write(folders: Sequence[Path], output: Path, *, figures: Path | None = None, tell: Tell | None = None) -> Path:
    """Write the page about all runs and experiments in `folders`, and each figure as PNG, SVG and CSV into `figures`.

    `tell` is called with a line for each run or experiment that could not be read completely. The page says the same.
    """
    return write_collected(collect(folders), output, figures=figures, tell=tell)


def write_collected(
    collected: Collected, output: Path, *, figures: Path | None = None, tell: Tell | None = None
) -> Path:
    writable(output)
    if figures is not None:
        usable(figures)
    made = content(chapters(collected), collected.damaged)
    if figures is not None:
        write_figures(made, figures)
    # The name of a folder need not be valid UTF-8.
    write_atomically(output, page(made, _between(output, figures)).encode(errors="backslashreplace"))
    if tell is not None:
        for broken in collected.damaged:
            tell(str(broken))
    return output


def _between(output: Path, figures: Path | None) -> str | None:
    """The path from the page to its figures. None if they are not beside it; then they are not linked."""
    if figures is None or figures.resolve().parent != output.resolve().parent:
        return None
    return figures.name


def write_figures(made: Content, folder: Path) -> None:
    from kalmannorm.lab.report.plotting import images

    for figure in made.figures:
        write_atomically(folder / f"{figure.slug}.csv", _csv(figure).encode(errors="backslashreplace"))
        for name, (values, chart) in figure.images.items():
            for kind, drawn in images(chart, " · ".join([figure.title, *filter(None, values)])).items():
                write_atomically(folder / f"{name}.{kind}", drawn)
    for number, (_, drawing) in enumerate(drawings([chapter for chapter, _ in made.chapters])):
        write_atomically(folder / f"wiring-{number + 1}.svg", svg.standalone(drawing).encode())


def _csv(figure: Figure) -> str:
    rows = list(figure.rows())
    names = list(dict.fromkeys(name for row in rows for name in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, names, restval="", extrasaction="ignore", lineterminator="\n")  # "raise" is slower
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def summarize(folders: Sequence[Path]) -> Record:
    """The content of the page's tables and sentences, for scripts."""
    return summarize_collected(collect(folders))


def summarize_collected(collected: Collected) -> Record:
    return {
        "chapters": [_chapter(chapter) for chapter in chapters(collected)],
        "damaged": [vars(broken) for broken in collected.damaged],
    }


def _chapter(chapter: Chapter) -> Record:
    record = chapter.experiment.record if chapter.experiment else {}
    told = ("name", "title", "dataset", "budget", "stand_in", "warnings", "tables", "notes")
    experiment = {key: record.get(key) for key in told}
    return {
        "title": chapter.title,
        "experiment": experiment if chapter.experiment else None,
        "comparisons": [_comparison(comparison) for comparison in chapter.comparisons],
        "runs": [
            {"folder": str(run.run.folder), "state": run.state, "accuracy": run.result.get("accuracy")}
            for run in chapter.runs
        ],
    }


def _comparison(comparison: Comparison) -> Record:
    cells = []
    for (variant, setting), runs in comparison.cells.items():
        scores = {mode: comparison.accuracy(variant, setting, mode) for mode in comparison.modes}
        cells.append(
            {
                "method": variant.method,
                "label": variant.label,
                "setting": list(setting),
                "seeds": [run.run.recipe.seed for run in runs],
                "diverged": comparison.diverged(variant, setting),
                "accuracy": {mode: score.to_json() for mode, score in scores.items() if score is not None},
            }
        )
    told = [*sentences(comparison), *on_gains(comparison), *on_speed(comparison)]
    return {
        "model": comparison.model,
        "dataset": comparison.dataset,
        "test_images": comparison.images,
        "what": what(comparison),
        "sentences": told,
        "cells": cells,
    }
