"""Running statistics: total variance, plain averages, observations, NaN batches, freezing, accumulation."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kalmannorm import (
    BatchKalmanNorm1d,
    BatchKalmanNorm2d,
    BatchRenorm2d,
    GhostBatchNorm2d,
    Moments,
    check_statistics,
    freeze_statistics,
    set_inference,
)


def shifting_data(n=48, C=3):
    """Examples with means of their own, so that the variance between groups matters."""
    return torch.randn(n, C, 4, 5, dtype=torch.float64) + 3 * torch.randn(n, C, 1, 1, dtype=torch.float64)


@pytest.mark.parametrize("split", [[48], [16, 16, 16], [1, 2, 45], [7, 20, 21]], ids=str)
@pytest.mark.parametrize("m", [1, 2, 5, None], ids=["m1", "m2", "m5", "mN"])
def test_total_variance_is_the_pooled_variance_however_split(split, m):
    x = shifting_data()
    layer = BatchKalmanNorm2d(3, statistics_batch_size=m, momentum=None, dtype=torch.float64)
    for part in x.split(split):
        layer(part)
    for mean, var in ((layer.running_mean, layer.running_var), (layer.observed_mean, layer.observed_var)):
        torch.testing.assert_close(mean, x.mean((0, 2, 3)), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(var, x.var((0, 2, 3), correction=0), rtol=1e-10, atol=1e-10)


def test_maps_of_other_sizes_count_by_their_values():
    parts = [torch.randn(4, 2, s, s, dtype=torch.float64) * s for s in (3, 8, 5)]
    layer = BatchKalmanNorm2d(2, statistics_batch_size=2, momentum=None, dtype=torch.float64)
    for part in parts:
        layer(part)
    everything = torch.cat([part.movedim(1, 0).flatten(1) for part in parts], 1)
    torch.testing.assert_close(layer.running_var, everything.var(1, correction=0), rtol=1e-10, atol=1e-10)


def test_momentum_moves_as_the_filter_does():
    layer = BatchKalmanNorm2d(3, statistics_batch_size=2, momentum=0.3, dtype=torch.float64)
    mean, var = torch.zeros(3).double(), torch.ones(3).double()
    for x in shifting_data().split(16):
        layer(x)
        batch_mean, batch_var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
        var = 0.7 * var + 0.3 * batch_var + 0.3 * 0.7 * (batch_mean - mean) ** 2
        mean = mean + 0.3 * (batch_mean - mean)
    torch.testing.assert_close(layer.running_mean, mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(layer.running_var, var, rtol=1e-10, atol=1e-10)


def test_running_mean_equals_batch_norm():
    layer, bn = BatchKalmanNorm2d(3), nn.BatchNorm2d(3)
    for x in shifting_data().float().split(16):
        layer(x)
        bn(x)
    torch.testing.assert_close(layer.running_mean, bn.running_mean)
    assert layer.num_batches_tracked == bn.num_batches_tracked == 3


def test_observations_have_a_momentum_of_their_own():
    layer = BatchKalmanNorm2d(3, 3, transition="identity", gain=0.5, dtype=torch.float64, observation_momentum=0.25)
    x, prior = shifting_data(8), Moments(torch.full((1, 3), 9.0).double(), torch.ones(1, 3).double())
    layer(x, prior)
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
    torch.testing.assert_close(layer.running_mean, 0.1 * (0.5 * mean + 4.5))
    torch.testing.assert_close(layer.observed_mean, mean)  # α is 1 at first: nothing of the start is left
    torch.testing.assert_close(layer.observed_var, var)
    for _ in range(2):  # 4/5 and 4/6, above the momentum: 1/15 of the first batch is left
        layer(x - 1, prior)
    torch.testing.assert_close(layer.observed_mean, mean - 14 / 15)
    torch.testing.assert_close(layer.observed_var, var + 14 / 225)
    for _ in range(10):
        layer(x - 1, prior)
    before = layer.observed_mean.clone()
    layer(x + 3, prior)  # 4/17 < 0.25: the momentum has taken over
    torch.testing.assert_close(layer.observed_mean, 0.75 * before + 0.25 * (mean + 3))


def test_observations_keep_up_with_a_net_that_learns():
    """What early batches showed is forgotten long before the momentum takes over: a quarter of the way behind."""
    layer = GhostBatchNorm2d(3, statistics_batch_size=2)
    x = shifting_data(8).float()
    x = (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)
    for step in range(40):
        layer(x + step)
    assert (layer.observed_mean > 30).all()


def test_eval_and_no_tracking_move_nothing():
    layer = BatchKalmanNorm2d(3, statistics_batch_size=2).eval()
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    for mode in ("population", "batch", "example"):
        set_inference(layer, mode)
        layer(torch.randn(4, 3, 2, 2))
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
    untracked = BatchKalmanNorm2d(3, track_running_stats=False)
    assert not list(untracked.buffers())
    x = torch.randn(4, 3, 2, 2)
    torch.testing.assert_close(untracked(x), untracked.eval()(x))
    torch.testing.assert_close(untracked(x), F.batch_norm(x, None, None, training=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("kind", [BatchKalmanNorm2d, GhostBatchNorm2d, BatchRenorm2d])
def test_a_bad_batch_leaves_all_buffers_and_is_counted(kind, bad):
    layer = kind(3, statistics_batch_size=2)
    layer(torch.randn(4, 3, 2, 2))
    before = {k: v.clone() for k, v in layer.named_buffers()}
    x = torch.randn(4, 3, 2, 2)
    x[3, 1, 0, 0] = bad
    with pytest.warns(RuntimeWarning, match="NaN or Inf"):
        layer(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one warning per layer, not one per batch
        layer(x)
    after = dict(layer.named_buffers())
    assert after["skipped_batches"] == 2
    assert all(torch.equal(after[k], v) for k, v in before.items() if k != "skipped_batches")
    assert check_statistics(nn.ModuleDict({"a": layer})) == {"a": 2}
    layer(torch.randn(4, 3, 2, 2))
    assert layer.num_batches_tracked == 2


def test_a_finite_batch_that_overflows_the_averages_is_skipped():
    layer = BatchKalmanNorm2d(3)
    layer(torch.randn(4, 3, 2, 2))
    before = {k: v.clone() for k, v in layer.named_buffers()}
    with pytest.warns(RuntimeWarning, match="NaN or Inf"):
        layer(torch.randn(4, 3, 2, 2) * 1e10 + 3e19)
    assert layer.skipped_batches == 1
    assert torch.equal(layer.running_var, before["running_var"])


def test_a_bad_prior_is_skipped_too():
    layer = BatchKalmanNorm2d(3, 3, transition="identity")
    with pytest.warns(RuntimeWarning, match="NaN or Inf"):
        layer(torch.randn(4, 3, 2, 2), Moments(torch.full((1, 3), float("nan")), torch.ones(1, 3)))
    assert torch.equal(layer.running_mean, torch.zeros(3))


def test_reset_forgets_the_warning():
    layer = BatchKalmanNorm2d(3)
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="NaN or Inf"):
            layer(torch.full((2, 3, 2, 2), float("nan")))
        layer.reset_running_stats()
        assert layer.skipped_batches == 0


def test_cumulative_observations_never_forget():
    """momentum=None: a plain average over all batches, also after observation_momentum would have taken over."""
    layer = BatchKalmanNorm2d(2, momentum=None, dtype=torch.float64)
    parts = [torch.randn(2, 2, 3, 3, dtype=torch.float64) + i for i in range(80)]
    for part in parts:
        layer(part)
    torch.testing.assert_close(layer.observed_mean, torch.cat(parts).mean((0, 2, 3)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "ask", [nn.Module.eval, nn.Module.state_dict, check_statistics], ids=["eval", "state_dict", "check"]
)
def test_a_skipped_batch_is_reported_when_asked(ask):
    """Where the forward may not wait for the device, the buffer remembers."""
    layer = BatchKalmanNorm2d(3)
    layer.skipped_batches.fill_(1)
    with pytest.warns(RuntimeWarning, match="NaN or Inf"):
        ask(layer)


def test_frozen_statistics_survive_train():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), BatchKalmanNorm2d(4, statistics_batch_size=2))
    for _ in range(3):
        model(torch.randn(4, 3, 6, 6))
    freeze_statistics(model)
    model.train()
    before = {k: v.clone() for k, v in model[1].named_buffers()}
    x = torch.randn(4, 3, 6, 6)
    y = model(x)
    y.square().sum().backward()
    assert model[1].weight.grad is not None
    assert all(torch.equal(v, before[k]) for k, v in model[1].named_buffers())
    torch.testing.assert_close(y, model.eval()(x))
    y = model.train()(x)
    model[1].running_mean.add_(0)  # as DDP does when it broadcasts buffers before the backward
    y.sum().backward()
    freeze_statistics(model, False)
    model.train()(x)
    assert not torch.equal(model[1].running_mean, before["running_mean"])


def test_freezing_names_what_it_cannot_freeze():
    model = nn.Sequential(BatchKalmanNorm2d(4), nn.BatchNorm2d(4))
    with pytest.warns(UserWarning, match="1 torch BatchNorm layers are not frozen.*: 1"):
        freeze_statistics(model)


def accumulate(layer, x, m):
    """k micro-steps of m examples, gradients summed."""
    for part in x.split(m):
        layer(part).square().mul(torch.arange(1.0, 5.0)).sum().backward()


@pytest.mark.parametrize("momentum", [0.1, None])
def test_gradient_accumulation(momentum):
    """k micro-steps of m equal one step of k·m in groups of m, in gradients.

    Running statistics: with `momentum=None` they agree too; with a momentum, k micro-steps move them k times, so the
    past keeps (1-α)^k instead of 1-α. Choose α/k to compare.
    """
    x = torch.randn(8, 2, 3, 4) + torch.randn(8, 2, 1, 1)
    grouped, micro = (BatchKalmanNorm2d(2, statistics_batch_size=2, momentum=momentum) for _ in range(2))
    grouped(x).square().mul(torch.arange(1.0, 5.0)).sum().backward()
    accumulate(micro, x, 2)
    for p, q in zip(grouped.parameters(), micro.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert grouped.num_batches_tracked == 1
    assert micro.num_batches_tracked == 4
    if momentum is None:
        torch.testing.assert_close(grouped.running_mean, micro.running_mean)
        torch.testing.assert_close(grouped.running_var, micro.running_var)
        return
    past = [torch.full((2,), 5.0) for _ in range(2)]
    for layer, start in zip((grouped, micro), past, strict=True):
        layer.running_mean.copy_(start)
    grouped(x)
    for part in x.split(2):
        micro(part)
    kept = 0.9**4
    decayed = sum(0.1 * 0.9 ** (3 - i) * part.mean((0, 2, 3)) for i, part in enumerate(x.split(2)))
    torch.testing.assert_close(grouped.running_mean, 0.9 * past[0] + 0.1 * x.mean((0, 2, 3)))
    torch.testing.assert_close(micro.running_mean, kept * past[1] + decayed)


def test_gradient_accumulation_through_a_chain():
    """The same with a prior that travels from layer to layer."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = BatchKalmanNorm1d(4, statistics_batch_size=2)
            self.linear = nn.Linear(4, 5)
            self.second = BatchKalmanNorm1d(5, 4, statistics_batch_size=2)

        def forward(self, x):
            y, posterior = self.first(x, return_posterior=True)
            return self.second(self.linear(y.relu()), posterior)

    net, x = Net().double(), torch.randn(6, 4, dtype=torch.float64)
    nn.init.normal_(net.second.transition.matrix)
    net(x).pow(3).sum().backward()
    expected = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    for part in x.split(2):
        net(part).pow(3).sum().backward()
    for p, e in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, e, rtol=1e-10, atol=1e-10)


def test_two_forwards_before_one_backward():
    layer = BatchKalmanNorm2d(3, 3, statistics_batch_size=2, transition="identity", dtype=torch.float64)
    prior = Moments(torch.zeros(1, 3).double(), torch.ones(1, 3).double())
    x, z = torch.randn(4, 3, 2, 2).double(), torch.randn(4, 3, 2, 2).double()
    (layer(x, prior).pow(3).sum() + layer(z, prior).pow(3).sum()).backward()
    together = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    layer(x, prior).pow(3).sum().backward()
    layer(z, prior).pow(3).sum().backward()
    for p, e in zip(layer.parameters(), together, strict=True):
        torch.testing.assert_close(p.grad, e)
