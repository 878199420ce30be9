"""A record names the command that made it, so that it can be repeated from the root of a checkout."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kalmannorm.lab.machine.origin import command

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("script", ["docs/figures/measure.py", "benchmarks/graphed.py"])
def test_a_script_of_the_checkout_is_named_with_its_folder(monkeypatch, script):
    monkeypatch.setattr(sys, "argv", [str(ROOT / script), "sizes"])
    assert command() == f"python {script} sizes"
