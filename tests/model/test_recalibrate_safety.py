"""What `recalibrate` must leave alone: flags, counters, parameters, other buffers; and all of it after an error.

Also the models it has to take as they come: frozen, averaged, compiled, wrapped.
"""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kalmannorm import BatchKalmanNorm2d, GhostBatchNorm2d, freeze_statistics, recalibrate
from kalmannorm._norms import running_statistics
from support.population_nets import KINDS, data, quiet, same, statistics


class Exploding(nn.Module):
    def forward(self, x):
        if x.shape[0] == 3:
            raise ArithmeticError("in the middle")
        return x


def mixed_model():
    """Something of everything, and every flag in a state of its own."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), BatchKalmanNorm2d(4, momentum=0.3), nn.Dropout(), nn.BatchNorm2d(4), Exploding(),
        GhostBatchNorm2d(4, statistics_batch_size=2), nn.Sequential(nn.Identity(), nn.BatchNorm2d(4, momentum=None)),
        BatchKalmanNorm2d(4, track_running_stats=False), nn.BatchNorm2d(4, track_running_stats=False),
        nn.InstanceNorm2d(4, track_running_stats=True),
    )  # fmt: skip
    model(torch.randn(4, 3, 5, 5)).sum().backward()
    model[0].weight.requires_grad_(False)
    model[1].eval()
    model[3].eval()
    model[5].frozen = True
    return model


SETTINGS = ("training", "momentum", "frozen", "track_running_stats", "process_group", "_warned")


def surroundings(model):
    """What a pass must not change, beside the state_dict: settings, hooks, covered methods, places in memory."""
    modules = [
        (
            list(vars(m)),
            len(m._forward_pre_hooks) + len(m._forward_hooks),
            *(getattr(m, name, None) for name in SETTINGS),
        )
        for m in model.modules()
    ]
    return modules, [(t.data_ptr(), t.requires_grad) for t in (*model.parameters(), *model.buffers())]


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("training", [None, True, False], ids=["mixed", "train", "eval"])
def test_nothing_but_the_statistics_changes(training):
    model = mixed_model() if training is None else mixed_model().train(training)
    before, grads, state = surroundings(model), gradients(model), copy.deepcopy(model.state_dict())
    rng = torch.get_rng_state()
    quiet(model, [torch.zeros(4, 3, 5, 5) + i for i in range(2)])
    assert surroundings(model) == before
    same(gradients(model), grads, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), rng)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, state[name])}
    ours = {f"{i}.{name}" for i in (1, 5) for name in ("running_mean", "running_var", "observed_mean", "observed_var")}
    torchs = {f"{i}.{name}" for i in ("3", "6.1") for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert changed == ours | torchs | {"1.values_tracked", "5.values_tracked"}
    assert model[1].posterior is None


@pytest.mark.parametrize("failure", ["model", "loader", "batch"])
def test_an_error_in_the_middle_leaves_everything_as_it_was(failure):
    model = mixed_model()
    before, state = surroundings(model), copy.deepcopy(model.state_dict())

    def loader():
        yield torch.randn(4, 3, 5, 5)
        if failure == "loader":
            raise ArithmeticError("in the middle")
        yield torch.randn(3, 3, 5, 5) if failure == "model" else object()

    with pytest.raises(TypeError if failure == "batch" else ArithmeticError):
        quiet(model, loader())
    assert surroundings(model) == before
    same(dict(model.state_dict()), dict(state), rtol=0, atol=0)


def test_frozen_norms_are_recalibrated_too_and_stay_frozen():
    x, model = data(8), KINDS["BKN"]()
    free = copy.deepcopy(model)
    freeze_statistics(model)
    quiet(free, [x])
    quiet(model, [x])
    same(statistics(model), statistics(free), rtol=0, atol=0)
    assert model.first.frozen and model.second.frozen


def test_a_norm_that_joins_ranks_takes_its_groups_from_one():
    norm, seen = BatchKalmanNorm2d(3), []
    norm.process_group = "world"
    norm.register_forward_hook(lambda module, *_: seen.append(module.process_group))
    quiet(norm, [torch.randn(4, 3, 2, 2)])
    assert seen == [None]
    assert norm.process_group == "world"


def test_an_averaged_model_gets_statistics_of_its_own():
    """torch's update_bn passes these norms by."""
    x, model = data(8), KINDS["BKN"]()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    quiet(averaged, [(x, None)])
    torch.testing.assert_close(averaged.module.first.running_mean, x.mean((0, 2, 3)))
    assert not model.first.running_mean.any()


@pytest.mark.parametrize("compile", [torch.compile, lambda m, **o: m.compile(**o) or m], ids=["function", "method"])
def test_a_compiled_model_is_recalibrated(compile):
    model = nn.Sequential(BatchKalmanNorm2d(3), nn.BatchNorm2d(3)).double()
    compiled = compile(model, backend="eager", fullgraph=True)
    x = data(6)
    compiled(x)
    quiet(compiled, x.split([4, 2]))
    torch.testing.assert_close(model[0].running_var, x.var((0, 2, 3), correction=0))
    assert model[1].num_batches_tracked == 2
    before = model[0].values_tracked.clone()
    compiled(x)
    assert model[0].values_tracked > before


@pytest.mark.gpu
@pytest.mark.parametrize("build", KINDS.values(), ids=KINDS)
def test_batches_follow_the_model_to_its_device(build):
    parts = data(10).split([4, 4, 2])
    host, device = build(), build().cuda()
    assert quiet(device, parts) == quiet(host, parts)
    same({name: value.cpu() for name, value in statistics(device).items()}, statistics(host), rtol=1e-8, atol=1e-8)


def test_data_parallel_and_lazy_norms():
    x = data(6)
    model = nn.DataParallel(nn.Sequential(nn.LazyBatchNorm2d(dtype=torch.float64)))
    quiet(model, x.split([4, 2]))
    torch.testing.assert_close(model.module[0].running_var.cpu(), x.var((0, 2, 3), correction=0))


@pytest.mark.parametrize("bar", ["tqdm", "torch's stand-in"])
def test_progress_is_shown_where_wanted_and_on_a_terminal_alone(capsys, monkeypatch, bar):
    if bar != "tqdm":
        monkeypatch.setattr("kalmannorm._model.recalibrate.tqdm", torch.hub._Faketqdm)
    model = BatchKalmanNorm2d(3)
    for terminal, progress in ((True, False), (False, True), (True, True)):
        with monkeypatch.context() as screen:
            screen.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
            recalibrate(model, (x for x in torch.randn(3, 4, 3, 2, 2)), max_batches=2, progress=progress)
        said = capsys.readouterr().err
        if not (terminal and progress):
            assert said == ""
    assert "recalibrate" in said and ("2/2" if bar == "tqdm" else "100.0%") in said and said.endswith("\n")


def test_what_is_only_looked_at_launches_nothing(monkeypatch):
    """Where one launch can move the buffers, as on a GPU, a recalibration still sees each batch and moves none."""
    launched = []
    monkeypatch.setattr(running_statistics, "tracking_for", lambda rows: SimpleNamespace(track=launched.append))
    model, x = (
        nn.Sequential(BatchKalmanNorm2d(3), GhostBatchNorm2d(3, statistics_batch_size=2)),
        torch.randn(4, 3, 5, 5),
    )
    model(x)
    assert len(launched) == 2
    result = recalibrate(model, [x], progress=False)
    assert len(launched) == 2 and result.values == {"0": 100, "1": 100}
