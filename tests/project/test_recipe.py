"""docs/recipe.md is the form that was scored on test images."""

from __future__ import annotations

import json
import math

import pytest
import torch
from sklearn.datasets import load_digits
from test_docs_code import DOCS, GIVEN, blocks
from torch import nn
from torch.nn import functional as F

import kalmannorm
from trials.forms import Form
from trials.rounds import RECIPE
from trials.table import RECORDS, setting_of
from trials.training import MOMENTUM


def settings():
    """Those of BKN in the records, by m. The rate, the decay and the batch are those of Tiny-ImageNet."""
    names = {2: "confirm-filters", 1: "confirm-gain"}
    lines = {m: (RECORDS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines() for m, name in names.items()}
    found = [(m, setting_of(row)) for m, own in lines.items() for row in map(json.loads, own)]
    return {m: each for m, each in found if (each.cell, each.form.kind, each.form.m) == ("tiny100", "kalman", m)}


def sized(block, m):
    """The code of the page for this m, with what its comment says for m = 1."""
    assert f"# m = 1: statistics_batch_size=1, gain={RECIPE[1].gain}." in block
    return block.replace("net, images, statistics_batch_size=2", f"net, images, {converting(m)}")


def converting(m):
    gain = RECIPE[m].gain
    return f"statistics_batch_size={m}" + ("" if gain is None else f", gain={gain}")


@pytest.mark.parametrize("m", [2, 1])
def test_the_recipe_is_the_form_that_was_confirmed(m):
    setting = settings()[m]
    assert setting.form == RECIPE[m] and setting.batch == 128
    block, accumulated = blocks(DOCS / "recipe.md")
    scope: dict = {}
    exec(GIVEN["recipe.md"][0], scope)
    exec(sized(block, m), scope)
    phase, optimizer, model = scope["phase"], scope["optimizer"], scope["model"]
    form = setting.form
    assert (phase.start, phase.end) == form.close and phase.top == form.top and phase.present == 0
    assert phase.fade_prior == (form.fade == 1) and phase.settled
    for group in optimizer.param_groups:
        assert (group["momentum"], group["nesterov"], group["initial_lr"]) == (MOMENTUM, True, setting.rate)
        assert group["lr"] == pytest.approx(0, abs=1e-12), "it falls to 0"
    assert {group["weight_decay"] for group in optimizer.param_groups} == {setting.decay, 0}
    norms = [module for module in model.modules() if isinstance(module, kalmannorm.BatchKalmanNorm)]
    assert len(norms) == 2 and {norm.statistics_batch_size for norm in norms} == {m}
    assert all(norm.closing.fades for norm in norms)
    converted: dict = {"images": scope["images"], "net": net().float(), "kalmannorm": kalmannorm}
    exec(next(line for line in sized(block, m).splitlines() if line.startswith("model =")), converted)
    gains = [getattr(norm, "gain_logit", None) for norm in converted["model"].modules()]
    starts = [gain.sigmoid().item() for gain in gains if gain is not None]
    assert starts == pytest.approx([0.5 if form.gain is None else form.gain] * len(starts), rel=1e-5) and starts
    again = dict(scope)
    exec(GIVEN["recipe.md"][1].replace("statistics_batch_size=2", converting(m)), again)
    exec(accumulated, again)  # with micro-batches the same weights are trained
    for mine, theirs in zip(again["model"].parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-4)
    images = scope["images"]
    torch.testing.assert_close(scope["plain"](images), model(images), rtol=1e-3, atol=1e-4)
    for index in (0, 3):
        filters = kalmannorm.to_batchnorm(model)[index].weight.flatten(1)
        torch.testing.assert_close(filters.mean(1), torch.zeros(8), rtol=0, atol=1e-6)
        torch.testing.assert_close(filters.norm(dim=1), torch.ones(8), rtol=1e-2, atol=0)


def net():
    torch.manual_seed(0)
    norm = {"eps": 1e-14, "momentum": 0.5}  # so that a factor of the filters is removed, and the past soon forgotten
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6, **norm), nn.ReLU(),
        nn.Conv2d(6, 8, 3, bias=False), nn.BatchNorm2d(8, **norm), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    ).double()  # fmt: skip


@pytest.mark.parametrize("m", [2, 1])
def test_convert_trains_as_the_form_of_the_trials(m):
    """The trials have no factor 1 / sqrt(n) in their filters. A whole training gives the same weights."""
    steps = 120
    torch.manual_seed(1)
    batches = [(torch.randn(8, 3, 8, 8).double(), torch.randint(3, (8,))) for _ in range(steps)]
    form = Form(**{**vars(RECIPE[m]), "close": (0.4, 0.6)})
    tried = net()
    phases = [form.apply(tried, batches[0][0], steps)]
    gain = {} if form.gain is None else {"gain": form.gain}
    model = kalmannorm.convert(net(), batches[0][0], statistics_batch_size=m, weight_standardization=True, **gain)
    phases.append(kalmannorm.ClosingPhase(model, steps, start=0.4, end=0.6, fade_prior=True))
    for each, phase in zip((tried, model), phases, strict=True):
        optimizer = torch.optim.SGD(kalmannorm.parameter_groups(each, 1e-3), lr=0.1, momentum=0.9, nesterov=True)
        for x, target in batches:
            loss = F.cross_entropy(each(x), target)
            loss.backward()
            optimizer.step()
            phase.step()
            optimizer.zero_grad()
        assert phase.settled and math.isfinite(loss.item())
    x = torch.randn(8, 3, 8, 8).double()
    torch.testing.assert_close(tried.eval()(x), model.eval()(x), rtol=1e-6, atol=1e-8)
    for index in (0, 3):
        weight = dict(model[index].named_parameters())["weight"]
        torch.testing.assert_close(weight, tried[index].parametrizations.weight.original, rtol=1e-6, atol=1e-8)


def test_a_short_training_does_not_diverge():
    """300 steps on digits at m = 2, here the first 120. If λ rises in 30 of them, this seed ends with NaN."""
    digits, labels = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
    digits = ((digits - digits.mean()) / digits.std()).float().view(-1, 1, 8, 8)
    torch.manual_seed(4)
    layers = [
        part
        for number, (before, width) in enumerate([(1, 16), (16, 16), (16, 16), (16, 32), (32, 32), (32, 32)])
        for part in (
            nn.Conv2d(before, width, 3, padding=1, stride=1 + (number == 3), bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )
    ]
    made = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    model = kalmannorm.convert(made, digits[:4], statistics_batch_size=2, weight_standardization=True)
    groups = kalmannorm.parameter_groups(model, weight_decay=1e-3)
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=300)
    phase = kalmannorm.ClosingPhase(model, 300, start=0.02, end=0.12, fade_prior=True)
    losses = []
    for _ in range(120):
        chosen = torch.randint(0, 1400, (128,))
        loss = F.cross_entropy(model(digits[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()
        schedule.step()
        phase.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert phase.strength == 1 and max(losses[100:]) < 1, losses
