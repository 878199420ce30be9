"""Compiled code calls the ops of norms without torch's dispatcher."""

import copy
import re

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

from kalmannorm import ClosingPhase, convert
from kalmannorm._ops import inductor_calls

pytestmark = pytest.mark.inductor


def model_and_input():
    torch.manual_seed(0)
    x = torch.randn(4, 8, 6, 6)
    blocks = [[nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()] for _ in range(2)]
    return convert(nn.Sequential(*[layer for block in blocks for layer in block]), x, statistics_batch_size=2), x


def codes_and_gradients(model, x, **config):
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True)

    def step():
        compiled(x).square().sum().backward()

    with (
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._inductor.config.patch(fx_graph_cache=False, **config),
    ):
        _, codes = run_and_get_code(step)
    eager(x).square().sum().backward()
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
    return codes


def calls(code, op):
    """Direct calls of an op, and calls through the dispatcher."""
    direct = re.findall(rf"= kalmannorm_ops\['{op}'\]\(", code)
    return len(direct), len(re.findall(rf"= torch\.ops\.kalmannorm\.{op}\.default\(", code))


@pytest.mark.parametrize("op", ["normalize_rows", "settled"])
def test_compiled_code_calls_directly(op):
    model, x = model_and_input()
    if op == "settled":
        phase = ClosingPhase(model, steps=1, start=0.0, end=0.0)
        model(x).sum().backward()
        phase.step()
        model.zero_grad()
    forward, backward = codes_and_gradients(model, x)
    first = "settled" if op == "settled" else "normalize_rows_forward"
    assert calls(forward, first) == (2, 0)
    assert calls(backward, f"{op}_backward") == (2, 0)


def test_results_are_known_to_be_aligned():
    """Otherwise inductor's kernels read them value by value."""
    for code in codes_and_gradients(*model_and_input()):
        own = re.findall(r"buffer \w+ \(op: torch\.ops\.kalmannorm\.normalize_rows\w+\.default\) is assumed", code)
        assert "normalize_rows" in code and not own


def test_another_inductor_calls_through_the_dispatcher(monkeypatch):
    name = "kalmannorm::normalize_rows_forward"
    waiting = [name.split("::")[1]]
    monkeypatch.setattr(inductor_calls, "_WAITING", waiting)

    def changed():
        raise AttributeError("FallbackKernel")

    monkeypatch.setattr(inductor_calls, "_kernel", changed)
    op = torch.ops.kalmannorm.normalize_rows_forward.default
    monkeypatch.delitem(torch._inductor.lowering.lowerings, op, raising=False)
    forward, _ = codes_and_gradients(*model_and_input())
    assert calls(forward, "normalize_rows_forward") == (0, 2) and not waiting
