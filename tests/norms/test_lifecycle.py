"""What happens to a layer besides training: copies, pickles, checkpoints, devices, dtypes, resets."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from kalmannorm import (
    BatchKalmanNorm1d,
    BatchKalmanNorm2d,
    BatchKalmanNorm3d,
    BatchRenorm2d,
    GhostBatchNorm2d,
    Moments,
    gains,
    parameter_groups,
)


def previous(G=2, P=3):
    return Moments(torch.randn(G, P), torch.rand(G, P) + 0.5)


def used_layer(**options):
    """A layer with moved statistics and a posterior that carries a graph."""
    layer = BatchKalmanNorm2d(4, 3, statistics_batch_size=2, **options)
    nn.init.normal_(layer.transition.matrix)
    layer(torch.randn(4, 4, 5, 5), previous())
    assert layer.posterior.mean.grad_fn is not None
    return layer


def same(a, b):
    x, before = torch.randn(4, 4, 5, 5), previous()
    states = a.state_dict(), b.state_dict()
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(p, q) for p, q in zip(states[0].values(), states[1].values(), strict=True))
    return torch.equal(a(x, before), b(x, before))


def via_torch_save(layer):
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), via_torch_save],
    ids=["deepcopy", "pickle", "save"],
)
def test_copies_work_and_leave_the_posterior_behind(duplicate):
    layer = used_layer()
    twin = duplicate(layer)
    assert twin.posterior is None
    assert layer.posterior is not None
    assert twin.weight is not layer.weight
    assert same(layer, twin)


def test_state_dict_round_trip(tmp_path):
    layer = used_layer()
    fresh = BatchKalmanNorm2d(4, 3, statistics_batch_size=2)
    assert not any("posterior" in key for key in layer.state_dict())
    fresh.load_state_dict(layer.state_dict(), strict=True)
    assert same(layer, fresh)
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    again = BatchKalmanNorm2d(4, 3, statistics_batch_size=2)
    again.load_state_dict(load_file(tmp_path / "layer.safetensors"), strict=True)
    assert same(layer, again)


@pytest.mark.parametrize(
    ("kind", "origin"),
    [
        (BatchKalmanNorm1d, nn.BatchNorm1d),
        (BatchKalmanNorm2d, nn.BatchNorm2d),
        (BatchKalmanNorm3d, nn.BatchNorm3d),
        (GhostBatchNorm2d, nn.BatchNorm2d),
        (BatchRenorm2d, nn.BatchNorm2d),
    ],
)
def test_a_batchnorm_checkpoint_loads_strictly(kind, origin):
    shape = (6, 4) + (3,) * {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}[origin]
    source = nn.Sequential(nn.Identity(), origin(4))
    for _ in range(3):
        source(torch.randn(shape) * 3 + 2)
    nn.init.normal_(source[1].weight)
    options = {} if kind in (GhostBatchNorm2d, BatchRenorm2d) else {"prior_features": 3, "gain": 0.7}
    target = nn.Sequential(nn.Identity(), kind(4, statistics_batch_size=2, **options))
    assert set(source.state_dict()) <= set(target.state_dict())
    state = source.state_dict()
    target.load_state_dict(state, strict=True)
    assert set(state) == set(source.state_dict())  # the caller's dict is left alone
    x = torch.randn(shape)
    torch.testing.assert_close(target.eval()(x), source.eval()(x))
    if kind is not BatchRenorm2d:
        assert torch.equal(target[1].observed_mean, source[1].running_mean)
        assert torch.equal(target[1].observed_var, source[1].running_var)
    if options:
        assert target[1].gain.item() == pytest.approx(0.7)


@pytest.mark.parametrize("tracked", [3, 0], ids=["counted", "uncounted"])
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_observations_start_from_a_batchnorm_and_then_go_their_own_way(assign, tracked):
    source = nn.BatchNorm2d(4)
    nn.init.constant_(source.running_mean, 5.0)
    source.num_batches_tracked.fill_(tracked)
    layer = BatchKalmanNorm2d(4, momentum=0.5, observation_momentum=0.02)
    layer.load_state_dict(source.state_dict(), strict=True, assign=assign)
    layer(torch.randn(2, 4, 3, 3))
    assert layer.running_mean.mean().item() == pytest.approx(2.5, abs=0.5)
    assert layer.observed_mean.mean().item() == pytest.approx(4.9, abs=0.05)


def test_a_partial_load_leaves_the_counters():
    layer = used_layer()
    before = layer.values_tracked.clone()
    layer.load_state_dict({"weight": torch.ones(4), "bias": torch.zeros(4)}, strict=False)
    assert torch.equal(layer.values_tracked, before)


def test_a_copy_of_a_compiled_layer_is_its_own():
    layer = BatchKalmanNorm2d(4)
    layer.compile(backend="eager")
    layer(torch.randn(2, 4, 3, 3))
    twin = copy.deepcopy(layer)
    nn.init.constant_(twin.weight, 5.0)
    assert twin(torch.randn(8, 4, 9, 9)).std().item() == pytest.approx(5, rel=0.05)
    assert layer.num_batches_tracked == 1
    pickle.dumps(layer)


def test_a_damaged_checkpoint_of_ours_is_still_refused():
    state = used_layer().state_dict()
    del state["transition.matrix"]
    with pytest.raises(RuntimeError, match=r"Missing key.*transition\.matrix"):
        BatchKalmanNorm2d(4, 3).load_state_dict(state, strict=True)
    with pytest.raises(RuntimeError, match="running_mean"):
        BatchKalmanNorm2d(4, 3).load_state_dict({"weight": torch.ones(4)}, strict=True)


@pytest.mark.parametrize("transition", ["weights", "learned"])
def test_a_gain_without_dimensions_loads(transition):
    """Up to version 100, gain and noise were numbers. FSDP cannot divide a number."""
    old, new = (BatchKalmanNorm2d(4, 4, transition=transition, gain=g) for g in (0.3, 0.7))
    state = old.state_dict()
    for name in ("gain_logit", "transition.noise"):
        if name in state:
            state[name] = state[name].reshape(())
    new.load_state_dict(state)
    assert new.gain_logit.shape == (1,)
    torch.testing.assert_close(new.gain, old.gain)


@pytest.mark.parametrize("kind", [GhostBatchNorm2d, BatchKalmanNorm2d])
def test_a_norm_without_a_prior_loads_into_one_with_a_prior(kind):
    source = kind(4, statistics_batch_size=2)
    source(torch.randn(4, 4, 5, 5) + 2)
    target = BatchKalmanNorm2d(4, 3, statistics_batch_size=2, gain=0.7)
    target.load_state_dict(source.state_dict(), strict=True)
    assert torch.equal(target.observed_mean, source.observed_mean)
    assert torch.equal(target.values_tracked, source.values_tracked)
    assert target.gain.item() == pytest.approx(0.7)


def test_cumulative_average_goes_on_from_a_batchnorm_checkpoint():
    """momentum=None after a BatchNorm checkpoint of t batches: the next counts 1/(t+1), as in BatchNorm itself."""
    bn = nn.BatchNorm2d(4, momentum=None)
    layer = BatchKalmanNorm2d(4, momentum=None)
    for _ in range(3):
        bn(torch.randn(4, 4, 5, 5))
    layer.load_state_dict(bn.state_dict())
    x = torch.randn(4, 4, 5, 5) + 5
    bn(x)
    layer(x)
    torch.testing.assert_close(layer.running_mean, bn.running_mean)
    assert layer.values_tracked == 4 * 100


@pytest.mark.parametrize(
    "cast", [nn.Module.half, nn.Module.bfloat16, lambda m: m.to(torch.bfloat16)], ids=["half", "bf16", "to"]
)
def test_buffers_and_filter_stay_float32_without_rounding(cast):
    layer = used_layer()
    layer(torch.randn(4, 4, 5, 5), previous()).sum().backward()
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    cast(layer)
    low = {k for k, v in layer.state_dict().items() if v.dtype in (torch.float16, torch.bfloat16)}
    assert low == {"weight", "bias"}
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items() if k not in low)
    assert layer.transition.matrix.grad.dtype == torch.float32
    assert layer.weight.grad.dtype == layer.weight.dtype
    x = torch.randn(4, 4, 5, 5).to(layer.weight.dtype)
    y = layer(x, previous())
    assert y.dtype == x.dtype
    y.float().square().sum().backward()
    assert torch.isfinite(layer.transition.matrix.grad).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_at_construction(dtype):
    layer = BatchKalmanNorm2d(4, 3, dtype=dtype)
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    assert layer.weight.dtype == dtype
    assert layer.running_mean.dtype == layer.observed_var.dtype == layer.gain_logit.dtype == kept
    assert layer.transition.matrix.dtype == layer.transition.noise.dtype == kept


def test_double_and_back():
    layer = used_layer()
    layer.double()
    assert all(t.dtype == torch.float64 for t in layer.state_dict().values() if t.is_floating_point())
    layer(torch.randn(4, 4, 5, 5).double(), previous())
    layer.float()
    assert all(t.dtype == torch.float32 for t in layer.state_dict().values() if t.is_floating_point())


def test_meta_device_then_reset():
    layer = BatchKalmanNorm2d(4, 3, statistics_batch_size=2, gain=0.3, rank=2, device="meta")
    assert all(t.is_meta for t in (*layer.parameters(), *layer.buffers()))
    layer.state_dict()
    layer.eval().train()
    layer.to_empty(device="cpu")
    for tensor in (*layer.parameters(), *layer.buffers()):
        tensor.detach().fill_(7)
    layer.reset_parameters()
    torch.manual_seed(0)
    expected = BatchKalmanNorm2d(4, 3, statistics_batch_size=2, gain=0.3, rank=2)
    torch.manual_seed(0)
    layer.reset_parameters()
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(layer.state_dict()[key], value)


def test_sync_batchnorm_conversion_leaves_us_alone():
    model = nn.Sequential(BatchKalmanNorm2d(4), GhostBatchNorm2d(4))
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(converted[0]) is BatchKalmanNorm2d
    assert type(converted[1]) is GhostBatchNorm2d


def test_repr_says_what_matters():
    text = repr(BatchKalmanNorm2d(4, 3, statistics_batch_size=2, inference="example"))
    for part in ("4", "prior_features=3", "statistics_batch_size=2", "transition='learned'", "inference='example'"):
        assert part in text


def test_parameter_groups_keep_decay_off_norms_and_filter():
    noise = nn.Parameter(torch.ones(()))
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        BatchKalmanNorm2d(4, 3, noise=noise),
        BatchKalmanNorm2d(4, 4, noise=noise, rank=1),
        nn.BatchNorm2d(4),
        nn.GroupNorm(1, 4),
        nn.LayerNorm(4),
        GhostBatchNorm2d(4),
        nn.Linear(4, 2),
    )
    groups = parameter_groups(model, 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    by_decay = {g["weight_decay"]: {names[id(p)] for p in g["params"]} for g in groups}
    assert by_decay[0.1] == {"0.weight", "0.bias", "7.weight", "7.bias"}
    assert by_decay[0.0] == set(names.values()) - by_decay[0.1]
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    torch.optim.SGD(groups, lr=0.1)


def test_gains_for_logging():
    model = nn.ModuleDict(
        {
            "a": BatchKalmanNorm2d(4),
            "b": BatchKalmanNorm2d(4, 3, gain=0.25),
            "c": BatchKalmanNorm2d(4, 4, per_channel_gain=True),
        }
    )
    assert gains(model) == pytest.approx({"b": 0.25, "c": 0.5})
