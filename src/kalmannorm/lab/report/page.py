"""The page: one file with tables and text as HTML, and charts as data for its script. It loads nothing else.

A content security policy allows only this script and this style, by their hashes, and no network.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.resources import files
from string import Template
from urllib.parse import quote

import kalmannorm
from kalmannorm.lab.report import costs, curves, experiments, gains, gaps, palette, priors
from kalmannorm.lab.report.charts import Figure
from kalmannorm.lab.report.collecting import Damaged
from kalmannorm.lab.report.comparison import Chapter, Comparison
from kalmannorm.lab.report.glossary import glossary
from kalmannorm.lab.report.markup import Markup, element, joined, text
from kalmannorm.lab.report.runlist import run_list
from kalmannorm.lab.report.sentences import findings, on_gains, on_speed, what
from kalmannorm.lab.report.svg import inlined
from kalmannorm.lab.report.tables import results, settings_line
from kalmannorm.lab.report.wiring import drawings
from kalmannorm.lab.words.wording import counted, unbroken

_STYLES = ("base.css", "tables.css", "charts.css")
_SCRIPTS = (
    *("tools.js", "scales.js", "frame.js", "curves.js", "bars.js", "scatter.js", "heatmap.js"),
    *("figure.js", "tables.js", "main.js"),
)
Item = Markup | Figure


@dataclass(frozen=True)
class Topic:
    title: str
    items: list[Item]


@dataclass(frozen=True)
class Content:
    chapters: list[tuple[Chapter, list[Topic]]]
    damaged: Sequence[Damaged]

    @property
    def figures(self) -> list[Figure]:
        items = [item for _, topics in self.chapters for topic in topics for item in topic.items]
        return [item for item in items if isinstance(item, Figure)]


def content(chapters: Sequence[Chapter], damaged: Sequence[Damaged]) -> Content:
    """All topics of the page, without the wiring and the list of runs."""
    made = [(chapter, _topics(chapter, f"{i + 1}-" if len(chapters) > 1 else "")) for i, chapter in enumerate(chapters)]
    return Content(made, damaged)


def _topics(chapter: Chapter, prefix: str) -> list[Topic]:
    """`prefix` makes the file names of figures unique."""
    topics = []
    if chapter.experiment is not None:
        record = chapter.experiment.record
        drawn = experiments.figures(chapter, f"{prefix}experiment")
        told = [_warned(chapter), experiments.introduction(record), experiments.tables(record)]
        topics.append(Topic("Beside the paper", [*told, *drawn]))
    several = len(chapter.comparisons) > 1
    for i, comparison in enumerate(chapter.comparisons):
        tail, start = (f": {comparison.title}", f"{prefix}{i + 1}-") if several else ("", prefix)
        named = chapter.title != comparison.title and not several
        warned = None if chapter.experiment else _warned(chapter)
        topics += [Topic(topic.title + tail, topic.items) for topic in _comparison(comparison, start, named, warned)]
    return topics


def _comparison(comparison: Comparison, prefix: str, named: bool, warned: Markup | None) -> list[Topic]:
    speed, memory = costs.speed(comparison, f"{prefix}speed"), costs.memory(comparison, f"{prefix}memory")
    found: list[tuple[str, list[Item | None]]] = [
        (
            "Results",
            [
                element("p", what(comparison, named), class_="lead"),
                warned,
                element("ul", *(element("li", unbroken(said)) for said in findings(comparison)), class_="findings"),
                curves.against_setting(comparison, f"{prefix}accuracy"),
                results(comparison),
                settings_line(comparison),
            ],
        ),
        ("Training", [curves.along_training(comparison, f"{prefix}training")]),
        (
            "Gain",
            [
                *_said(on_gains(comparison)),
                gains.along_depth(comparison, f"{prefix}gain"),
                gains.along_training(comparison, f"{prefix}gain-training"),
            ],
        ),
        ("Variance gap", [gaps.variance_gap(comparison, f"{prefix}variance-gap")]),
        ("Prior and observation", [priors.prior_against_observed(comparison, f"{prefix}prior")]),
        ("Speed and memory" if memory else "Speed", [*_said(on_speed(comparison)), speed, memory]),
    ]
    topics = [Topic(title, [item for item in items if item is not None]) for title, items in found]
    return [topic for topic in topics if topic.items]


def _warned(chapter: Chapter) -> Markup:
    return joined(*(element("p", unbroken(said), class_="trouble") for said in chapter.warnings))


def _said(sentences: list[str]) -> list[Item | None]:
    return [element("p", unbroken(" ".join(sentences)), class_="said")] if sentences else []


def page(made: Content, figures: str | None) -> str:
    """The whole document. `figures` is the folder with the image files, beside the page."""
    single = len(made.chapters) == 1
    sections: list[Markup] = []
    links: list[tuple[str, str]] = []
    drawn: list[Figure] = []
    for i, (chapter, topics) in enumerate(made.chapters):
        parts: list[Markup] = []
        for j, topic in enumerate(topics):
            anchor = f"part-{i + 1}-{j + 1}"
            items = [_figure(item, drawn, figures) if isinstance(item, Figure) else item for item in topic.items]
            parts.append(element("section", element("h2" if single else "h3", topic.title), *items, id=anchor))
            links += [(topic.title, anchor)] if single else []
        if single:
            sections += parts
        else:
            links.append((chapter.title, f"chapter-{i + 1}"))
            sections.append(element("section", element("h2", chapter.title), *parts, id=links[-1][1], class_="chapter"))
    words = glossary([chapter for chapter, _ in made.chapters])
    if words is not None:  # after the first results, or before many
        place = 1 if single else 0
        sections.insert(place, element("section", element("h2", "Words"), words, id="words"))
        links.insert(place, ("Words", "words"))
    for title, body in (("Wiring", _wiring(made)), ("Every run", _runs(made))):
        if body is not None:
            anchor = title.lower().replace(" ", "-")
            sections.append(element("section", element("h2", title), body, id=anchor))
            links.append((title, anchor))
    title = made.chapters[0][0].title if single else "Comparison of normalizers"
    return _document(title, _heading(title, made), links, sections, drawn)


def _figure(figure: Figure, drawn: list[Figure], folder: str | None) -> Markup:
    drawn.append(figure)
    links: list[Markup] = []
    if folder is not None:
        # The script changes these links when the reader chooses another chart.
        image, place = figure.files[figure.start], quote(folder)
        links = [
            element("a", kind.upper(), href=f"{place}/{image}.{kind}", data_kind=kind, data_folder=place)
            for kind in ("png", "svg")
        ]
        links.append(element("a", "CSV", href=f"{place}/{figure.slug}.csv"))
    return element(
        "figure",
        element("div", element("h4", figure.title), element("div", *links, class_="files"), class_="head"),
        element("div", class_="plot"),
        element("figcaption", figure.caption),
        data_figure=len(drawn) - 1,
    )


def _wiring(made: Content) -> Markup | None:
    parts: list[Markup] = []
    for number, (title, drawing) in enumerate(drawings([chapter for chapter, _ in made.chapters])):
        label = f"Wiring of {title}"
        shown = inlined(drawing, number)
        box = element("div", shown, class_="scroll wiring", tabindex=0, role="region", aria_label=label)
        parts.append(element("details", element("summary", title), box, open=not parts))
    if not parts:
        return None
    lead = "An arrow goes from a norm to the norms after it. A norm's statistics are predicted from the norm before it."
    return joined(element("p", lead, class_="note"), *parts)


def _runs(made: Content) -> Markup:
    return run_list([run for chapter, _ in made.chapters for run in chapter.runs], made.damaged)


def _heading(title: str, made: Content) -> Markup:
    runs = [run for chapter, _ in made.chapters for run in chapter.runs]
    states = [(state, sum(run.state == state for run in runs)) for state in ("diverged", "unfinished", "repeated")]
    count = ", ".join([counted(len(runs), "run"), *(f"{number} {state}" for state, number in states if number)])
    kinds = Counter(broken.kind for broken in made.damaged)
    damage = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    when = datetime.now(timezone.utc).strftime("%d %B %Y, %H:%M UTC")
    rest = f" · kalmannorm {kalmannorm.__version__} · {when}"
    why = joined(", ", element("a", damage, href="#every-run")) if damage else None
    return joined(element("h1", title), element("p", count, why, rest, class_="muted"), _overview(made))


def _overview(made: Content) -> Markup | None:
    """For several chapters: the warnings and the first finding of each."""
    if len(made.chapters) < 2:
        return None
    items = []
    for i, (chapter, _) in enumerate(made.chapters):
        found = [said for comparison in chapter.comparisons for said in findings(comparison)]
        link = element("a", chapter.title, href=f"#chapter-{i + 1}")
        items.append(element("li", link, *(element("div", unbroken(said)) for said in [*chapter.warnings, *found[:1]])))
    return element("ul", *items, class_="overview")


def _document(
    title: str, heading: Markup, links: list[tuple[str, str]], sections: list[Markup], drawn: list[Figure]
) -> str:
    style = palette.css() + "".join(_part(name) for name in _STYLES)
    theme = _part("theme.js")
    script = '"use strict";\n(() => {\n' + "".join(_part(name) for name in _SCRIPTS) + "})();\n"
    data = json.dumps(
        {"figures": [figure.to_json() for figure in drawn], "looks": palette.looks()},
        separators=(",", ":"),
        allow_nan=False,
        ensure_ascii=False,  # "±" is two bytes, its escape is six
    )
    policy = (
        f"default-src 'none'; script-src {_hash(theme)} {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return Template(_part("template.html")).substitute(
        title=text(f"{title} · kalmannorm"),
        policy=policy,
        style=style,
        theme=theme,
        nav=joined(*(element("a", words, href=f"#{anchor}") for words, anchor in links)),
        heading=heading,
        main=joined(*sections),
        data=data.replace("<", "\\u003c"),  # no record can end the script element
        script=script,
    )


def _part(name: str) -> str:
    return (files("kalmannorm.lab.report") / "page" / name).read_text(encoding="utf-8")


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
