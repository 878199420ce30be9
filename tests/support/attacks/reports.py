"""Random damage to the files of a folder of runs and an experiment, as a crash, an editor or an enemy might leave it.

Each attack spoils files of one to five of eight runs. Bytes are cut or changed. Values become of another type, huge,
deeply nested, or HTML. Drawings bring scripts, and folders get hostile names. A report must be written of what is left.
It has to be one page in which nothing runs but the page's own script, beside drawings in which nothing runs. It has to
name every run and experiment that was certainly spoiled.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sys
import traceback
from collections.abc import Callable
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

from kalmannorm.lab.files import manifest
from kalmannorm.lab.files.records import Run
from kalmannorm.lab.files.shapes import plain_text
from kalmannorm.lab.recipes.recipe import Recipe
from kalmannorm.lab.report import plotting
from kalmannorm.lab.report.collecting import collect
from kalmannorm.lab.report.writing import summarize_collected, write_collected
from support.report_runs import make_analysis, make_experiment, make_run

MUST_BE_ZERO = ("tracebacks", "scripts", "unnamed")

DRAWN = 0.02
"""The share of images that are really drawn: matplotlib takes longer than all the rest."""
FILES = ("recipe.json", "result.json", "log.jsonl", "wiring.svg", "analysis/layers.json", "analysis/variance-gap.json")
DEEP = '{"a":[' * 2000 + "1" + "]}" * 2000
HTML = (
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    '"><img src=x onerror=alert(3)>',
    "' onmouseover='alert(4)",
    "<svg onload=alert(5)>",
    "javascript:alert(6)",
    "</title></style><iframe src=javascript:alert(7)>",
    "<!--",
    "]]>",
    "&lt;script&gt;",
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7.5, 101, 1e308, -1e308, 5e-324, 10**18, 10**30, 10**400),
    *(
        float("nan"),
        float("inf"),
        float("-inf"),
        "",
        "x",
        "x" * 5000,
        "$x$ \\frac",
        "\ud800",
        "\x00\x1b[31m",
        "名前 🙂",
    ),
    *([], {}, [[]], [None], {"mean": "x"}, {"": {}}, "@DEEP@", *HTML),
)
SHAPES = (
    "<script>alert(1)</script>",
    '<script href="data:text/javascript,alert(2)"/>',
    '<x:script xmlns:x="http://www.w3.org/2000/svg">alert(3)</x:script>',
    '<foreignObject><p xmlns="http://www.w3.org/1999/xhtml" onload="alert(4)"><script>5</script></p></foreignObject>',
    '<a href="javascript:alert(6)"><text x="1" onclick="alert(7)">go</text></a>',
    '<a xmlns:l="http://www.w3.org/1999/xlink" l:href="javascript:alert(8)"><rect width="9" height="9"/></a>',
    '<rect width="5" height="5" onload="alert(9)" style="background:url(javascript:alert(10))" fill="url(http://x/)"/>',
    '<set attributeName="onmouseover" to="alert(11)"/><animate onbegin="alert(12)"/>',
    '<use href="data:image/svg+xml,&lt;svg onload=alert(13)/&gt;"/><image href="x" onerror="alert(14)"/>',
    "<style>* { background: url(javascript:alert(15)) }</style>",
    "<text>&lt;script&gt;alert(16)&lt;/script&gt;<![CDATA[</svg><script>alert(17)</script>]]></text>",
    '<text id="&quot;><script>alert(18)</script>" class="&apos; onload=alert(19)">x</text>',
    "<?php alert(20) ?><!-- <script>alert(21)</script> -->",
    '<iframe src="javascript:alert(22)"/><handler>alert(23)</handler>',
)


def run(count: int, seed: int, folder: Path) -> dict[str, int]:
    template = _template(folder / "template")
    clean = _scripts(_written(template, folder / "clean.html", random.Random(0))[0])
    assert len(clean) == 2
    counts = dict.fromkeys(("reports", "left_out", *MUST_BE_ZERO), 0)
    for number in range(count):
        attack(number, seed, template, folder / "attacked", clean, counts)
    return counts


def attack(number: int, seed: int, template: Path, home: Path, clean: list[str], counts: dict[str, int]) -> None:
    """Repeatable by itself, from the seed and its number."""
    rng = random.Random(f"{seed} {number}")
    shutil.rmtree(home, ignore_errors=True)
    runs = shutil.copytree(template, home / "runs")
    done, spoiled = _damage(runs, rng)

    def failed(kind: str, why: str) -> None:
        counts[kind] += 1
        print(f"reports: attack {number} of seed {seed}, after {', '.join(done)}: {why}", file=sys.stderr)

    try:
        page, told = _written(runs, home / "report.html", rng)
    except Exception:  # whatever it is: that is what is counted
        failed("tracebacks", traceback.format_exc())
        return
    counts["reports"] += 1
    counts["left_out"] += len(told)
    for why in (*_live(page, clean), *_live_drawings(home / "report-figures")):
        failed("scripts", why)
    for place in spoiled:
        if not any(plain_text(str(place)) in line for line in told):
            failed("unnamed", f"{place} is named in none of {told}")
    for line in told:
        if escape(line.partition(" ")[2][:20]) not in page.replace("<strong>", "").replace("</strong>", ""):
            failed("unnamed", f"the page does not hold {line}")


def _template(folder: Path) -> Path:
    for method, seed in (("bn", 0), ("bn", 1), ("bkn", 0), ("bkn", 1), ("gn", 0)):
        make_run(folder / f"{method}-{seed}", Recipe(method=method, statistics_batch=2, epochs=3, seed=seed))
    make_experiment(folder / "experiment", seeds=1)
    for analysis in folder.rglob("analysis"):  # small ones: an attack is quick
        make_analysis(analysis.parent, Run.read(analysis.parent).recipe, batches=5)
    return folder


def _written(runs: Path, page: Path, rng: random.Random) -> tuple[str, list[str]]:
    """The page, and what the command says on stderr. A few images are drawn, the others are empty."""
    told: list[str] = []
    draw = plotting.images

    def seldom(chart: Any, title: str) -> dict[str, bytes]:
        return draw(chart, title) if rng.random() < DRAWN else {}

    with patch.object(plotting, "images", seldom), patch("os.fsync"):  # a disk that loses power is not tested here
        collected = collect([runs])
        write_collected(collected, page, figures=page.with_name(f"{page.stem}-figures"), tell=told.append)
    json.dumps(summarize_collected(collected))
    return page.read_text(encoding="utf-8"), told


def _damage(runs: Path, rng: random.Random) -> tuple[list[str], list[Path]]:
    """What was done, and the places that a report has to name for it."""
    done: list[str] = []
    spoiled: dict[Path, bool] = {}
    spoiled_files: set[Path] = set()
    homes = sorted(path.parent for path in runs.rglob("recipe.json"))
    if rng.random() < 0.3:  # in all of them: the page shows the first that it can read
        for path in runs.rglob("wiring.svg"):
            _hostile_drawing(path, rng)
        done.append("hostile drawings everywhere")
    for home in rng.sample(homes, rng.randint(1, 5)):
        if rng.random() < 0.1:
            home = _renamed(home, rng)
        files = [home / name for name in FILES if (home / name).is_file()]
        path = rng.choice([*files, runs / "experiment" / "experiment.json"])
        if path in spoiled_files:
            continue
        spoiled_files.add(path)
        way = rng.choice(WAYS[path.suffix])
        certain = way(path, rng)
        place = "runs" / path.relative_to(runs)
        done.append(f"{way.__name__.strip('_')} of {place}")
        owner = path.parent.parent if path.parent.name == "analysis" else path.parent
        spoiled["runs" / owner.relative_to(runs)] = spoiled.get("runs" / owner.relative_to(runs), False) or certain
    present = {"runs" / path.parent.relative_to(runs) for path in runs.rglob("*.json") if path.exists()}
    return done, [place for place, certain in spoiled.items() if certain and place in present]


def _renamed(home: Path, rng: random.Random) -> Path:
    name = rng.choice([*HTML, "line\nbreak", os.fsdecode(b"\xff\xfe"), "x" * 200, "\x1b[31m"])
    target = home.with_name(name.replace("/", "-"))
    return home if target.exists() else home.rename(target)


Way = Callable[[Path, random.Random], bool]
"""Spoils a file, and says whether a report must name it for that."""


def _cut(path: Path, rng: random.Random) -> bool:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content) // 2)])
    return path.suffix in (".json", ".svg")


def _changed_bytes(path: Path, rng: random.Random) -> bool:
    content = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 20)):
        content[rng.randrange(len(content))] = rng.randrange(256)
    path.write_bytes(content)
    return False


def _other_content(path: Path, rng: random.Random) -> bool:
    path.write_bytes(
        rng.choice([b"", b"[]", b"null", b"\xff\xfe", bytes(1000), b"1" * 5000, DEEP.encode(), b'"\\ud800"'])
    )
    return path.suffix in (".json", ".svg")


def _other_kind(path: Path, rng: random.Random) -> bool:
    """Gone, a folder, or a link to nowhere."""
    path.unlink()
    kind = rng.randrange(3)
    if kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to("nowhere")
    return False


def _other_values(path: Path, rng: random.Random) -> bool:
    record = json.loads(path.read_text(encoding="utf-8"))
    for _ in range(rng.randint(1, 4)):
        _spoil(record, rng)
    path.write_text(json.dumps(record).replace('"@DEEP@"', DEEP), encoding="utf-8")
    return False


def _spoil(record: Any, rng: random.Random) -> None:
    """Somewhere in it, another value, another name, or nothing."""
    while True:
        places = list(record) if isinstance(record, dict) else list(range(len(record)))
        if not places:
            return
        place = rng.choice(places)
        if isinstance(record[place], (dict, list)) and record[place] and rng.random() < 0.8:
            record = record[place]
            continue
        value = rng.choice(VALUES)
        if rng.random() < 0.15:
            del record[place]
        elif isinstance(record, dict) and rng.random() < 0.2:
            record[str(value)[:300]] = record.pop(place)
        else:
            record[place] = value
        return


def _other_lines(path: Path, rng: random.Random) -> bool:
    lines = path.read_text(encoding="utf-8").splitlines()
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(lines) - 1)
        event = json.loads(lines[place]) if lines[place].startswith('{"event"') else {"event": "train"}
        _spoil(event, rng)
        lines[place] = rng.choice(
            [json.dumps(event).replace('"@DEEP@"', DEEP), *HTML, DEEP, "{", "", "7", '{"event": []}']
        )
    lines.insert(0, "no event")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return True


def _hostile_drawing(path: Path, rng: random.Random) -> bool:
    inside = "".join(rng.choices(SHAPES, k=rng.randint(1, 6)))
    depth = rng.choice([0, 3, 60, 5000])
    head = rng.choice(["", '<?xml version="1.0" encoding="utf-16"?>', "<!DOCTYPE svg [<!ENTITY e '<script/>'>]>"])
    inside = "<g>" * depth + inside + "</g>" * depth
    path.write_text(f'{head}<svg xmlns="http://www.w3.org/2000/svg" onload="alert(0)">{inside}</svg>', encoding="utf-8")
    return depth > 50 or "DOCTYPE" in head


def _other_manifest(path: Path, rng: random.Random) -> bool:
    """Beside the file, one whose own digest is right and whose entries are none."""
    files = rng.choice([[], None, 7, {path.name: {}}, {path.name: "x"}, {path.name: {"bytes": 1, "sha256": []}}])
    path.with_name(manifest.NAME).write_bytes(manifest.sealed({"format": 1, "files": files}))
    return True


_ANY: tuple[Way, ...] = (_cut, _changed_bytes, _other_content, _other_kind)
WAYS: dict[str, tuple[Way, ...]] = {
    ".json": (*_ANY, _other_manifest, *(_other_values,) * 6),
    ".jsonl": (*_ANY, *(_other_lines,) * 3),
    ".svg": (*_ANY, *(_hostile_drawing,) * 4),
}

_PLAIN = {
    *("html", "head", "meta", "title", "style", "script", "body", "header", "nav", "main", "section", "footer"),
    *("a", "p", "span", "div", "button", "noscript", "h1", "h2", "h3", "h4", "h5", "ul", "li", "dl", "dt", "dd"),
    *("strong", "code", "sup", "details", "summary", "table", "caption", "thead", "tbody", "tr", "th", "td"),
    *("figure", "figcaption"),
    *("svg", "g", "defs", "marker", "path", "rect", "line", "circle", "text", "tspan"),
}


class _Reader(HTMLParser):
    """What a browser would find: elements, attributes and scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []
        self.scripts: list[str] = []
        self.tags: list[str] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in _PLAIN:
            self.wrong.append(f"the page holds <{tag}>")
        for name, value in attrs:
            target = value or ""
            if name.startswith("on") or name in ("src", "style", "srcdoc", "formaction"):
                self.wrong.append(f"<{tag}> has {name}={target!r}")
            if name.endswith("href") and not re.match(r"#|[\w-]+-figures/[\w.-]+$", target):
                self.wrong.append(f"<{tag}> leads to {target!r}")
        self.inside = tag == "script" and ("type", "application/json") not in attrs
        if self.inside:
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.scripts[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self.inside = False


def _scripts(page: str) -> list[str]:
    reader = _Reader()
    reader.feed(page)
    return reader.scripts


def _live(page: str, clean: list[str]) -> list[str]:
    """What could run in the page, besides its own script; and whether it is one page."""
    reader = _Reader()
    reader.feed(page)
    wrong = reader.wrong
    if reader.scripts != clean:
        wrong.append(f"the page holds {len(reader.scripts)} scripts, or others than its own")
    if reader.tags.count("html") != 1 or reader.tags.count("body") != 1 or not page.rstrip().endswith("</html>"):
        wrong.append("that is not one page")
    return wrong


def _live_drawings(folder: Path) -> list[str]:
    wrong = []
    for path in folder.glob("*.svg"):
        try:
            nodes = list(ElementTree.fromstring(path.read_text(encoding="utf-8")).iter())
        except ElementTree.ParseError as error:
            wrong.append(f"{path.name} is no drawing: {error}")
            continue
        for node in nodes:
            name = node.tag.rpartition("}")[2].lower()
            if name in ("script", "foreignobject", "handler", "iframe", "set", "animate", "a"):
                wrong.append(f"{path.name} holds <{name}>")
            for key, value in node.attrib.items():
                link = key.endswith("href") and not value.startswith(("#", "data:image/png;base64,"))
                if key.rpartition("}")[2].lower().startswith("on") or link or "javascript:" in value:
                    wrong.append(f"{path.name}: <{name}> has {key}={value!r}")
    return wrong
