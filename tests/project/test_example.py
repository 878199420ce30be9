"""The example runs as it stands, and the net it ships is plain torch."""

from __future__ import annotations

import runpy
from pathlib import Path

from torch import nn


def test_the_own_loop_trains_and_ships(capsys):
    plain = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "own_loop.py"))["main"](epochs=2)
    lines = capsys.readouterr().out.splitlines()
    assert not any(isinstance(module, nn.BatchNorm2d) for module in plain.modules())
    *_, population, folded = [line.split(": ")[-1] for line in lines]
    assert population == folded
    assert float(folded.removesuffix(" %")) > 70
