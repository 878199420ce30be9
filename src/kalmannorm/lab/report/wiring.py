"""The drawing of who feeds whom, taken into the page: only shapes and words of it, so that a file cannot bring code."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from kalmannorm.lab.report.comparison import Chapter
from kalmannorm.lab.report.markup import Markup, element
from kalmannorm.lab.report.naming import title as title_of

_ELEMENTS = {"svg", "g", "defs", "marker", "path", "rect", "line", "circle", "text", "tspan", "title"}
_ATTRIBUTES = {
    *("class", "d", "fill", "stroke", "stroke-opacity", "stroke-width", "marker-end", "id", "orient", "viewBox"),
    *("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "rx", "width", "height", "markerWidth", "markerHeight"),
    *("refX", "refY", "text-anchor", "font-size", "font-weight", "font-family"),
}
_REFERENCE = re.compile(r"url\(#([\w-]+)\)")


def drawings(chapters: list[Chapter]) -> list[tuple[str, Path]]:
    """A title and a file for every model and method that has one: wiring depends on nothing else."""
    found: dict[str, Path] = {}
    for chapter in chapters:
        for comparison in chapter.comparisons:
            for run in comparison.runs:
                path = run.run.folder / "wiring.svg"
                title = f"{comparison.model}, {title_of(run.run.recipe.method)}"
                if title not in found and path.is_file():
                    found[title] = path
    return list(found.items())


def inlined(path: Path, number: int) -> Markup | None:
    """The drawing as part of an HTML page, with names of its own; None if it is no drawing."""
    try:
        source = path.read_text(encoding="utf-8")
        if "<!DOCTYPE" in source or "<!ENTITY" in source:
            return None
        root = ElementTree.fromstring(source)
    except (OSError, UnicodeDecodeError, ElementTree.ParseError):
        return None
    return _copied(root, f"wiring-{number}-") if root.tag.rpartition("}")[2] == "svg" else None


def _copied(node: ElementTree.Element, prefix: str) -> Markup | None:
    name = node.tag.rpartition("}")[2]
    if name not in _ELEMENTS:
        return None
    attributes = {}
    for key, value in node.attrib.items():
        if key in _ATTRIBUTES:
            reference = _REFERENCE.fullmatch(value)
            if "url(" in value and reference is None:
                continue
            value = f"url(#{prefix}{reference[1]})" if reference else prefix + value if key == "id" else value
            attributes[key] = value
    parts: list[object] = [node.text]
    for child in node:
        parts += [_copied(child, prefix), child.tail]
    return element(name, *parts, **attributes)
