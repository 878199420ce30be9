"""Every run with what is needed to repeat it: command, versions, hardware, seed, commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kalmannorm.lab.machine.origin import in_words
from kalmannorm.lab.report.collecting import Damaged, Found
from kalmannorm.lab.report.markup import Markup, element, joined
from kalmannorm.lab.words.wording import duration, number, size

_FIRST = ("command", "hardware", "commit", "kalmannorm", "torch", "python")
_MANY = 12


def run_list(runs: Sequence[Found], damaged: Sequence[Damaged]) -> Markup:
    """Failed runs come first. A long list of finished runs is collapsed."""
    troubles = [
        element("p", d.kind.capitalize(), " ", element("strong", d.place), f": {d.message}", class_="trouble")
        for d in damaged
    ]
    odd = [run for run in runs if run.state != "finished"]
    rest = [run for run in runs if run.state == "finished"]
    listed = _list(rest)
    if len(rest) > _MANY:
        listed = element("details", element("summary", f"{len(rest)} finished runs"), listed)
    return joined(*troubles, _list(odd), listed)


def _list(runs: Sequence[Found]) -> Markup | None:
    return element("ul", *(element("li", _run(found)) for found in runs), class_="runs") if runs else None


def _run(found: Found) -> Markup:
    head = element(
        "summary",
        element("span", found.state, class_=f"state {found.state}"),
        element("span", found.place, class_="place"),
        element("span", _outcome(found), class_="outcome"),
    )
    record = found.run.record
    return element(
        "details",
        head,
        _facts(_numbers(found)),
        _facts(_ordered(record.get("origin") or {})),
        element("h4", "Recipe"),
        _facts(found.run.recipe.to_json()),
        element("h4", "Execution"),
        _facts(record.get("execution") or {}),
    )


def _outcome(found: Found) -> str:
    scores = [f"{mode} {number(value, 1)}" for mode, value in _accuracies(found).items()]
    if found.state == "unfinished":
        return progress(found)
    return " · ".join(scores)


def _accuracies(found: Found) -> dict[str, float]:
    scores = found.result.get("accuracy") or {}
    return {mode: value for mode, value in scores.items() if isinstance(value, (int, float))}


def progress(found: Found) -> str:
    """The progress of an unfinished run."""
    reached = max((event["epoch"] for event in found.events if "epoch" in event), default=0.0)
    return f"epoch {number(float(reached), 1)} of {found.run.recipe.epochs:g}"


def _numbers(found: Found) -> dict[str, Any]:
    result, facts = found.result, dict[str, Any]()
    if _accuracies(found):
        facts["test accuracy"] = _outcome(found)
    if result.get("seconds") is not None:
        facts["training time"] = duration(result["seconds"])
    for key in ("steps", "epochs", "images_per_second", "parameters"):
        if result.get(key) is not None:
            facts[key.replace("_", " ")] = f"{result[key]:g}" if key == "epochs" else number(result[key])
    if result.get("peak_memory") is not None:
        facts["peak memory"] = size(result["peak_memory"])
    return facts


def _ordered(origin: dict[str, Any]) -> dict[str, Any]:
    told = origin | ({"hardware": in_words(str(origin["hardware"]))} if origin.get("hardware") else {})
    return {key: told[key] for key in (*_FIRST, *(key for key in told if key not in _FIRST)) if key in told}


def _facts(values: dict[str, Any]) -> Markup | None:
    if not values:
        return None
    pairs = []
    for key, value in values.items():
        shown = "–" if value is None else value
        content = element("code", shown) if key in ("command", "commit") else shown
        pairs.append(element("div", element("dt", key.replace("_", " ")), element("dd", content)))
    return element("dl", joined(*pairs), class_="facts")
