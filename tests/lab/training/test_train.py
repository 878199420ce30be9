"""Training in the lab: what a run starts from, what it leaves, and what its options do."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import kalmannorm
from kalmannorm._model.settings import norms
from kalmannorm.lab.errors import LabError
from kalmannorm.lab.files.records import Run
from kalmannorm.lab.machine.devices import resolve
from kalmannorm.lab.recipes.methods import METHODS
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.training.evaluate import evaluate, evaluation_batch, recalibrated
from kalmannorm.lab.training.loading import data_of, load_run, model_of
from kalmannorm.lab.training.optimizer import learning_rate, optimizer_of
from kalmannorm.lab.training.step import Step
from kalmannorm.lab.training.train import train
from kalmannorm_command.app import run

TINY = Recipe(epochs=2, train_examples=256, test_examples=100)
CPU = torch.device("cpu")


@pytest.mark.parametrize("schedule", ["cosine", "linear", "step", "constant"])
def test_the_learning_rate_rises_then_follows_its_schedule(schedule):
    recipe = Recipe(schedule=schedule, learning_rate=0.4)
    rates = [learning_rate(recipe, step, 100, 10) for step in range(100)]
    assert rates[:10] == pytest.approx([0.4 * (step + 1) / 11 for step in range(10)])
    assert rates[10] == max(rates) == 0.4
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[10:]))
    ends = {"cosine": 0.4 * 0.0003, "linear": 0.4 / 90, "step": 0.004, "constant": 0.4}
    assert rates[-1] == pytest.approx(ends[schedule], rel=0.05)


def test_methods_of_a_seed_start_from_the_same_net():
    data = data_of(TINY, CPU, Execution())
    nets = {name: model_of(dataclasses.replace(TINY, method=name), data, CPU) for name in METHODS}
    first = dict(nets["bn"].named_parameters())
    for net in nets.values():
        mine = dict(net.named_parameters())
        for name, value in first.items():
            assert torch.equal(mine[name], value), name
    other = model_of(dataclasses.replace(TINY, seed=1), data, CPU)
    assert not torch.equal(next(other.parameters()), next(nets["bn"].parameters()))


def test_what_does_not_decay():
    data = data_of(TINY, CPU, Execution())
    net = model_of(dataclasses.replace(TINY, method="bkn-learned"), data, CPU)
    decayed, spared = optimizer_of(net, TINY).param_groups
    assert decayed["weight_decay"] == TINY.weight_decay and spared["weight_decay"] == 0
    named = {id(parameter): name for name, parameter in net.named_parameters()}
    norms = [module for module in net.modules() if isinstance(module, kalmannorm.BatchKalmanNorm2d)]
    own = {named[id(parameter)] for norm in norms for parameter in norm.parameters()}
    assert any(name.endswith("transition.matrix") for name in own)
    assert {named[id(value)] for value in spared["params"]} == own
    assert {named[id(value)] for value in decayed["params"]} == set(named.values()) - own


@pytest.mark.parametrize("name", list(METHODS))
def test_what_a_run_leaves(tmp_path, name):
    recipe = dataclasses.replace(TINY, method=name)
    told = []
    result = train(recipe, tmp_path / "run", watch=told.append)
    found = Run.read(tmp_path / "run")
    assert found.recipe == recipe and found.finished
    assert tuple(result["accuracy"]) == METHODS[name].modes
    assert found.result is not None and found.result["accuracy"] == pytest.approx(result["accuracy"])
    assert result["steps"] == 8 and result["epochs"] == 2 and not result["diverged"]
    kalman = METHODS[name].to == "kalman"
    assert bool(result["gains"]) == kalman == bool(found.events("gains")) == (tmp_path / "run" / "wiring.svg").is_file()
    evaluations = found.events("evaluate")
    assert [event["step"] for event in evaluations] == [4, 8]
    assert evaluations[-1]["modes"]["population"]["accuracy"] == result["accuracy"]["population"]
    assert {event["event"] for event in told} >= {"train", "evaluate"}
    assert found.record["origin"]["torch"] == torch.__version__
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_a_trained_run_is_loaded_and_tested_as_it_was(tmp_path):
    result = train(TINY, tmp_path / "run")
    loaded = load_run(tmp_path / "run", device="cpu")
    scores = evaluate(loaded.model, loaded.data, TINY)
    assert {mode: found["accuracy"] for mode, found in scores.items()} == pytest.approx(result["accuracy"])
    images, labels = next(iter(loaded.data.test_batches(1000)))
    kalmannorm.set_inference(loaded.model, "example")
    with torch.no_grad():
        logits = loaded.model(images)
    assert scores["example"]["accuracy"] == pytest.approx(100 * (logits.argmax(1) == labels).float().mean().item())
    assert scores["example"]["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)


def test_evaluation_leaves_the_model_as_it_was(tmp_path):
    train(TINY, tmp_path / "run")
    loaded = load_run(tmp_path / "run", device="cpu")
    kalmannorm.set_inference(loaded.model, "batch")
    loaded.model.train()
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    evaluate(loaded.model, loaded.data, TINY)
    again = recalibrated(loaded.model, loaded.data, TINY)
    assert loaded.model.training
    assert {norm.inference for norm in loaded.model.modules() if isinstance(norm, kalmannorm.GroupedNorm)} == {"batch"}
    assert all(torch.equal(value, before[name]) for name, value in loaded.model.state_dict().items())
    updated = [name for name, value in again.state_dict().items() if not torch.equal(value, before[name])]
    assert updated and all("running" in name or "observed" in name or "tracked" in name for name in updated)


@pytest.mark.parametrize(("m", "limit"), [(1, None), (3, None), (64, 8), (96, None), (512, None)])
def test_whole_groups_are_tested(m, limit):
    recipe = Recipe(gradient_batch=512 * 3, statistics_batch=m)
    assert evaluation_batch(recipe, limit) % m == 0
    assert evaluation_batch(recipe, limit) <= max(m, limit or 1024)


def test_a_method_without_a_way_of_inference_says_so(tmp_path):
    recipe = dataclasses.replace(TINY, method="brn")
    data = data_of(recipe, CPU, Execution())
    with pytest.raises(LabError, match="BRN has no example inference"):
        evaluate(model_of(recipe, data, CPU), data, recipe, modes=["example"])


def test_the_last_epochs_on_population_statistics(tmp_path):
    """At a statistics batch of 1 batch norm's moving averages do not fit its training; after this they do."""
    recipe = Recipe(method="bn", statistics_batch=1, epochs=6, test_examples=400, evaluate_every=0)
    plain = train(recipe, tmp_path / "plain")["accuracy"]["population"]
    finished = train(dataclasses.replace(recipe, finish_epochs=1.5), tmp_path / "finished")["accuracy"]["population"]
    assert finished > plain + 10


def test_a_closing_phase(tmp_path):
    """As above, but gradually, and the weights of the result have the entries of any other run."""
    recipe = Recipe(method="bn", statistics_batch=1, epochs=6, test_examples=400, evaluate_every=0)
    plain = train(recipe, tmp_path / "plain")["accuracy"]["population"]
    closed = train(dataclasses.replace(recipe, closing_start=0.3), tmp_path / "closed")["accuracy"]["population"]
    assert closed > plain + 10
    names = [set(load_file(tmp_path / run / "model.safetensors")) for run in ("plain", "closed")]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    ("present", "expected"),
    [(None, [{(False, 0.0)}, {(True, 0.0)}]), (0.5, [{(False, 0.5)}])],
    ids=["settle", "present"],
)
def test_the_step_is_captured_again_when_norms_begin_to_close_and_when_they_settle(
    present, expected, tmp_path, monkeypatch
):
    """With a share of the present forward there is no other way through a settled norm."""
    phases = []

    def recapture(self):
        phases.append({(norm.closing.settled, norm.closing.present) for _, norm in norms(self.model)})

    monkeypatch.setattr(Step, "recapture", recapture)
    phase = {"closing_start": 0.3, "closing_end": 0.6, "closing_present": present}
    train(dataclasses.replace(TINY, method="bkn", **phase), tmp_path / "run")
    assert phases == expected


def test_gain_and_batch_renorm_schedule():
    data = data_of(TINY, CPU, Execution())
    net = model_of(dataclasses.replace(TINY, gain=0.8), data, CPU)
    assert all(value == pytest.approx(0.8) for value in kalmannorm.gains(net).values())
    brn = model_of(dataclasses.replace(TINY, method="brn", epochs=80), data, CPU)
    norms = [norm for norm in brn.modules() if isinstance(norm, kalmannorm.BatchRenorm2d)]
    assert {(norm.warmup_steps, norm.r_steps, norm.d_steps) for norm in norms} == {(10, 80, 50)}


def test_devices(capsys):
    assert resolve("cpu") == CPU
    assert run(["train", "--precision", "fp16", "--device", "cpu"]) == 2
    assert "bf16" in capsys.readouterr().err


def test_json_is_all_that_scripts_see(capsys, tmp_path):
    options = ["--epochs", "1", "--train-examples", "128", "--out", str(tmp_path / "run"), "--json"]
    assert run(["train", *options]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["folder"] == str(tmp_path / "run") and err == ""
    assert run(["evaluate", str(tmp_path / "run"), "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["scores"]) == ["population", "batch", "example", "recalibrated"]
    assert found["step"] == found["steps"] == 2
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text()) == found
