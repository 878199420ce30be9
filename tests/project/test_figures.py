"""The figures of the README and the site: how their records are measured, and that they show their records."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import matplotlib.colors
import pytest
import torch

from kalmannorm.lab import models
from kalmannorm.lab.recipes.methods import normalized
from support.evidence_rows import record
from trials.evidence import EVIDENCE, methods

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


def test_every_figure_is_drawn_from_its_sources(draw):
    """A figure names the digest of its records and its module. If this fails, run make figures."""
    drawn = {path.name for path in FIGURES.glob("*.svg")}
    assert drawn == {f"{name}-{theme}.svg" for name in draw.PICTURES for theme in ("light", "dark")}
    for name, picture in draw.PICTURES.items():
        for theme in ("light", "dark"):
            text = (FIGURES / f"{name}-{theme}.svg").read_text(encoding="utf-8")
            assert re.search(r"sources (\w+)", text)[1] == draw.digest(draw.sources(picture)), name


def test_the_script_draws_into_a_folder(draw, tmp_path):
    draw.main(tmp_path, ("sigma", "decision"))
    assert len(list(tmp_path.glob("*.svg"))) == 4


@pytest.fixture
def accuracy(draw):
    return sys.modules["accuracy"]


def test_accuracy_draws_a_panel_for_every_cell_with_records(accuracy):
    """The score of the chosen setting on test images. CIFAR-10 of the lab gives way to that of the trials."""
    before = [panel.title for panel in accuracy.panels([])]
    assert before == ["CIFAR Inception on CIFAR-10 (8 epochs)", "digits-net on digits"]
    runs = [run for run in EVIDENCE["sizes"] if run.cell in ("cifar10", "cifar10-resnet32")]
    rows = [record("sizes", run) for run in runs]
    found = accuracy.panels(rows)
    titles = [panel.title for panel in found]
    assert titles == ["CIFAR Inception on CIFAR-10", "ResNet-32 on CIFAR-10", "digits-net on digits"]
    assert found[0].sizes == [1, 2, 4, 8, 32, 128]
    run = next(run for run in runs if run.form == methods(4)["BKN"])
    assert found[0].scores["BKN", 4] == [row["tested"]["population"] for row in rows if row["key"] == run.key]
    assert len(found[0].scores["group", 0]) == 1
    curves = accuracy.chart(found)
    (bkn,) = (series for series in curves.panels[0].series if series.label == "BKN")
    assert [curves.names[int(x)] for x in bkn.x] == ["1", "2", "4", "8", "32", "128"]
    assert bkn.y[2] == found[0].scores["BKN", 4][0]
    assert accuracy.missing(rows) == {"tiny100": (57, 57), "cifar100": (57, 57)}
    assert accuracy.missing(rows[1:])["cifar10"] == (1, 57)


def test_accuracy_shows_the_best_setting_on_held_out_images(accuracy):
    runs = [run for run in EVIDENCE["sizes"] + EVIDENCE["rates"] if run.form == methods(2)["BKN"]]
    own = [run for run in runs if run.cell == "cifar10"]
    assert len(own) == 3, "three learning rates"
    rows = [
        record("rates", run, held_out={"population": 80.0 + n % 2}, tested={"population": 70.0 + n})
        for n, run in enumerate(own)
    ]
    assert accuracy.of_trials("cifar10", rows).scores == {("BKN", 2): [71.0]}
    rows[1]["loss"] = None
    assert accuracy.of_trials("cifar10", rows).scores == {("BKN", 2): [70.0]}, "a diverged run is not chosen"


def test_a_line_joins_neighbouring_sizes_only(accuracy):
    """A training between them may have diverged, or be below the panel."""
    others = {("groups", m): [90.0 + m] for m in (1, 2, 4)}
    for sizes, lines in (((1, 2), 1), ((1, 4), 2), ((1, 2, 4), 1), ((2,), 1)):
        panel = accuracy.Panel("", {**others, **{("BKN", m): [90.0 + m, 91.0 + m] for m in sizes}})
        own = [series for series in accuracy.chart([panel]).panels[0].series if series.label == "BKN"]
        assert len(own) == lines
        assert [y for series in own for y in series.y] == [90.5 + m for m in sizes]
    scores = {("BKN", m): [90.0 + m / 10] for m in (1, 2, 4, 8)} | {("groups", m): [89.0] for m in (1, 4, 8)}
    panel = accuracy.Panel("", {**scores, ("groups", 2): [20.0]})
    own = [series for series in accuracy.chart([panel]).panels[0].series if series.label == "batch norm"]
    assert [list(series.x) for series in own] == [[0.0], [2.0, 3.0]]


def test_outliers_are_told_and_themes_differ(accuracy, monkeypatch):
    look = sys.modules["look"]
    scores = {("BKN", m): [90.0 + m / 10] for m in (1, 2, 4, 8)} | {("groups", m): [89.0] for m in (2, 4, 8)}
    panel = accuracy.Panel("", {**scores, ("groups", 1): [20.0]})
    monkeypatch.setattr(accuracy, "panels", lambda rows: [panel])
    figure = accuracy.draw(look.LIGHT)
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["↓20.0"] and axes.get_ylim()[0] > 80
    colours = [{line.get_color() for line in drawn.axes[0].lines} for drawn in (figure, accuracy.draw(look.DARK))]
    assert len(colours[0]) == 2 and not colours[0] & colours[1]


def test_words_can_be_read_whatever_was_drawn_before(draw, accuracy):
    """Other pictures leave the colours of their theme behind. Dark words on a light page, and the reverse."""
    look = sys.modules["look"]
    sys.modules["sigma"].draw(look.DARK)
    for theme, dark in ((look.LIGHT, True), (look.DARK, False)):
        figure = accuracy.draw(theme)
        axes = figure.axes[0]
        labels = [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels()]
        labels += [text for legend in (*figure.legends, axes.get_legend()) if legend for text in legend.get_texts()]
        assert [sum(matplotlib.colors.to_rgb(label.get_color())) < 1.5 for label in labels] == [dark] * len(labels)
