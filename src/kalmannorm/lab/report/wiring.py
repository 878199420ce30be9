"""The wiring drawings, one for every model and method. The wiring depends on nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from kalmannorm.lab.report.comparison import Chapter
from kalmannorm.lab.words.naming import title as title_of


def drawings(chapters: Sequence[Chapter]) -> list[tuple[str, Element]]:
    """Titles and drawings. If several runs have a drawing, the first is taken."""
    found: dict[str, Element] = {}
    for chapter in chapters:
        for comparison in chapter.comparisons:
            for run in comparison.runs:
                if run.drawing is not None:
                    found.setdefault(f"{comparison.model}, {title_of(run.run.recipe.method)}", run.drawing)
    return list(found.items())
