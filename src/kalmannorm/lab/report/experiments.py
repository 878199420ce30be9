"""The parts of a page that an experiment's record defines: tables with the paper's numbers, curves and maps."""

from __future__ import annotations

from kalmannorm.lab.files.records import Record
from kalmannorm.lab.report import gaps, palette
from kalmannorm.lab.report.charts import Figure, Lines
from kalmannorm.lab.report.collecting import Found
from kalmannorm.lab.report.comparison import Chapter
from kalmannorm.lab.report.curves import chart_of, curve
from kalmannorm.lab.report.markup import Markup, element, joined
from kalmannorm.lab.report.tables import brought


def introduction(record: Record) -> Markup:
    """The question, and the data and length of the training."""
    facts = [f"data set {record['dataset']}"] if record.get("dataset") else []
    facts += [f"budget {record['budget']}"] if record.get("budget") is not None else []
    stand_in = "Not the paper's data: compare the order of the methods, not the values."
    return joined(
        element("p", record["question"], class_="lead") if record.get("question") else None,
        element("p", element("span", "stand-in", class_="state unfinished"), " ", stand_in)
        if record.get("stand_in")
        else None,
        element("p", ", ".join(facts) + ".", class_="note") if facts else None,
    )


def tables(record: Record) -> Markup:
    notes = [element("li", note) for note in record.get("notes") or []]
    return joined(
        *(brought(table) for table in record.get("tables") or [] if isinstance(table, dict)),
        element("ul", *notes, class_="notes") if notes else None,
    )


def figures(chapter: Chapter, slug: str) -> list[Figure]:
    """The figures of the record whose runs exist."""
    if chapter.experiment is None:
        return []
    home = chapter.experiment.folder
    runs = {run.run.folder.resolve(): run for run in chapter.runs if run.counts}
    made = []
    for number, wanted in enumerate(chapter.experiment.record.get("figures") or []):
        name = f"{slug}-{number + 1}"
        if wanted.get("kind") == "curves":
            groups = [
                (str(group["label"]), [run for f in group["runs"] if (run := runs.get((home / f).resolve()))])
                for group in wanted.get("groups") or []
            ]
            made.append(_curves(wanted, name, groups))
        elif wanted.get("kind") == "variance-gap":
            pairs = [(str(one["label"]), runs.get((home / one["run"]).resolve())) for one in wanted.get("runs") or []]
            shown = [(label, gap) for label, run in pairs if run is not None and (gap := gaps.gap_of(run))]
            made.append(gaps.gap_figure(name, str(wanted.get("title") or "Variance gap"), [("", shown)]))
    return [figure for figure in made if figure is not None]


def _curves(wanted: Record, slug: str, groups: list[tuple[str, list[Found]]]) -> Figure | None:
    mode, quantity = str(wanted.get("mode") or "population"), str(wanted.get("y") or "accuracy")
    known = [(label, runs) for label, runs in groups if runs]
    shades = palette.colours([runs[0].run.recipe.method for _, runs in known])
    lines = [
        line
        for (label, runs), shade in zip(known, shades, strict=True)
        if (line := curve(label, shade, runs, mode, quantity)) is not None
    ]
    if not lines:
        return None
    caption = f"{mode} inference; mean over seeds, the band is one standard deviation to either side."
    chart = chart_of([Lines("", lines)], mode, quantity)
    return Figure(slug, str(wanted.get("title") or "Curves"), caption[0].upper() + caption[1:], [((), chart)])
