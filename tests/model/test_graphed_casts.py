"""Gradients of weights that autocast has cast: graphs join them before they are cast back."""

from __future__ import annotations

import copy

import pytest
import torch

from kalmannorm._model.graphed import gradients
from kalmannorm._model.graphed.gradients import Gradients
from kalmannorm._model.graphed.nodes import casts_taken
from kalmannorm._model.graphed.wrapping import wrapped
from support.graphed_cases import converted, images, loss_of, plain
from support.rerun import Rerun

HALF = torch.bfloat16


def one_cast(weight, x):
    return (x @ weight.to(HALF)).float().sum()


def cast_and_another(weight, x):
    return one_cast(weight, x) + weight.square().sum()


def two_casts(weight, x):
    return one_cast(weight, x) + one_cast(weight, 3 * x)


def cast_and_two_others(weight, x):
    return cast_and_another(weight, x) + weight.exp().sum()


def cast_to_complex(weight, x):
    return (weight.to(torch.complex64) * (2 + 1j)).abs().square().sum()


def no_cast(weight, x):
    return (x.float() @ weight).sum()


@pytest.mark.parametrize(
    ("use", "taken"),
    [
        (one_cast, True),
        (cast_and_another, True),
        (two_casts, False),
        (cast_and_two_others, False),
        (cast_to_complex, False),
        (no_cast, False),
    ],
)
def test_sums_have_the_bits_of_autograd(use, taken):
    torch.manual_seed(0)
    weight, x = torch.randn(5, 4, requires_grad=True), torch.randn(3, 5, dtype=HALF)
    (expected,) = torch.autograd.grad(use(weight, x), weight)
    loss = use(weight, x)
    with casts_taken([loss]) as casts:
        (rest,) = torch.autograd.grad(loss, weight, allow_unused=True)
    assert (id(weight) in casts) == taken
    terms = [term for term in (casts.get(id(weight)), rest) if term is not None]
    joiner = Gradients([weight])
    (found,) = joiner.copied(joiner.joined([terms]))
    assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_afterwards_a_backward_is_as_ever():
    weight, x = torch.randn(5, 4, requires_grad=True), torch.randn(3, 5, dtype=HALF)
    loss = one_cast(weight, x)
    with casts_taken([loss]):
        pass
    assert torch.autograd.grad(loss, weight)[0].dtype == torch.float32


@pytest.mark.parametrize("build", [plain, converted])
def test_the_gradients_of_a_model_have_the_bits_of_eager_mode(build, monkeypatch):
    joined, kinds = gradients._Kind.joined, set()

    def watched(self, sums):
        kinds.update(tuple(term.dtype for term in terms) for terms in sums)
        return joined(self, sums)

    monkeypatch.setattr(gradients._Kind, "joined", watched)
    model = build("cpu").to(memory_format=torch.channels_last)
    twin = copy.deepcopy(model)
    run = wrapped(model, 8, Rerun())
    for x in images("cpu", 5):
        found = []
        for each in (run, twin):
            each.zero_grad()
            with torch.autocast("cpu", HALF):
                loss = loss_of(each, x.to(memory_format=torch.channels_last))
            loss.backward()
            found.append([parameter.grad for parameter in each.parameters()])
        for one, other in zip(*found, strict=True):
            assert (one is None) == (other is None)
            assert one is None or (one.dtype == other.dtype and torch.equal(one, other))
    assert run.cuda_graphs.replays >= 2 and (HALF,) in kinds
    if build is converted:  # weights are also read by priors
        assert (HALF, torch.float32) in kinds
