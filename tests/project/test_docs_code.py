"""Every Python block of the documentation runs as it stands, in the order of its page.

A guide may speak of a `model` and an input `x` without building them. `GIVEN` builds what such a page supposes.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"

NET = """
import copy
import kalmannorm, torch
from torch import nn
from torch.nn import functional as F
x = torch.randn(2, 3, 16, 16)
def net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )
model = net()
"""
PARTS = """
class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.roi_heads = nn.Sequential(*net()[:6]), nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    def forward(self, x):
        return self.roi_heads(self.body(x).mean((2, 3)))
def fresh():
    global model, example_input
    model, example_input = Detector(), x
"""
EXPERTS = """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = net()[:3], net()[:3], nn.Sequential(nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4))
    def forward(self, x, expert="expert a", task=1):
        return self.head(self.a(x) if expert == "expert a" else self.b(x))
model = Experts()
"""
GIVEN = {
    "conversion.md": [NET + "example_input = x", NET + PARTS + "fresh()", EXPERTS],
    "deployment.md": [NET],
    "memory.md": [NET],
    "performance.md": [
        NET,
        NET + "batches = [(x, torch.tensor([0, 1]))]\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
    ],
    "recipe.md": [
        NET + "net, steps, images = net(), 50, torch.randn(4, 3, 16, 16)\n"
        "batches = [(images, torch.tensor([0, 1, 2, 3]))] * steps\n" + "start = copy.deepcopy(net)",
        "model = kalmannorm.convert(start, images, statistics_batch_size=2, weight_standardization=True)\n"
        "optimizer = torch.optim.SGD(\n"
        "    kalmannorm.parameter_groups(model, weight_decay=1e-3), lr=0.1, momentum=0.9, nesterov=True\n)\n"
        "schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)\n"
        "phase = kalmannorm.ClosingPhase(model, steps, start=0.02, end=0.12, fade_prior=True)",
    ],
    "statistics.md": [
        NET + "model = kalmannorm.convert(model, x)\nloss = F.cross_entropy\n"
        "micro_batches = [(x, torch.tensor([0, 1]))]\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        "batches, steps, loss_of = micro_batches, 4, loss",
    ],
}
"""For some blocks of a page, the code that runs before: the n-th entry runs before the n-th block."""
NEEDS_A_GPU = "torch.cuda."
PAGES = sorted(page.name for page in DOCS.glob("*.md") if "```python\n" in page.read_text(encoding="utf-8"))


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.filterwarnings("ignore")  # of the packages that the pages show
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": page}
    given = GIVEN.get(page, [])
    for number, block in enumerate(blocks(DOCS / page)):
        if NEEDS_A_GPU in block and not torch.cuda.is_available():
            continue
        if number < len(given):
            exec(given[number], scope)
        exec(compile(block, page, "exec"), scope)
