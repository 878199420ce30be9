"""Without a prior, a last group of one value per channel joins the group before it. With a prior it trains alone."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kalmannorm import (
    BatchKalmanNorm1d,
    BatchKalmanNorm2d,
    BatchRenorm1d,
    GhostBatchNorm1d,
    Moments,
    batch_kalman_norm,
    convert,
    set_inference,
)

C = 3
F64 = torch.float64
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}
SHAPES = {
    "groups 2 and 3": ((5, C), 2),
    "one group of 3": ((3, C), 2),
    "one group of 5": ((5, C), 4),
    "groups 3, 3 and 4": ((10, C), 3),
    "one position": ((5, C, 1), 2),
    "one channel": ((5, 1), 2),
}
shapes = pytest.mark.parametrize(("shape", "m"), SHAPES.values(), ids=SHAPES.keys())


def groups(x, m):
    """The groups, from the definition."""
    parts = list(x.split(m))
    return [*parts[:-2], torch.cat(parts[-2:])]


def naive(x, m, weight, bias, eps=1e-5):
    """Output and moments, group by group. The last two rows of moments are those of the joined group."""
    outputs, means, variances = [], [], []
    for group in groups(x.flatten(1), m):
        mean = group.mean(0)
        var = (group - mean).square().mean(0)
        outputs.append((group - mean) / torch.sqrt(var + eps) * weight + bias)
        means.append(mean)
        variances.append(var)
    moments = torch.stack([*means, means[-1]]), torch.stack([*variances, variances[-1]])
    return torch.cat(outputs).view(x.shape), *moments


def close(actual, expected, dtype=F64):
    tolerance, expected = TOLERANCE[dtype], expected.detach()
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual.detach().to(F64), expected, rtol=tolerance, atol=tolerance * scale)


def drawn(kind, shape, m, dtype=F64, **options):
    layer = kind(shape[1], statistics_batch_size=m, dtype=dtype, **options)
    nn.init.uniform_(layer.weight, 0.5, 1.5)
    nn.init.normal_(layer.bias)
    return layer


@shapes
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_equals_the_naive_groups(shape, m, dtype, covariance):
    """Output, posterior and every gradient, also those that come back through the posterior."""
    layer = drawn(BatchKalmanNorm1d, shape, m, dtype, covariance=covariance)
    x = (torch.randn(shape, dtype=dtype) * 2 + 1).requires_grad_()
    leaves = x, layer.weight, layer.bias
    exact = [t.detach().to(F64).requires_grad_() for t in leaves]
    y, posterior = layer(x, return_posterior=True)
    results, expected = (y, *posterior[:2]), naive(exact[0], m, *exact[1:])
    slopes = [torch.randn_like(each) for each in results]
    grads = torch.autograd.grad(results, leaves, slopes)
    exact_grads = torch.autograd.grad(expected, exact, [slope.to(F64) for slope in slopes])
    for actual, truth in zip((*results, *grads), (*expected, *exact_grads), strict=True):
        assert actual.shape == truth.shape
        close(actual, truth, dtype)
    assert y.dtype == dtype
    if covariance == "full":
        assert posterior.cov.shape == (-(-shape[0] // m), shape[1], shape[1])


@shapes
@pytest.mark.parametrize("kind", [BatchKalmanNorm1d, GhostBatchNorm1d])
def test_running_statistics_are_those_of_all_values(shape, m, kind):
    layer, x = drawn(kind, shape, m, momentum=None), torch.randn(shape, dtype=F64) * 2 + 1
    layer(x)
    for kept in ("running", "observed"):
        close(getattr(layer, f"{kept}_mean"), x.flatten(1).mean(0))
        close(getattr(layer, f"{kept}_var"), x.flatten(1).var(0, unbiased=False))


@shapes
def test_plain_averages_weigh_groups_by_their_examples(shape, m):
    layer = drawn(BatchKalmanNorm1d, shape, m, momentum=1.0, total_variance=False)
    x = torch.randn(shape, dtype=F64)
    layer(x)
    parts = groups(x.flatten(1), m)
    close(layer.running_var, sum(len(part) * part.var(0, unbiased=False) for part in parts) / len(x))


@shapes
@pytest.mark.parametrize("mode", ["training", "batch"])
def test_renorm(shape, m, mode):
    """r and d of the joined group, as Ioffe has them."""
    layer = drawn(BatchRenorm1d, shape, m, warmup_steps=0, r_steps=1, d_steps=1)
    layer.num_batches_tracked.fill_(5)
    nn.init.normal_(layer.running_mean)
    nn.init.uniform_(layer.running_var, 0.5, 2)
    mean, sigma = layer.running_mean.clone(), (layer.running_var + layer.eps).sqrt()
    x = (torch.randn(shape, dtype=F64) * 2 + 1).requires_grad_()
    expected = []
    for group in groups(x.flatten(1), m):
        sigma_b = (group.var(0, unbiased=False) + layer.eps).sqrt()
        r = (sigma_b / sigma).clamp(1 / 3, 3).detach()
        d = ((group.mean(0) - mean) / sigma).clamp(-5, 5).detach()
        expected.append(((group - group.mean(0)) / sigma_b * r + d) * layer.weight + layer.bias)
    expected = torch.cat(expected).view(shape)
    if mode == "batch":
        set_inference(layer.eval(), "batch")
    y, leaves, g = layer(x), (x, layer.weight, layer.bias), torch.randn(shape, dtype=F64)
    close(y, expected)
    for a, e in zip(torch.autograd.grad(y, leaves, g), torch.autograd.grad(expected, leaves, g), strict=True):
        close(a, e)


@pytest.mark.parametrize("relu", [False, True], ids=["", "relu"])
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
def test_with_residual_and_relu(residual, relu):
    x, other = torch.randn(2, 5, C, 1, 1, dtype=F64)
    layer = drawn(BatchKalmanNorm2d, x.shape, 2)
    expected = naive(x, 2, layer.weight, layer.bias)[0]
    expected = expected + other if residual else expected
    close(layer(x, residual=other if residual else None, relu=relu), expected.relu() if relu else expected)


def test_the_function_and_its_derivatives():
    x, weight, bias = (t.requires_grad_() for t in torch.randn(3, 5, C, dtype=F64))

    def function(x, weight, bias):
        y, posterior = batch_kalman_norm(x, None, None, weight[0], bias[0], statistics_batch_size=2)
        return y, *posterior[:2]

    for actual, expected in zip(function(x, weight, bias), naive(x, 2, weight[0], bias[0]), strict=True):
        close(actual, expected)
    assert torch.autograd.gradcheck(function, (x, weight, bias))
    assert torch.autograd.gradgradcheck(function, (x, weight, bias))
    mapped = torch.func.vmap(lambda row: function(row, weight, bias)[0])(torch.stack([x, 2 * x]))
    close(mapped[1], function(2 * x, weight, bias)[0])


def outputs(x, prior, m):
    return batch_kalman_norm(x, prior, prior and 0.5, None, None, statistics_batch_size=m)[0]


def test_other_groups_stay_as_they_are():
    """Two values in the last group, or several positions, or a prior: the last group is on its own."""

    def alone(x, prior=None, m=2):
        run = [batch_kalman_norm(part, prior, prior and 0.5, None, None) for part in x.split(m)]
        return torch.cat([y for y, _ in run]), torch.cat([posterior.mean for _, posterior in run])

    belief = Moments(torch.randn(1, C).double(), torch.rand(1, C).double() + 0.5)
    for x, prior, m in (
        (torch.randn(5, C, dtype=F64), None, 3),
        (torch.randn(4, C, dtype=F64), None, 2),
        (torch.randn(5, C, 2, dtype=F64), None, 2),
        (torch.randn(5, C, dtype=F64), belief, 2),
    ):
        y, posterior = batch_kalman_norm(x, prior, prior and 0.5, None, None, statistics_batch_size=m)
        for actual, expected in zip((y, posterior.mean), alone(x, prior, m), strict=True):
            close(actual, expected)
        mapped = torch.func.vmap(partial(outputs, prior=prior, m=m))(x.unsqueeze(0))  # in plain operations
        close(mapped[0], y)
        full, _ = batch_kalman_norm(x, prior, prior and 0.5, None, None, statistics_batch_size=m, covariance="full")
        close(full, y)


def test_batch_inference_and_export():
    layer, x = drawn(BatchKalmanNorm1d, (5, C), 2), torch.randn(5, C, dtype=F64)
    expected = layer(x)
    set_inference(layer.eval(), "batch")
    close(layer(x), expected)
    close(torch.export.export(layer, (x,)).module()(x), expected)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)
    )


def trained(model, steps, run=None, batch=5):
    """Losses of some steps on one batch."""
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(batch, 4, generator=generator), torch.randn(batch, 2, generator=generator)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss((run or model)(x), target)
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("transition", ["weights", "learned"])
def test_a_converted_model_trains_and_compiles(transition):
    """The first norm has no prior, so its last group joins. Compiled code takes the same way."""
    model = convert(mlp(), torch.randn(4, 4), statistics_batch_size=2, transition=transition)
    compiled = copy.deepcopy(model)
    losses = trained(model, 20)
    assert losses[-1] < 0.8 * losses[0]
    torch._dynamo.reset()
    again = trained(compiled, 20, torch.compile(compiled, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(again, losses, rtol=1e-4, atol=1e-5)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(compiled.get_buffer(name), buffer, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("transition", ["weights", "learned"])
def test_groups_of_one_value_train_with_a_prior(transition, batch):
    """The observation has variance 0, but the posterior has not."""
    if transition == "learned":  # the first norm has no prior, and needs a map
        first = [nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 6, 3, padding=2), nn.BatchNorm1d(6), nn.AdaptiveAvgPool1d(1)]
        model = nn.Sequential(*first, nn.Flatten(), *list(mlp())[2:])
    else:
        model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), *list(mlp())[2:])
    model = convert(model, torch.randn(4, 4), statistics_batch_size=1, transition=transition)
    losses = trained(model, 30, batch=batch)
    assert losses[-1] < 0.5 * losses[0]
    assert all(buffer.isfinite().all() for buffer in model.buffers())


def test_a_group_of_one_value_without_a_prior_names_the_layer():
    model = convert(mlp(), torch.randn(4, 4), statistics_batch_size=1)
    with pytest.raises(ValueError, match=r"layer '1': with statistics_batch_size=1, x of shape \(4, 6\)") as caught:
        model(torch.randn(4, 4))
    assert "kalman" not in str(caught.value)  # the model is converted already
    model = convert(mlp(), torch.randn(4, 4), statistics_batch_size={"1": None, "": 1})
    losses = trained(model, 20)
    assert losses[-1] < losses[0]
    with pytest.raises(ValueError, match=r"layer '1': x of shape \(1, 6\) .*no prior.* Use at least two examples\.$"):
        model(torch.randn(1, 4))
