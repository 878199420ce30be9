"""The figures of the README and the site: how their records are measured, and that they show their records."""

from __future__ import annotations

import importlib.util
import re
import sys
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


@pytest.fixture(scope="module")
def draw():
    sys.path.insert(0, str(FIGURES))  # as when the script runs
    yield script("draw")
    sys.path.remove(str(FIGURES))


def test_every_figure_is_drawn_from_its_records(draw):
    """A figure names the digest of its records. If this fails, run make figures."""
    drawn = {path.name for path in FIGURES.glob("*.svg")}
    assert drawn == {f"{name}-{theme}.svg" for name in draw.PICTURES for theme in ("light", "dark")}
    for name, picture in draw.PICTURES.items():
        for theme in ("light", "dark"):
            text = (FIGURES / f"{name}-{theme}.svg").read_text(encoding="utf-8")
            assert re.search(r"records (\w+)", text)[1] == draw.digest(picture.RECORDS), name


def test_the_script_draws_into_a_folder(draw, tmp_path):
    draw.main(tmp_path, ("sigma", "decision"))
    assert len(list(tmp_path.glob("*.svg"))) == 4


@pytest.mark.parametrize(("sizes", "line"), [((1, 2), "None"), ((1, 2, 4), "-")])
def test_accuracy_takes_records_of_other_sizes(draw, sizes, line):
    """Two sizes say nothing about those between, so there is no line. Three give one."""
    rows = [
        {"method": "BKN weights", "statistics_batch": m, "seed": seed, "accuracy": {"population": 90.0 + m + seed}}
        for m in sizes
        for seed in (0, 1)
    ]
    accuracy, look = sys.modules["accuracy"], sys.modules["look"]
    axes = look.canvas(look.LIGHT, 4, 3).add_axes((0, 0, 1, 1))
    accuracy.panel(axes, look.LIGHT, accuracy.Data("new", (), 80, "GN"), rows, "population")
    shown = {curve.get_linestyle(): list(curve.get_ydata()) for curve in axes.lines if len(curve.get_ydata())}
    assert shown[line] == [90.5 + m for m in sizes]
