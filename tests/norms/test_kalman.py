"""The layer against an independent transcription of Algorithm 1, and the gradients of all it learns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import gradcheck
from torch.func import functional_call

from kalmannorm import BatchKalmanNorm1d, BatchKalmanNorm2d, BatchKalmanNorm3d, Moments
from support.algorithm1 import State, train_step

CASES = {
    "1d-N6-C4": (BatchKalmanNorm1d, (6, 4)),
    "1d-N6-C4-L5": (BatchKalmanNorm1d, (6, 4, 5)),
    "2d-N6-C4-3x5": (BatchKalmanNorm2d, (6, 4, 3, 5)),
    "3d-N6-C4-2x3x2": (BatchKalmanNorm3d, (6, 4, 2, 3, 2)),
}
PRIOR_FEATURES = 3
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def make(kind, C, m, dtype=torch.float64, **options):
    """A layer whose every parameter is away from its start."""
    options = {"total_variance": False, **options}
    layer = kind(C, PRIOR_FEATURES, statistics_batch_size=m, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.5)
    return layer


def previous_moments(G, full=False, dtype=torch.float64):
    mean = torch.randn(G, PRIOR_FEATURES, dtype=dtype)
    factor = torch.randn(G, PRIOR_FEATURES, PRIOR_FEATURES, dtype=dtype)
    cov = factor @ factor.mT + 0.1 * torch.eye(PRIOR_FEATURES, dtype=dtype)
    return Moments(mean, cov.diagonal(dim1=1, dim2=2).clone(), cov if full else None)


def to_numpy(t):
    return t.detach().double().numpy()


def relative_error(actual, expected):
    return np.linalg.norm(to_numpy(actual) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("m", [1, 2, 4, None], ids=["m1", "m2", "m4-ragged", "mN"])
@pytest.mark.parametrize(("kind", "shape"), CASES.values(), ids=CASES.keys())
def test_equals_algorithm_1(kind, shape, m, dtype, covariance):
    """Output, posterior and running statistics, group by group, over two training steps."""
    N, C = shape[:2]
    size = m or N
    full = covariance == "full"
    layer = make(kind, C, m, dtype, covariance=covariance, momentum=0.3)
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    A, r, q = layer.transition.matrix, layer.transition.noise.abs().item(), layer.gain.item()
    moving = State(np.zeros(C), np.ones(C))
    for _ in range(2):
        x = (torch.randn(shape) * 2 + 1).to(dtype)
        G = -(-N // size)
        previous = previous_moments(G, full, statistics)
        y, posterior = layer(x, previous, return_posterior=True)
        outputs, states, movings, sizes = [], [], [], []
        for group, start in enumerate(range(0, N, size)):
            part = to_numpy(x[start : start + size])
            before = previous.cov if full else previous.var
            output, state, updated = train_step(
                part,
                State(to_numpy(previous.mean[group]), to_numpy(before[group])),
                to_numpy(A),
                r,
                q,
                to_numpy(layer.weight),
                to_numpy(layer.bias),
                moving,
                0.3,
                1e-5,
                full=full,
            )
            outputs.append(output)
            states.append(state)
            movings.append(updated)
            sizes.append(len(part))
        tolerance = TOLERANCE[dtype]
        filter_tolerance = min(tolerance, 1e-5)
        assert y.dtype == dtype
        assert relative_error(y, np.concatenate(outputs)) < tolerance
        assert relative_error(posterior.mean, np.stack([s.mean for s in states])) < filter_tolerance
        if full:
            assert relative_error(posterior.cov, np.stack([s.cov for s in states])) < filter_tolerance
        variances = np.stack([np.diag(s.cov) if full else s.cov for s in states])
        assert relative_error(posterior.var, variances) < filter_tolerance
        # One forward makes one move: the average of the groups' moves, weighted by their examples.
        moving = State(*(np.average([getattr(s, k) for s in movings], axis=0, weights=sizes) for k in ("mean", "cov")))
        assert relative_error(layer.running_mean, moving.mean) < filter_tolerance
        assert relative_error(layer.running_var, moving.cov) < filter_tolerance


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("rank", [None, 2], ids=["dense", "rank2"])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [(BatchKalmanNorm1d, (4, 2)), (BatchKalmanNorm2d, (4, 2, 1, 2)), (BatchKalmanNorm3d, (4, 2, 2, 1, 1))],
    ids=["1d", "2d", "3d"],
)
def test_gradcheck(kind, shape, rank, covariance):
    """x, previous mean and variance, A (dense or of low rank), r, q, γ, β; from output and posterior."""
    layer = make(kind, shape[1], 2, covariance=covariance, rank=rank)
    names = [name for name, _ in layer.named_parameters()]
    assert {"weight", "bias", "gain_logit", "transition.noise"} < set(names)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    previous = previous_moments(2)

    def function(x, mean, var, *parameters):
        given = dict(zip(names, parameters, strict=True))
        y, posterior = functional_call(layer, given, (x, Moments(mean, var)), {"return_posterior": True})
        return y, posterior.mean, posterior.var

    parameters = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    leaves = (x, previous.mean.requires_grad_(), previous.var.requires_grad_(), *parameters)
    assert gradcheck(function, leaves)


def test_gradient_flows_through_the_chain_into_the_layer_before():
    first = BatchKalmanNorm2d(3, statistics_batch_size=2, dtype=torch.float64)
    second = make(BatchKalmanNorm2d, 4, 2)
    x, z = (torch.randn(4, C, 3, 3, dtype=torch.float64, requires_grad=True) for C in (3, 4))

    def function(x, z):
        _, posterior = first(x, return_posterior=True)
        return second(z, posterior)

    assert gradcheck(function, (x, z))
    (dx,) = torch.autograd.grad(function(x, z).square().sum(), x)
    assert dx.abs().max() > 0


def test_identity_takes_previous_as_the_prior():
    layer = BatchKalmanNorm2d(3, 3, statistics_batch_size=2, transition="identity", gain=0.25, dtype=torch.float64)
    assert layer.transition is None
    x = torch.randn(4, 3, 2, 2, dtype=torch.float64)
    prior = previous_moments(2)
    _, posterior = layer(x, prior, return_posterior=True)
    observed = x.view(2, 2, 3, 4).mean((1, 3))
    torch.testing.assert_close(posterior.mean, 0.75 * prior.mean + 0.25 * observed)


def test_previous_with_another_number_of_groups_is_pooled():
    layer = make(BatchKalmanNorm2d, 4, 2)
    x, previous = torch.randn(6, 4, 2, 2, dtype=torch.float64), previous_moments(2)
    mean = previous.mean.mean(0, keepdim=True)
    var = previous.var.mean(0, keepdim=True) + previous.mean.var(0, correction=0, keepdim=True)
    torch.testing.assert_close(layer(x, previous), layer(x, Moments(mean, var)))


def test_one_row_of_previous_serves_every_group():
    layer = make(BatchKalmanNorm2d, 4, 2)
    x, previous = torch.randn(6, 4, 2, 2, dtype=torch.float64), previous_moments(1)
    rows = Moments(previous.mean.expand(3, -1), previous.var.expand(3, -1))
    torch.testing.assert_close(layer(x, previous), layer(x, rows))


def test_one_value_per_channel_works_where_a_prior_exists():
    layer = make(BatchKalmanNorm2d, 4, 1)
    x = torch.randn(3, 4, 1, 1, dtype=torch.float64, requires_grad=True)
    y = layer(x, previous_moments(3))
    y.square().sum().backward()
    assert torch.isfinite(y).all()
    assert torch.isfinite(x.grad).all()
    assert y.std() > 0
    single = make(BatchKalmanNorm1d, 4, None)
    assert torch.isfinite(single(torch.randn(1, 4, dtype=torch.float64), previous_moments(1))).all()


def test_without_prior_features_nothing_is_learned_for_the_filter():
    names = {name for name, _ in BatchKalmanNorm2d(4).named_parameters()}
    assert names == {"weight", "bias"}
    assert BatchKalmanNorm2d(4).gain is None


def test_start_of_the_filter():
    layer = BatchKalmanNorm2d(4, 3, gain=0.8)
    assert layer.gain.item() == pytest.approx(0.8)
    prior = layer.transition(Moments(torch.randn(2, 3), torch.rand(2, 3)))
    torch.testing.assert_close(prior.mean, torch.zeros(2, 4))
    torch.testing.assert_close(prior.var, torch.ones(2, 4))


@pytest.mark.parametrize("value", [-3.0, -1e-3, 0.0, 2.0])
def test_any_noise_an_optimizer_leaves_gives_a_valid_prior(value):
    layer = BatchKalmanNorm2d(4, 3)
    nn.init.constant_(layer.transition.noise, value)
    prior = layer.transition(Moments(torch.randn(2, 3), torch.rand(2, 3)))
    assert (prior.var >= 0).all()
    assert torch.isfinite(layer(torch.randn(2, 4, 3, 3), Moments(torch.randn(1, 3), torch.rand(1, 3)))).all()


@pytest.mark.parametrize("options", [{"rank": 2}, {"covariance": "full"}], ids=["low-rank", "full"])
def test_autocast_leaves_the_filter_in_float32(options):
    layer = make(BatchKalmanNorm2d, 4, 2, torch.float32, **options)
    x, previous = torch.randn(4, 4, 3, 3), previous_moments(2, dtype=torch.float32)
    _, expected = layer(x, previous, return_posterior=True)
    with torch.autocast("cpu", torch.bfloat16):
        _, posterior = layer(x, previous, return_posterior=True)
    torch.testing.assert_close(posterior.mean, expected.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(posterior.var, expected.var, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_runs_on_the_meta_device(covariance):
    layer = BatchKalmanNorm2d(4, 3, covariance=covariance, device="meta")
    previous = Moments(torch.zeros(1, 3, device="meta"), torch.ones(1, 3, device="meta"))
    assert layer(torch.randn(2, 4, 3, 3, device="meta"), previous).shape == (2, 4, 3, 3)


def test_channels_last_stays_channels_last():
    x = torch.randn(4, 4, 3, 3, dtype=torch.float64).contiguous(memory_format=torch.channels_last).requires_grad_()
    layer = make(BatchKalmanNorm2d, 4, 2)
    y = layer(x, previous_moments(2))
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    assert y.stride() == dx.stride() == x.stride()


def test_layers_share_one_noise():
    noise = nn.Parameter(torch.ones(()))
    layers = nn.ModuleList(BatchKalmanNorm2d(4, 3, noise=noise) for _ in range(3))
    assert layers[0].transition.noise is layers[2].transition.noise is noise
    assert sum(p is noise for p in layers.parameters()) == 1
    total = sum(
        layer(torch.randn(2, 4, 3, 3), previous_moments(1, dtype=torch.float32)).square().sum() for layer in layers
    )
    total.backward()
    assert noise.grad is not None


@pytest.mark.parametrize("per_channel", [False, True], ids=["scalar", "channels"])
def test_gain_is_learned_and_stays_inside(per_channel):
    layer = BatchKalmanNorm2d(4, 3, per_channel_gain=per_channel)
    assert layer.gain.shape == ((4,) if per_channel else (1,))
    before = layer.gain.detach().clone()
    optimizer = torch.optim.SGD([layer.gain_logit], lr=0.1)
    (layer(5 + torch.randn(2, 4, 3, 3), previous_moments(1, dtype=torch.float32)).abs().sum()).backward()
    optimizer.step()
    assert (layer.gain != before).all()
    for extreme in (-1e4, 1e4):
        nn.init.constant_(layer.gain_logit, extreme)
        assert ((layer.gain > 0) & (layer.gain < 1)).all()


def test_posterior_is_held_until_release_or_the_next_forward():
    layer = make(BatchKalmanNorm2d, 4, 2)
    assert layer.posterior is None
    x = torch.randn(4, 4, 2, 2, dtype=torch.float64)
    previous = previous_moments(2)
    layer(x, previous)
    held = layer.posterior
    assert held.mean.requires_grad
    assert held.var.requires_grad
    _, explicit = layer(x, previous, return_posterior=True)
    torch.testing.assert_close(explicit.var, held.var)
    assert layer.posterior is None  # the explicit form holds nothing, and the next forward lets go
    layer(x, previous)
    assert layer.posterior is not None
    layer.release()
    assert layer.posterior is None
