"""Copies drawings from files, as shapes and text only. Everything else in a file, such as a script, is dropped.

A drawing becomes part of the page, or a separate file beside it. Both contain only what was copied here.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from kalmannorm.lab.errors import LabError
from kalmannorm.lab.report.markup import Markup, element

_ELEMENTS = {"svg", "g", "defs", "marker", "path", "rect", "line", "circle", "text", "tspan", "title"}
_ATTRIBUTES = {
    *("class", "d", "fill", "stroke", "stroke-opacity", "stroke-width", "marker-end", "id", "orient", "viewBox"),
    *("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "rx", "width", "height", "markerWidth", "markerHeight"),
    *("refX", "refY", "text-anchor", "font-size", "font-weight", "font-family"),
}
_REFERENCE = re.compile(r"url\(#([\w-]+)\)")
_DEEPEST = 50
"""Our own drawings nest four elements."""


def read(path: Path) -> Element:
    """The drawing in a file. It is not safe to show yet."""
    try:
        source = path.read_text(encoding="utf-8")
        if "<!DOCTYPE" in source or "<!ENTITY" in source:
            raise LabError(f"{path} is not a plain drawing: it defines entities")
        root = ElementTree.fromstring(source)
    except (OSError, ValueError, ElementTree.ParseError) as error:
        raise LabError(f"{path} is damaged ({error})") from None
    if _name(root) != "svg":
        raise LabError(f"{path} is not a drawing")
    layer, depth = [root], 0
    while layer:
        layer, depth = [child for node in layer for child in node], depth + 1
        if depth > _DEEPEST:
            raise LabError(f"{path} is not a drawing: it nests more than {_DEEPEST} elements")
    return root


def inlined(root: Element, number: int) -> Markup:
    """The drawing as part of an HTML page, with unique ids."""
    copy = _copied(root, f"wiring-{number}-")
    assert copy is not None
    return copy


def standalone(root: Element) -> str:
    """The drawing as a file."""
    copy = _copied(root, "", xmlns="http://www.w3.org/2000/svg")
    assert copy is not None
    return f"{copy}\n"


def _name(node: Element) -> str:
    return node.tag.rpartition("}")[2]


def _copied(node: Element, prefix: str, **attributes: str) -> Markup | None:
    if _name(node) not in _ELEMENTS:
        return None
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
    return element(_name(node), *parts, **attributes)
