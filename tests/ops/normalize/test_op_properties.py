"""Properties over drawn shapes, dtypes, layouts and groups."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kalmannorm import BatchKalmanNorm1d, BatchKalmanNorm2d, BatchKalmanNorm3d, Moments, batch_kalman_norm
from kalmannorm._ops.normalize import naive

settings.register_profile("kalmannorm", deadline=None, max_examples=80, derandomize=True)
settings.load_profile("kalmannorm")

LAYERS = {0: BatchKalmanNorm1d, 1: BatchKalmanNorm1d, 2: BatchKalmanNorm2d, 3: BatchKalmanNorm3d}
FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}
DTYPES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


@st.composite
def inputs(draw, dtypes=tuple(DTYPES)):
    """x of any rank and layout (dense or strided), a statistics batch, and a generator of its own."""
    rank = draw(st.integers(0, 3))
    shape = (draw(st.integers(1, 9)), draw(st.integers(1, 6)), *draw(st.tuples(*[st.integers(1, 5)] * rank)))
    dtype = draw(st.sampled_from(dtypes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale, offset = draw(st.sampled_from([(1.0, 0.0), (0.01, 0.0), (3.0, 10.0)]))
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * scale + offset
    x = x.to(dtype)
    layout = draw(st.sampled_from(["contiguous", "channels_last", "transposed", "sliced"]))
    if layout == "channels_last" and rank in FORMATS:
        x = x.contiguous(memory_format=FORMATS[rank])
    elif layout == "transposed":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "sliced":
        x = torch.cat([x, x], 1)[:, ::2] if shape[1] > 1 else torch.cat([x, x], 0)[::2]
    m = draw(st.integers(1, x.shape[0] + 2))
    return x, m, generator


def prior_for(x, m, generator, rows):
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    G = -(-x.shape[0] // m) if rows else 1
    mean = torch.randn(G, x.shape[1], generator=generator, dtype=torch.float64).to(dtype)
    var = (torch.rand(G, x.shape[1], generator=generator, dtype=torch.float64) + 0.3).to(dtype)
    return Moments(mean, var)


def close(actual, expected, tolerance):
    actual, expected = actual.double(), expected.double()
    return (actual - expected).norm() <= tolerance * expected.norm() + tolerance * 1e-2


@given(inputs(), st.booleans(), st.floats(0.05, 0.95))
def test_op_equals_reference(drawn, rows, gain):
    x, m, generator = drawn
    prior = prior_for(x, m, generator, rows)
    weight, bias = (torch.randn(x.shape[1], generator=generator).to(prior.mean.dtype) for _ in range(2))
    q = torch.tensor(gain, dtype=prior.mean.dtype)
    leaves = [t.detach().requires_grad_() for t in (x, *prior[:2], q, weight, bias)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    y, posterior = batch_kalman_norm(leaves[0], Moments(*leaves[1:3]), *leaves[3:], statistics_batch_size=m)
    expected, mean, var, *_ = naive.batch_kalman_norm(*exact, m, 1e-5)
    tolerance = DTYPES[x.dtype]
    assert y.dtype == x.dtype
    assert close(y, expected, tolerance)
    assert close(posterior.mean, mean, tolerance)
    assert close(posterior.var, var, tolerance)
    g = torch.randn(y.shape, generator=generator).to(y.dtype)
    actual_grads = torch.autograd.grad(y, leaves, g)
    expected_grads = torch.autograd.grad(expected, exact, g.double())
    # Gradients of one channel may cancel to nothing; they are held against the largest of their kind.
    largest = max(e.norm() for e in expected_grads)
    for a, e in zip(actual_grads, expected_grads, strict=True):
        assert (a.double() - e).norm() <= 3 * tolerance * (e.norm() + 0.05 * largest) + 1e-12


@given(inputs(dtypes=(torch.float64,)))
def test_groups_are_separate_and_layouts_do_not_matter(drawn):
    x, m, generator = drawn
    prior = prior_for(x, m, generator, rows=True)
    y, posterior = batch_kalman_norm(x, prior, 0.4, None, None, statistics_batch_size=m)
    dense, _ = batch_kalman_norm(x.contiguous(), prior, 0.4, None, None, statistics_batch_size=m)
    torch.testing.assert_close(y, dense, rtol=1e-10, atol=1e-10)
    for group, part in enumerate(x.split(m)):
        row = Moments(prior.mean[group : group + 1], prior.var[group : group + 1])
        alone, moments = batch_kalman_norm(part, row, 0.4, None, None)
        torch.testing.assert_close(y[group * m : group * m + m], alone, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(posterior.mean[group], moments.mean[0], rtol=1e-10, atol=1e-10)


@given(inputs(dtypes=(torch.float64,)), st.data())
def test_example_inference_ignores_neighbours(drawn, data):
    x, m, generator = drawn
    layer = LAYERS[x.dim() - 2](
        x.shape[1], x.shape[1], statistics_batch_size=m, transition="identity", inference="example", dtype=x.dtype
    )
    layer(x, prior_for(x, m, generator, rows=True))
    layer.eval()
    prior = prior_for(x, 1, generator, rows=True)
    chosen = data.draw(st.integers(0, x.shape[0] - 1))
    together = layer(x, prior)[chosen]
    alone = layer(x[chosen : chosen + 1], Moments(*(t[chosen : chosen + 1] for t in prior[:2])))[0]
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)


@given(inputs(dtypes=(torch.float64,)), st.data())
def test_cumulative_statistics_do_not_depend_on_the_split(drawn, data):
    x, m, _ = drawn
    x = torch.cat([x, x + 1])  # at least two examples, so that every case has a variance
    layer = LAYERS[x.dim() - 2](x.shape[1], momentum=None, dtype=x.dtype, statistics_batch_size=None)
    cut = data.draw(st.integers(1, x.shape[0] - 1))
    positions = x[0, 0].numel()
    for part in (x[:cut], x[cut:]) if positions > 1 else (x,):
        layer.statistics_batch_size = m if positions > 1 else None
        layer(part)
    over = [0, *range(2, x.dim())]
    torch.testing.assert_close(layer.running_mean, x.mean(over), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(layer.running_var, x.var(over, correction=0), rtol=1e-8, atol=1e-9)


@given(inputs(dtypes=(torch.float32,)), st.floats(0.05, 0.95))
def test_posterior_lies_between_prior_and_observation(drawn, gain):
    """The mean is a mixture, and the variance at least the smaller one's share."""
    x, m, generator = drawn
    prior = prior_for(x, m, generator, rows=True)
    _, posterior = batch_kalman_norm(x, prior, gain, None, None, statistics_batch_size=m)
    _, observed_mean, observed_var, *_ = naive.batch_kalman_norm(x, None, None, None, None, None, m, 1e-5)
    low, high = torch.minimum(prior.mean, observed_mean), torch.maximum(prior.mean, observed_mean)
    slack = 1e-4 * (1 + observed_mean.abs())
    assert ((posterior.mean >= low - slack) & (posterior.mean <= high + slack)).all()
    assert (posterior.var >= torch.minimum(prior.var, observed_var) - 1e-4 * (1 + observed_var)).all()
