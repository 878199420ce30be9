"""The README's code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

README = Path(__file__).parents[1] / "README.md"


def test_python_blocks_run():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    scope = {
        "conv1": nn.Conv2d(3, 64, 3),
        "conv2": nn.Conv2d(64, 128, 3),
        "x": torch.randn(4, 3, 8, 8),
    }
    for block in blocks:
        exec(block, scope)
    assert scope["y"].shape == (4, 128, 4, 4)
    assert scope["norm2"].transition is not None


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8")):
        assert "://" in target or (README.parent / target).exists(), target
