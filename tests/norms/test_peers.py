"""Moving Average Batch Norm, Online Normalization and computed weights, against their definitions in float64."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import kalmannorm
from kalmannorm import MovingAverageBatchNorm1d, MovingAverageBatchNorm2d, OnlineNorm, convert, fold, to_batchnorm

F64 = torch.float64


def batches(count: int, *shape: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs, and gradients of outputs."""
    rng = torch.Generator().manual_seed(seed)

    def drawn(*of):
        return torch.randn(*of, generator=rng, dtype=F64)

    return [(0.3 + (1 + 0.3 * i) * drawn(*shape), drawn(*shape)) for i in range(count)]


class MovingAverage:
    """The definition, group by group and channel by channel."""

    def __init__(self, norm) -> None:
        self.norm, self.squares, self.slopes = norm, [], []
        self.window = norm.real_batch_size // norm.statistics_batch_size
        self.running, self.steps = torch.ones(norm.num_features, dtype=F64), 0

    def step(self, x, grad):
        norm, eps, m = self.norm, self.norm.eps, self.norm.statistics_batch_size
        full, old = len(self.squares) >= self.window and self.steps > 0, self.running.clone()
        y, dx = torch.empty_like(x), torch.empty_like(x)
        d_weight, d_bias, used = torch.zeros_like(old), torch.zeros_like(old), []
        self.steps += 1
        over = (0, *range(2, x.dim()))
        view = (1, -1, *(1,) * (x.dim() - 2))
        for start in range(0, len(x), m):
            part, g = x[start : start + m], grad[start : start + m]
            self.squares.append((part**2).mean(over))
            v = torch.stack(self.squares[-self.window :]).mean(0) if full else self.squares[-1]
            used.append(v)
            r = ((v + eps) / (old + eps)).sqrt().clamp(1 / 5, 5) if self.steps >= norm.warmup_steps else v * 0 + 1
            z = part / (v + eps).sqrt().view(view)
            y[start : start + m] = norm.weight.view(view) * r.view(view) * z + norm.bias.view(view)
            scaled = g * (norm.weight * r).view(view)
            self.slopes.append((scaled * z).mean(over))
            c = torch.stack(self.slopes[-self.window :]).mean(0) if full else self.slopes[-1]
            dx[start : start + m] = (scaled - z * c.view(view)) / (v + eps).sqrt().view(view)
            d_weight += (g * r.view(view) * z).sum(over)
            d_bias += g.sum(over)
        mean = torch.stack(used).mean(0)
        self.running = mean if self.steps == 1 else 0.98 * self.running + 0.02 * mean
        return y, dx, d_weight, d_bias


@pytest.mark.parametrize(("m", "examples"), [(2, 6), (1, 4), (2, 2), (8, 8), (2, 16)])
@pytest.mark.parametrize("kind", [MovingAverageBatchNorm1d, MovingAverageBatchNorm2d])
def test_moving_average_is_its_definition(m, examples, kind):
    norm = kind(3, statistics_batch_size=m, real_batch_size=8, warmup_steps=4, dtype=F64)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
        norm.bias.normal_()
        definition = MovingAverage(norm)
        shape = (examples, 3, 4, 5) if kind is MovingAverageBatchNorm2d else (examples, 3, 4)
        for x, grad in batches(12, *shape):
            expected = definition.step(x, grad)
            with torch.enable_grad():
                y = norm(x.requires_grad_())
                found = torch.autograd.grad(y, [x, norm.weight, norm.bias], grad)
            torch.testing.assert_close((y, *found), expected, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(norm.running_var, definition.running)
    assert not norm.running_mean.any()
    x = batches(1, *shape)[0][0]
    view = (1, 3, *(1,) * (x.dim() - 2))
    z = x / (norm.running_var + norm.eps).sqrt().view(view)
    torch.testing.assert_close(norm.eval()(x), z * norm.weight.view(view) + norm.bias.view(view))


def test_micro_batches_of_the_moving_average_are_one_batch():
    whole = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).double()
    whole = convert(whole, to="moving-average", statistics_batch_size=2, real_batch_size=8, warmup_steps=3)
    parts = copy.deepcopy(whole)
    for x, _ in batches(6, 8, 2, 5, 5):
        for model, chunks in ((whole, 1), (parts, 4)):
            with kalmannorm.accumulate_statistics(model):
                for part in x.chunk(chunks):
                    (model(part)[:, 0].square().mean() / chunks).backward()
    for (name, a), b in zip(whole.named_parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)
    for (name, a), b in zip(whole.named_buffers(), parts.buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


class Online:
    """The definition, example by example."""

    def __init__(self, norm) -> None:
        self.norm = norm
        self.mean, self.e, self.d = (torch.zeros(norm.num_features, dtype=F64) for _ in range(3))
        self.var = torch.ones(norm.num_features, dtype=F64)

    def step(self, x, grad_of):
        """`grad_of` gives dL/dy of one example, (C, *), from y before γ and β."""
        norm, alpha, a = self.norm, self.norm.forward_decay, self.norm.backward_decay
        over, view = tuple(range(1, x.dim() - 1)), (-1, *(1,) * (x.dim() - 2))
        ys, rhos = [], []
        for each in x:
            rho = (self.var + norm.eps).rsqrt()
            ys.append((each - self.mean.view(view)) * rho.view(view))
            rhos.append(rho)
            mean, var = each.mean(over), each.var(over, correction=0)
            self.var = alpha * self.var + (1 - alpha) * var + alpha * (1 - alpha) * (mean - self.mean) ** 2
            self.mean = alpha * self.mean + (1 - alpha) * mean
        grads = grad_of(torch.stack(ys))
        dx = []
        for y, rho, g in zip(ys, rhos, grads, strict=True):
            g = g - (1 - a) * self.e.view(view) * y
            self.e = self.e + (g * y).mean(over)
            dx.append(g * rho.view(view) - (1 - a) * self.d.view(view))
            self.d = self.d + dx[-1].mean(over)
        return torch.stack(ys), torch.stack(dx)


def finished(norm, y):
    """γ, β, layer scaling and clamp."""
    view = (1, -1, *(1,) * (y.dim() - 2))
    y = norm.weight.view(view) * y + norm.bias.view(view)
    if norm.layer_scaling:
        y = y / (y.square().mean(tuple(range(1, y.dim())), keepdim=True) + norm.eps).sqrt()
    return y if norm.clamp is None else y.clamp(-norm.clamp, norm.clamp)


@pytest.mark.parametrize("examples", [1, 2, 7])
@pytest.mark.parametrize("options", [{}, {"layer_scaling": False, "clamp": 0.8}])
def test_online_is_its_definition(examples, options):
    norm = OnlineNorm(3, forward_decay=0.9, backward_decay=0.8, dtype=F64, **options)
    torch.nn.init.uniform_(norm.weight, 0.5, 2)
    torch.nn.init.normal_(norm.bias)
    definition = Online(norm)
    for x, grad in batches(5, examples, 3, 4, 5):

        def grad_of(y, grad=grad):
            y = y.detach().requires_grad_()
            return torch.autograd.grad(finished(norm, y), y, grad)[0]

        ys, dx = definition.step(x, grad_of)
        out = norm(x.requires_grad_())
        torch.testing.assert_close(out, finished(norm, ys), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(torch.autograd.grad(out, x, grad)[0], dx, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(norm.running_mean, definition.mean)
        torch.testing.assert_close(norm.running_var, definition.var)
        torch.testing.assert_close(norm.errors, torch.stack([definition.e, definition.d]))
    x = batches(1, examples, 3, 4, 5)[0][0]
    y = (x - norm.running_mean.view(1, 3, 1, 1)) / (norm.running_var + norm.eps).sqrt().view(1, 3, 1, 1)
    torch.testing.assert_close(norm.eval()(x), finished(norm, y))


def net(norm=nn.BatchNorm2d) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2, bias=False), norm(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).double()


CONVERSIONS = {
    "moving-average": {"to": "moving-average", "statistics_batch_size": 2, "real_batch_size": 8, "warmup_steps": 2},
    "online": {"to": "online"},
    "group-standardized": {"to": "group", "num_groups": 2, "weight_standardization": True},
}


def steps(model: nn.Module, numbers: range, through=lambda run, x: run(x)) -> None:
    optimizer = torch.optim.SGD(kalmannorm.parameter_groups(model, 1e-3), lr=0.05)
    for number in numbers:
        x, _ = batches(1, 6, 3, 8, 8, seed=number)[0]
        optimizer.zero_grad()
        nn.functional.cross_entropy(through(model, x), torch.arange(6) % 5).backward()
        optimizer.step()


@pytest.mark.parametrize("name", CONVERSIONS)
def test_resume_copies_and_checkpointing(name):
    straight = convert(net(), **CONVERSIONS[name])
    steps(straight, range(4))
    resumed = convert(net(), **CONVERSIONS[name])
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    others = [resumed, copy.deepcopy(straight), pickle.loads(pickle.dumps(straight))]
    checkpointed = copy.deepcopy(straight)
    steps(straight, range(4, 8))
    for other in others:
        steps(other, range(4, 8))
    steps(checkpointed, range(4, 8), lambda run, x: checkpoint(run, x, use_reentrant=False))
    for other in (*others, checkpointed):
        for key, value in straight.state_dict().items():
            assert torch.equal(other.state_dict()[key], value), key


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_batch_of_nan_changes_no_state(name):
    model = convert(net(), **CONVERSIONS[name])
    steps(model, range(3))
    before = {key: value.clone() for key, value in model.named_buffers()}
    with pytest.warns(RuntimeWarning) if name == "moving-average" else nullcontext():
        model(torch.full((6, 3, 8, 8), torch.nan, dtype=F64)).sum().backward()
    for key, value in model.named_buffers():
        assert torch.equal(value, before[key]) or "skipped" in key, key


def test_computed_weights_by_definition():
    x = batches(1, 2, 3, 8, 8)[0][0]
    for name, options in CONVERSIONS.items():
        if name == "online":
            continue
        conv = convert(net(), **options)[0]
        rows = conv.weight.flatten(1)
        expected = rows - rows.mean(1, keepdim=True)
        if name == "group-standardized":
            expected = expected / (rows.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
        weight = expected.view_as(conv.weight)
        torch.testing.assert_close(conv(x), nn.functional.conv2d(x, weight, conv.bias))


def is_plain(model: nn.Module) -> bool:
    return all(type(module).__module__.startswith("torch.") for module in model.modules())


def test_deployment():
    x = batches(1, 4, 3, 8, 8)[0][0]
    moving = convert(net(), **CONVERSIONS["moving-average"])
    steps(moving, range(6))
    expected = moving.eval()(x)
    for plain in (to_batchnorm(moving), convert(moving, to="batch"), fold(moving, x)):
        assert is_plain(plain)
        torch.testing.assert_close(plain.eval()(x), expected)
    assert sum(isinstance(module, nn.BatchNorm2d) for module in fold(moving, x).modules()) == 0
    group = convert(net(), **CONVERSIONS["group-standardized"])
    steps(group, range(2))
    folded = fold(group)
    assert type(folded[0]) is nn.Conv2d and type(group[0]) is not nn.Conv2d
    torch.testing.assert_close(folded(x), group.eval()(x))


@pytest.mark.parametrize("name", CONVERSIONS)
def test_bf16_and_one_example(name):
    model = convert(net().float(), **CONVERSIONS[name])
    for _ in range(10):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(1, 3, 8, 8)).square().sum()
        loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    half = copy.deepcopy(model).bfloat16()
    assert half(torch.randn(2, 3, 8, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_mistakes_are_named():
    odd = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4))
    with pytest.raises(TypeError, match=r"'0' is a ParametrizedConv2d with a weight or forward of its own"):
        convert(odd, to="moving-average", statistics_batch_size=2)
    convert(odd, to="moving-average", statistics_batch_size=2, centre_weights=False)
    with pytest.raises(ValueError, match="real_batch_size must be"):
        convert(net(), to="moving-average", statistics_batch_size=2, real_batch_size=0)
    with pytest.raises(ValueError, match="clamp must be positive"):
        convert(net(), to="online", clamp=-1)
    with pytest.raises(ValueError, match="has no meaning for to='online'"):
        convert(net(), to="online", statistics_batch_size=2)
    with pytest.raises(ValueError, match="no closing phase"):
        kalmannorm.ClosingPhase(convert(net(), **CONVERSIONS["moving-average"]), 10)
    with pytest.raises(ValueError, match="each rank has moving averages of its own"):
        MovingAverageBatchNorm2d(3, process_group="world")
