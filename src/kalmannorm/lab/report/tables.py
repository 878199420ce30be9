"""The tables of the page: methods × settings × ways of inference, and the tables of experiments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kalmannorm.lab.files.records import Record
from kalmannorm.lab.recipes.setting import Setting
from kalmannorm.lab.report import palette
from kalmannorm.lab.report.columns import is_papers, spread_of, texts
from kalmannorm.lab.report.comparison import Comparison, Variant
from kalmannorm.lab.report.difference import difference
from kalmannorm.lab.report.markup import Markup, element, joined
from kalmannorm.lab.words.naming import grouped
from kalmannorm.lab.words.spread import Spread
from kalmannorm.lab.words.wording import MISSING, listed, number, option, unbroken

_SHORTFALLS = (2.0, 5.0, 10.0, 20.0)
"""Points below the best of the table at which a cell gets a stronger tint."""


_FEW = 6
"""Tables with at most this many columns do not use the whole width of the page."""


def results(comparison: Comparison) -> Markup:
    """Accuracy of every cell. In each column the best is marked, and all that do not differ from it beyond chance."""
    columns = [
        (setting, mode)
        for setting in comparison.settings
        for mode in comparison.modes
        if any(comparison.accuracy(variant, setting, mode) for variant in comparison.variants)
    ]
    if not columns:
        return element("p", "No run has finished yet.", class_="muted")
    groups = [(s, sum(column[0] == s for column in columns)) for s in dict.fromkeys(s for s, _ in columns)]
    first = {(s, next(mode for setting, mode in columns if setting == s)) for s, _ in groups}
    head = joined(
        element(
            "tr",
            element("th", _sorter("Method"), rowspan=2, scope="col", class_="name"),
            *(element("th", str(s), colspan=span, scope="colgroup", class_="group") for s, span in groups),
        ),
        element("tr", *(element("th", _sorter(m), scope="col", class_=_edge((s, m), first)) for s, m in columns)),
    )
    values = {
        (variant, column): value
        for variant in comparison.variants
        for column in columns
        if (value := comparison.accuracy(variant, *column)) is not None
    }
    top = max(value.mean for value in values.values())
    rows = []
    for order, variant in enumerate(comparison.variants):
        cells = [element("th", _swatch(variant), variant.label, scope="row", class_="name", data_value=order)]
        for column in columns:
            value = values.get((variant, column))
            rivals = [
                values[other, column]
                for other in comparison.variants
                if (other, column) in values and comparison.sound(other, column[0])
            ]
            cells.append(_cell(comparison, variant, column, value, rivals, top, _edge(column, first)))
        rows.append(element("tr", *cells))
    name = f"Test accuracy of {comparison.title}"
    kind = "sortable compact" if len(columns) <= _FEW else "sortable"
    return joined(_box(name, head, rows, kind), _legend(comparison, list(values.values())))


def _edge(column: tuple[Setting, str], first: set[tuple[Setting, str]]) -> str | None:
    return "edge" if column in first else None


def _swatch(variant: Variant) -> Markup:
    return element("span", class_=f"swatch {palette.classes(variant.colour)}", aria_hidden="true")


def _sorter(label: str) -> Markup:
    """A button, so that Enter, space and a tap also sort."""
    return element("button", label, element("span", class_="arrow", aria_hidden="true"), type="button", class_="sort")


def _cell(
    comparison: Comparison,
    variant: Variant,
    column: tuple[Setting, str],
    value: Spread | None,
    rivals: Sequence[Spread],
    top: float,
    edge: str | None,
) -> Markup:
    if value is None:
        missing = "there is no such run, or it has no such way of inference"
        return element("td", MISSING, title=missing, class_=" ".join(filter(None, ("none", edge))))
    best = max(rivals, key=lambda other: other.mean, default=None)
    diverged = comparison.diverged(variant, column[0])
    comparable = best is not None and any(value is rival for rival in rivals)
    found = difference(value, best, comparison.images) if best is not None and comparable else None
    # The spread of diverged runs means nothing.
    level = found is not None and found.level and not diverged
    open_ = found is not None and found.beyond_chance is False and not level and not diverged
    classes = ["best"] if value is best else ["level"] if level else []
    fall = sum(top - value.mean >= limit for limit in _SHORTFALLS)
    classes += [f"fall-{fall}"] if fall else []
    title = f"{variant.label} {column[0]}, {column[1]}: mean of n = {value.n}"
    title += f", {diverged} diverged" if diverged else ""
    title += f"; {found.reason}" if found is not None and open_ else ""
    tail = None if value.std is None else element("span", f" ± {number(value.std, 1)}", class_="std")
    mark = element("sup", "†" if diverged else "?") if diverged or open_ else None
    return element(
        "td",
        element("span", number(value.mean, 1), class_="mean"),
        mark,
        tail,
        class_=" ".join([*classes, *([edge] if edge else [])]) or None,
        data_value=f"{value.mean:.4f}",
        title=title,
    )


def _legend(comparison: Comparison, values: Sequence[Spread]) -> Markup:
    counts = sorted({value.n for value in values})
    images = "" if comparison.images is None else f"{number(comparison.images)} test images"
    parts = [
        "Test accuracy in %, mean ± standard deviation over "
        + (f"{counts[0]} seeds." if len(counts) == 1 and counts[0] > 1 else "seeds; hover to see how many."),
        f"Bold: best of its column, and all within the error of {images}, at 95 % for each pair. "
        "?: further from the best, but the seeds are too few to tell (Welch's t-test at 95 %)."
        if images
        else "Bold: best of its column, and all that do not differ from it by more than the seeds vary "
        "(Welch's t-test at 95 % for each pair).",
        "Tint: 2, 5, 10 or 20 points below the best of the table.",
    ]
    if counts == [1]:
        level = f", and all within the error of {images}, at 95 % for each pair" if images else ""
        parts[:2] = [f"Test accuracy in % of single seeds: their spread is unknown. Bold: best of its column{level}."]
    single = list(dict.fromkeys(v.name for v in comparison.variants if not grouped(v.method)))
    if single and len(comparison.settings) > 1:
        verb = "has" if len(single) == 1 else "have"
        parts.append(f"{listed(single)} {verb} no statistics batch: the same runs in all columns.")
    if not all(comparison.sound(variant, setting) for variant, setting in comparison.cells):
        parts.append("Runs that are too short, or end at chance level, are never marked.")
    if any(run.state == "diverged" for run in comparison.counting):
        parts.append("† contains diverged runs, with their final accuracy, and is never marked as equal to the best.")
    return element("p", " ".join(parts), class_="note")


def settings_line(comparison: Comparison) -> Markup:
    """The options that all these runs share, and those in which they differ."""
    shared = {n: v for n, v in comparison.common.items() if v is not None and (n != "augment" or not v)}
    said = [option(name, value) for name, value in shared.items() if value not in (False, 0, 0.0) or name == "augment"]
    parts: list[object] = [element("strong", "Shared by all runs: "), ", ".join(said) + "."]
    if comparison.differing:
        differ = [f"{n.replace('_', ' ')} ({', '.join(map(_value, v))})" for n, v in comparison.differing.items()]
        parts += [" ", element("strong", "They differ in "), "; ".join(differ) + "."]
    return element("p", *parts, class_="note")


def _value(value: Any) -> str:
    return "default" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def brought(table: Record) -> Markup:
    """A table of an experiment. The columns of the paper have another style than ours."""
    columns = [str(name) for name in table.get("columns") or []]
    lines = [list(cells) for cells in table.get("rows") or []]
    kinds = [_kind(i, name, [cells[i] for cells in lines if i < len(cells)]) for i, name in enumerate(columns)]
    heads = [element("th", _sorter(name), scope="col", class_=kinds[i]) for i, name in enumerate(columns)]
    rows = []
    for order, (cells, words) in enumerate(zip(lines, texts(table), strict=True)):
        made = []
        for i, (cell, text) in enumerate(zip(cells, words, strict=False)):
            value = spread_of(cell)
            seeds = f"n = {value.n}" if value is not None else None
            name, scope = ("th", "row") if i == 0 else ("td", None)
            sort = order if i == 0 else _sort_key(cell, text)
            made.append(
                element(
                    name, unbroken(text) if i == 0 else text, scope=scope, class_=kinds[i], data_value=sort, title=seeds
                )
            )
        rows.append(element("tr", *made))
    title, note = str(table.get("title") or ""), table.get("note")
    return joined(
        element("h4", title) if title else None,
        _box(title or "Table", element("tr", *heads), rows, "sortable compact"),
        element("p", note, class_="note") if note else None,
    )


def _sort_key(cell: Any, text: str) -> object:
    value = spread_of(cell)
    if value is not None:
        return value.mean
    return float(cell) if isinstance(cell, (int, float)) and not isinstance(cell, bool) else text


def _kind(place: int, name: str, cells: Sequence[Any]) -> str | None:
    """The style of a column: the first one stays in view, the paper's differ from ours, and words are left-aligned."""
    classes = ["name"] if place == 0 else []
    classes += ["paper"] if is_papers(name) else []
    known = [cell for cell in cells if cell is not None]
    classes += ["text"] if known and all(isinstance(cell, str) for cell in known) else []
    return " ".join(classes) or None


def _box(name: str, head: object, rows: Sequence[Markup], kind: str) -> Markup:
    """Wide tables scroll in their box, so that the page does not.

    The box can have the focus, so that keys scroll it.
    """
    table = element("table", element("caption", name), element("thead", head), element("tbody", *rows), class_=kind)
    return element("div", table, class_="scroll", tabindex=0, role="region", aria_label=name)
