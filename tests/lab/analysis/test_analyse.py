"""Analysis: what the norms saw is what the filter's equations say, and the model is left as it was."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

import kalmannorm
from kalmannorm.lab import data as datasets
from kalmannorm.lab import models
from kalmannorm.lab.analysis.analyse import analyse, layer_statistics, variance_gap
from kalmannorm.lab.analysis.gap import MOST_BATCHES, MOST_CHANNELS, overall, whole_groups
from kalmannorm.lab.errors import LabError
from kalmannorm.lab.files.records import Run
from kalmannorm.lab.recipes.methods import normalized
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.training.train import train
from kalmannorm_command.app import run as command

SHAPE = (1, 8, 8)


def net(method: str, statistics_batch: int = 2, width: float = 1.0) -> nn.Module:
    """Digits-net with running statistics that have moved, and gains of its own in each layer."""
    model = models.build("digits-net", classes=10, shape=SHAPE, width=width)
    model = normalized(model, method, torch.zeros(2, *SHAPE), statistics_batch=statistics_batch, steps=10)
    with torch.no_grad():
        for i, norm in enumerate(m for m in model.modules() if isinstance(m, kalmannorm.BatchKalmanNorm)):
            if norm.gain_logit is not None:
                norm.gain_logit.fill_(0.3 * i - 0.5)
            if norm.transition is not None:
                norm.transition.matrix.normal_(0, 0.2)
        for _ in range(3):
            model(torch.randn(16, *SHAPE))
    return model.eval()


def digits(examples: int = 100):
    return datasets.load("digits", train_examples=examples, test_examples=10)


@pytest.mark.parametrize("method", ["bkn", "bkn-learned"])
def test_layer_statistics_are_those_of_the_filter(method):
    """With one group the averages are the values themselves, so the update's equations hold between them."""
    layers = layer_statistics(net(method, statistics_batch=8), [torch.randn(8, *SHAPE)])
    assert layers[0].prior_mean is None and layers[0].gain is None
    assert layers[0].posterior_var == layers[0].observed_var
    for layer in layers[1:]:
        q = layer.gain
        prior_mean, prior_var, mean, var = (
            torch.tensor(values, dtype=torch.float64)
            for values in (layer.prior_mean, layer.prior_var, layer.observed_mean, layer.observed_var)
        )
        fused = (1 - q) * prior_var + q * var + q * (1 - q) * (mean - prior_mean).square()
        torch.testing.assert_close(torch.tensor(layer.posterior_var).double(), fused, rtol=1e-4, atol=1e-6)
        expected = (1 - q) * prior_mean + q * mean
        torch.testing.assert_close(torch.tensor(layer.posterior_mean).double(), expected, rtol=1e-4, atol=1e-5)
    assert len({layer.gain for layer in layers[1:]}) == 4


def test_layer_statistics_average_over_the_groups_that_training_makes():
    model, images = net("bn"), torch.randn(16, *SHAPE)
    seen = {}
    first = next(m for m in model.modules() if isinstance(m, kalmannorm.GroupedNorm))
    hook = first.register_forward_hook(lambda module, inputs, output: seen.update(x=inputs[0]))
    layer = layer_statistics(model, [images[:8], images[8:]])[0]
    hook.remove()
    x = seen["x"].detach()  # of the second batch; the first norm sees each image alike, whatever the batch
    both = torch.cat([first_input(model, images[:8]), x]).unflatten(0, (8, 2))
    torch.testing.assert_close(torch.tensor(layer.observed_mean), both.mean((1, 3, 4)).mean(0), rtol=1e-4, atol=1e-5)
    variances = both.var((1, 3, 4), correction=0).mean(0)
    torch.testing.assert_close(torch.tensor(layer.observed_var), variances, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.tensor(layer.running_var), first.running_var, rtol=1e-4, atol=1e-5)


def first_input(model, images):
    return model.features[0].convolution(images).detach()


@pytest.mark.parametrize("method", ["bn", "brn", "bkn", "bkn-learned"])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_model_is_left_as_it_was(method, frozen):
    model = net(method)
    kalmannorm.freeze_statistics(model, frozen)
    modules = list(model.modules())
    before = copy.deepcopy(model.state_dict())
    flags = [(module.training, getattr(module, "frozen", None)) for module in modules]
    attributes = [set(vars(module)) for module in modules]
    layer_statistics(model, [torch.randn(8, *SHAPE)])
    variance_gap(model, digits(), 2)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert flags == [(module.training, getattr(module, "frozen", None)) for module in modules]
    assert attributes == [set(vars(module)) for module in modules]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(getattr(module, "posterior", None) is None for module in modules)


def test_the_gap_of_batch_norm_is_that_of_the_groups_variances():
    model, data = net("bn"), digits()
    gaps = variance_gap(model, data, 2, batch=20)
    assert [gap.batches for gap in gaps] == [50] * 5
    images = torch.cat([images for images, _ in data.train_batches(100, seed=0, epoch=0, augment=False)])
    norm = model.features[0].norm
    var = first_input(model, images).unflatten(0, (50, 2)).var((1, 3, 4), correction=0)
    expected = (var - norm.running_var) / (norm.running_var + norm.eps)
    torch.testing.assert_close(torch.tensor(gaps[0].gap).T, expected, rtol=1e-4, atol=1e-5)
    assert gaps[0].mean_abs == pytest.approx(float(expected.abs().mean()), rel=1e-5)
    spread = (var.std(0, correction=0) / var.mean(0)).mean()
    assert gaps[0].spread == pytest.approx(float(spread), rel=1e-3)
    assert gaps[0].observed_mean_abs == gaps[0].mean_abs


def test_a_prior_makes_the_variance_stray_less_than_the_observation_does():
    model, data = net("bkn"), digits()
    kalmannorm.recalibrate(model, [images for images, _ in data.plain_batches(50)], progress=False)
    gaps = variance_gap(model, data, 2)
    for gap in gaps[1:]:
        assert gap.spread < gap.observed_spread
        assert gap.mean_abs < gap.observed_mean_abs
    assert gaps[0].spread == gaps[0].observed_spread
    total = overall(gaps)
    assert total["mean_abs"] == pytest.approx(sum(g.mean_abs * g.channels for g in gaps) / 128)


def test_the_heat_map_is_thinned_and_the_summary_is_not():
    model, data = net("bn", statistics_batch=1, width=4.0), digits(400)
    whole = variance_gap(model, data, 1)[-1]
    assert (whole.channels, whole.batches) == (128, 400)
    assert (len(whole.gap), len(whole.gap[0])) == (MOST_CHANNELS, MOST_BATCHES)
    other = variance_gap(model, data, 1, batch=31)[-1]
    assert other.mean_abs == pytest.approx(whole.mean_abs, rel=1e-4)
    torch.testing.assert_close(torch.tensor(other.gap), torch.tensor(whole.gap), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("examples", "m", "batch", "left"), [(50_000, 2, 128, 0), (901, 2, 64, 1), (449, 1, 64, 1), (7, 4, 128, 3)]
)
def test_hardly_an_example_is_left_out(examples, m, batch, left):
    size, groups = whole_groups(examples, m, batch)
    assert size % m == 0 and size <= batch and groups * m % size == 0
    assert examples - groups * m == left


def test_norms_without_statistics_have_nothing_to_analyse():
    with pytest.raises(LabError, match="keeps no batch statistics"):
        layer_statistics(net("gn"), [torch.randn(8, *SHAPE)])
    with pytest.raises(LabError, match="do not fill a group of 8"):
        whole_groups(5, 8, 64)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("analyse") / "run"
    recipe = Recipe(method="bkn", gradient_batch=16, epochs=1, train_examples=64, test_examples=16, evaluate_every=0)
    train(recipe, folder, Execution(device="cpu", tensorboard=False))
    return folder


def test_a_run_is_analysed_from_its_folder(trained, capsys, monkeypatch):
    found = analyse(trained, batches=2, device="cpu")
    run = Run.read(trained)
    layers, gap = run.analysis("layers"), run.analysis("variance-gap")
    assert [layer["name"] for layer in layers["layers"]] == [f"features.{i}.norm" for i in range(5)]
    assert layers["examples"] == 32 and layers["layers"] == json.loads(json.dumps([x.to_json() for x in found.layers]))
    assert found.gains == pytest.approx(run.result["gains"])
    assert (gap["statistics_batch"], gap["examples"], gap["of"]) == (2, 64, 64)
    assert gap["overall"]["mean_abs"] == found.overall["mean_abs"]
    monkeypatch.setenv("COLUMNS", "80")
    assert command(["analyse", str(trained), "--max-groups", "8", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "features.4.norm" in shown and str(trained / "analysis") in shown
    assert run.analysis("variance-gap")["examples"] == 16


def test_scripts_get_one_row_per_layer(trained, capsys):
    assert command(["analyse", str(trained), "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layers"][0]["gain"] is None and 0 < found["layers"][1]["gain"] < 1
    assert found["layers"][1]["prior_error"] > 0 and set(found["overall"]) < set(found["layers"][0])


def test_what_is_no_run_is_told_in_one_line(tmp_path, capsys):
    assert command(["analyse", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
