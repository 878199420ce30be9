"""The figures of the README and the site: how their records are measured, and that they show their records."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from kalmannorm.lab import models
from kalmannorm.lab.recipes.methods import normalized

FIGURES = Path(__file__).parents[2] / "docs" / "figures"


def script(name):
    spec = importlib.util.spec_from_file_location(f"figures_{name}", FIGURES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


measure = script("measure")


@pytest.fixture(scope="module")
def images():
    return torch.randn(24, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def digits_net(method, m, images):
    torch.manual_seed(0)
    model = models.build("digits-net", classes=10, shape=(1, 8, 8))
    return normalized(model, method, images[:2], statistics_batch=m, steps=1, gain=None)


def test_the_error_of_sigma_is_its_definition(images):
    """Against the definition, from the values that enter a norm."""
    model = digits_net("bn", 4, images)
    name = list(measure.sights(model, images))[2]
    seen = []
    model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    found = measure.errors(measure.sights(model, images)[name])
    x = seen[0].double().movedim(1, -1)  # N, H, W, C
    error = x.reshape(6, -1, x.shape[-1]).std(1, correction=0) / x.flatten(0, 2).std(0, correction=0) - 1
    assert found["rms"] == found["observed_rms"] == pytest.approx(error.square().mean().sqrt().item(), rel=1e-4)
    assert found["bias"] == pytest.approx(error.mean().item(), rel=1e-3)
    assert found["spread"] == pytest.approx(measure.spread(error).item(), rel=1e-4)


def test_one_group_of_all_images_has_no_error(images):
    model = digits_net("bn", 24, images)
    for sight in measure.sights(model, images).values():
        assert max(abs(value) for value in measure.errors(sight).values()) < 1e-6


def test_bkn_is_judged_by_its_posterior(images):
    model = digits_net("bkn", 4, images)
    first, second, *_ = measure.sights(model, images).values()
    assert first.prior is None and "prior_rms" not in measure.errors(first)
    found = measure.errors(second)
    assert found["rms"] != found["observed_rms"]
    assert found["prior_spread"] == 0  # one prior for all groups
