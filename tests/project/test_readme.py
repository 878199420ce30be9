"""The code of the README and of the guides runs as it stands."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

import kalmannorm

README = Path(__file__).parents[2] / "README.md"
RESULTS = README.parent / "docs" / "results.md"
RECORDS = README.parent / "docs" / "figures" / "records"


def run_blocks(path, scope=None):
    scope = {} if scope is None else scope
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, scope)
    return scope


def test_the_readme_runs():
    scope = run_blocks(README)
    x = torch.randn(2, 3, 64, 64)
    assert type(scope["plain"]) is type(scope["model"]) is torchvision.models.ResNet
    torch.testing.assert_close(scope["plain"](x), scope["model"].eval()(x), rtol=1e-3, atol=1e-4)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in scope["plain"].modules())


def test_the_guide_to_wiring_by_hand_runs():
    scope = run_blocks(README.parent / "docs" / "by-hand.md")
    assert scope["y"].shape == (4, 128, 28, 28)
    assert scope["norm2"].gain.requires_grad


def anchors(page):
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [README, *sorted(README.parent.glob("docs/*.md"))], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert "://" in link or target.exists(), link
        if target.suffix == ".svg":  # GitHub and the site show one figure of a pair
            assert anchor in ("gh-light-mode-only", "gh-dark-mode-only"), link
            continue
        assert not anchor or anchor in anchors(target), link


def test_pictures_of_the_readme_exist():
    found = re.findall(r'(?:src|srcset)="([^"]+)"', README.read_text(encoding="utf-8"))
    assert len(found) >= 2
    assert not [name for name in found if not (README.parent / name).is_file()]


def test_the_table_of_8_epochs_is_what_the_records_say():
    records = [json.loads(line) for line in (RECORDS / "cifar10.jsonl").read_text().splitlines()]
    text = RESULTS.read_text(encoding="utf-8")
    for label, (method, m) in {
        "batch norm (128, 128)": ("BN", 128),
        "batch norm (128, 2)": ("BN", 2),
        "group norm, warmed up": ("GN warmed up", 128),
        "BKN learned (128, 2)": ("BKN learned", 2),
        "BKN (128, 2)": ("BKN weights", 2),
    }.items():
        own = [r["accuracy"] for r in records if (r["method"], r["statistics_batch"]) == (method, m)]
        assert len(own) == 3
        scores = [[accuracy[mode] for accuracy in own] for mode in own[0]]
        cells = [f"{statistics.mean(each):.1f} ± {statistics.stdev(each):.1f}" for each in scores]
        assert f"| {label} | 3 | {' | '.join(cells)} |" in text


def test_the_table_of_30_epochs_is_what_the_records_say():
    """The same in README and in the page for deciding."""
    lines = (README.parent / "trials" / "records" / "table3.jsonl").read_text(encoding="utf-8").splitlines()
    records = [row for row in map(json.loads, lines) if row["loss"] is not None]
    for label, wanted in {
        "batch norm (128, 128)": {"kind": "ghost", "m": 128, "filters": "plain", "closing": False},
        "**BKN learned (128, 2)**": {"kind": "kalman", "transition": "learned"},
        "**BKN (128, 2)**": {"kind": "kalman", "transition": "weights", "closing": False},
        "**BKN (128, 2), recipe**": {"kind": "kalman", "filters": "scaled"},
    }.items():
        own = [row for row in records if wanted.items() <= row["form"].items()]
        cells = {}
        for data in ("cifar10", "cifar100"):
            found = [row["test"]["population"] for row in own if row["cell"] == data]
            assert len(found) == 3
            cells[data] = f"{statistics.mean(found):.1f} ± {statistics.stdev(found):.1f}"
        for page in (README, README.parent / "docs" / "should-i-use-it.md"):
            row = next(
                line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {label} |")
            )
            assert row.split(" | ")[1:5:2] == list(cells.values())


@pytest.mark.parametrize("page", [README, *sorted(README.parent.glob("docs/*.md"))], ids=lambda page: page.name)
def test_functions_that_a_page_names_exist(page):
    """In words and tables too, where no code runs."""
    named = set(re.findall(r"(?<![\w/])kalmannorm\.([a-zA-Z]\w*)\(", page.read_text(encoding="utf-8")))
    assert not [name for name in named if not hasattr(kalmannorm, name)]
