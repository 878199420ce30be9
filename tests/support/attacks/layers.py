"""A layer on a case: its training forward and backward, its buffers afterwards, and inference with them."""

from __future__ import annotations

import random
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from kalmannorm import (
    BatchKalmanNorm1d,
    BatchKalmanNorm2d,
    BatchRenorm1d,
    BatchRenorm2d,
    GhostBatchNorm1d,
    GhostBatchNorm2d,
    Moments,
)
from kalmannorm._filter import GAIN_MARGIN
from kalmannorm._ops.normalize import naive as reference
from support.attacks import bounds
from support.attacks.bounds import Amount, Pair
from support.attacks.cases import Case, draw_prior
from support.attacks.judging import Judge, Results, Truth, certain

LAYERS: dict[str, tuple[Any, Any]] = {
    "kalman": (BatchKalmanNorm1d, BatchKalmanNorm2d),
    "ghost": (GhostBatchNorm1d, GhostBatchNorm2d),
    "renorm": (BatchRenorm1d, BatchRenorm2d),
}
LOGITS = (-40.0, -10.0, 0.0, 1e-6, 10.0, 40.0)


def attack_layer(kind: str, case: Case, dice: random.Random, call: str, found: Counter[str]) -> None:
    """The case's prior, if the layer takes one; parameters and buffers are drawn here."""
    positions = case.x[0, 0].numel()
    if kind != "kalman":
        case = case._replace(prior=None, gain=None)
    if case.prior is None and positions == 1 in (min(case.size, case.x.shape[0]), case.x.shape[0] % case.size):
        return  # one value has no variance: the layer raises, or the value joins the group before it
    layer = draw_layer(kind, case, dice)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    none = torch.zeros_like(case.grads[1])
    case = case._replace(
        gain=None if case.prior is None else layer.gain.detach(),
        weight=layer.weight.detach().to(none.dtype),
        bias=layer.bias.detach().to(none.dtype),
        grads=[*case.grads[:3], none, none] if case.prior is not None else [case.grads[0], *[none] * 4],
    )
    results = trained(layer, case)
    truth = renormalized(layer, case, before, call, found) if kind == "renorm" else Truth(case, call, found)
    if "gradient of gain" in results:
        through_sigmoid(layer.gain_logit.detach().double(), truth)
    truth.compare(results)
    judge_buffers(layer, truth, before, found)
    judge_inference(layer, case, truth)


def draw_layer(kind: str, case: Case, dice: random.Random) -> Any:
    C, statistics = case.x.shape[1], case.grads[1].dtype
    options: dict[str, Any] = {"momentum": dice.choice([0.1, 0.1, 0.01, 1.0, None])}
    if kind == "kalman" and case.gain is not None:
        options |= {"prior_features": C, "transition": "identity", "per_channel_gain": case.gain.dim() > 0}
    if kind == "renorm":
        options |= {"warmup_steps": 0, "r_steps": 2, "d_steps": 2}
    else:
        options["total_variance"] = dice.random() < 0.7
    shape = LAYERS[kind][case.x.dim() == 4]
    layer = shape(C, statistics_batch_size=case.size, eps=case.eps, dtype=case.x.dtype, **options)
    with torch.no_grad():
        for parameter in (layer.weight, layer.bias):
            parameter.copy_(torch.randn(C) * 10 ** dice.uniform(-2, 2))
        if case.prior is not None:
            logits = torch.tensor([dice.choice((*LOGITS, dice.gauss(0, 3))) for _ in range(C)])
            layer.gain_logit.copy_(logits[: layer.gain_logit.numel()].view_as(layer.gain_logit))
        if dice.random() < 0.5:
            mean, var = draw_prior(case.x, 1, statistics, dice)
            layer.running_mean.copy_(mean[0])
            layer.running_var.copy_(var[0])
            layer.num_batches_tracked.fill_(dice.choice([1, 5]))
    return layer


def trained(layer: Any, case: Case) -> Results:
    """A training forward and its backward: what the op gives, as far as a layer shows it."""
    x = case.x.detach().requires_grad_()
    given = {"x": x, "weight": layer.weight, "bias": layer.bias}
    if case.prior is None:
        y = layer(x)
        outputs: dict[str, Tensor] = {"y": y}
    else:
        mean, var = (t.clone().requires_grad_() for t in case.prior)
        y, posterior = layer(x, Moments(mean, var), return_posterior=True)
        outputs = {"y": y, "mean": posterior.mean, "var": posterior.var}
        given |= {"prior mean": mean, "prior var": var, "gain": layer.gain_logit}
    arriving = case.grads[: len(outputs)]
    grads = torch.autograd.grad(list(outputs.values()), list(given.values()), arriving)
    results = {name: t.detach() for name, t in outputs.items()}
    return results | {f"gradient of {name}": g for name, g in zip(given, grads, strict=True)}


def through_sigmoid(logit: Tensor, truth: Truth) -> None:
    """From the gradient of the gain to that of its logit. A float32 sigmoid next to 1 is right to one rounding."""
    name, share = "gradient of gain", torch.sigmoid(logit)
    slope = (1 - 2 * GAIN_MARGIN) * share * (1 - share)
    truth.errors[name] = truth.errors[name] * slope + truth.at.u * truth.terms[name]
    truth.exact, truth.naive = ({**results, name: results[name] * slope} for results in (truth.exact, truth.naive))


def renormalized(layer: Any, case: Case, before: Results, call: str, found: Counter[str]) -> Truth:
    """Batch Renorm is the op with γ r and γ d + β in a row for each group, of which γ and β get their gradients."""
    eps = case.eps
    mean, var = Truth(case, call, Counter()).forward[:2]
    u = bounds.precision(case.grads[1].dtype, 1).u
    steps = min(int(before["num_batches_tracked"]) / 2, 1)
    r_max, d_max = 1 + (layer.r_max - 1) * steps, layer.d_max * steps
    centre, sigma = before["running_mean"].double(), (before["running_var"].double() + eps).sqrt()
    ratio = (var.value + eps).sqrt() / sigma
    r, d = ratio.clamp(1 / r_max, r_max), ((mean.value - centre) / sigma).clamp(-d_max, d_max)
    r_error = (r * (0.5 * var.error / (var.value + eps) + u)).clamp(max=r_max - 1 / r_max) + u * r
    d_error = ((mean.error + u * (mean.value.abs() + centre.abs())) / sigma).clamp(max=2 * d_max) + u * d.abs()
    weight, bias = case.weight.double(), case.bias.double()
    size = weight.abs() * d.abs() + bias.abs()
    parameters = (
        Amount(weight * r, weight.abs() * r, weight.abs() * r_error),
        Amount(weight * d + bias, size, weight.abs() * d_error + u * size),
    )
    truth = Truth(case._replace(weight=weight * r, bias=weight * d + bias), call, found, parameters)
    of_weight, of_bias = "gradient of weight", "gradient of bias"

    def gathered(results: Results) -> Results:
        rows = results[of_weight] * r + results[of_bias] * d
        return {**results, of_weight: rows.sum(0), of_bias: results[of_bias].sum(0)}

    truth.exact, truth.naive = gathered(truth.exact), gathered(truth.naive)
    errors, terms = truth.errors, truth.terms
    errors[of_weight] = errors[of_weight] * r + terms[of_weight] * r_error
    errors[of_weight] = errors[of_weight] + errors[of_bias] * d.abs() + terms[of_bias] * d_error
    return truth


def judge_buffers(layer: Any, truth: Truth, before: Results, found: Counter[str]) -> None:
    """All are finite; and they have moved as the formulas say, or not at all where a statistic is not finite."""
    after = dict(layer.named_buffers())
    if not all(buffer.isfinite().all() for buffer in after.values()):
        found["broken_buffers"] += 1
        print(f"{truth.judge.call}: buffers are not finite: {after}", file=sys.stderr)
        return
    forward, judge, at = truth.forward, truth.judge, truth.at
    values = int(truth.slabs.count.sum())
    shares = truth.slabs.count / values
    seen = int(before["num_batches_tracked"]) * values + values
    momentum, share = layer.momentum, values / seen
    kind = layer._averages()
    posterior = bounds.pooled((forward.mean, forward.var), shares, kind, layer.eps, at)
    rows = {("running_mean", "running_var"): (posterior, share if momentum is None else momentum, kind)}
    if "observed_mean" in after:
        seen_by = bounds.pooled((forward.observed_mean, forward.observed_var), shares, "total", layer.eps, at)
        slow = share if momentum is None else max(4 * share / (1 + 3 * share), layer.observation_momentum)
        rows["observed_mean", "observed_var"] = (seen_by, slow, "total")
    moves: dict[str, Amount] = {}
    for names, (row, alpha, averages) in rows.items():
        mean, var = (before[name].double() for name in names)
        moves |= zip(names, bounds.updated(mean, var, row, alpha, averages, layer.eps, at), strict=True)
    stays = not all(amount.value.isfinite().all() for amount in moves.values())
    narrow = judge.overflows.any() or any((amount.terms > at.largest).any() for amount in moves.values())
    if narrow and judge.x.isfinite().all():
        return
    skipped, right = after["skipped_batches"], torch.tensor(int(stays))
    judge.say("skipped batches", skipped != right, skipped, right, torch.zeros(()), right)
    for name, amount in moves.items():
        exact = before[name].double() if stays else amount.value
        allowed = torch.zeros_like(exact) if stays else 2 * amount.error
        wrong = ~((after[name].double() - exact).abs() <= allowed) & (allowed < torch.inf)
        judge.say(name, wrong, after[name].double(), exact, allowed, exact)
        found["judged"] += exact.numel()


def judge_inference(layer: Any, case: Case, truth: Truth) -> None:
    """By the running statistics; and of each example among average ones, where the layer can."""
    layer.eval()
    x, slabs = case.x, truth.slabs
    with torch.no_grad():
        running = certain(layer.running_mean, x), certain(layer.running_var, x)
        judge_output(layer(x), layer, running, naively(x, *rows_of(running), layer), slabs, truth)
        if "example" not in layer.inference_modes or (case.prior is None and x[0, 0].numel() == 1):
            return
        layer.set_inference("example")
        slabs = bounds.Slabs(x.double(), 1)
        average = certain(layer.observed_mean, x), certain(layer.observed_var, x)
        share = torch.tensor(1 / layer.statistics_batch_size, dtype=torch.float64)
        parts = [(share, bounds.observe(x.double(), slabs, truth.at)), (1 - share, average)]
        given = ()
        if case.prior is not None:
            rows = [row[:1] for row in case.prior]
            gain, given = layer.gain.double(), (Moments(*rows),)
            prior = certain(rows[0], x), certain(rows[1], x)
            parts = [(gain * weight, moments) for weight, moments in parts] + [(1 - gain, prior)]
        mixture = bounds.mixed(parts, truth.at)
        seen = reference.batch_kalman_norm(x, *[None] * 5, 1, layer.eps)[3:]
        narrow = [(parts[0][0], *seen), *((weight, *rows_of(moments)) for weight, moments in parts[1:])]
        naive = mixed_naively(narrow, seen[0].dtype)
        judge_output(layer(x, *given), layer, mixture, naively(x, *naive, layer), slabs, truth)


def rows_of(moments: Pair) -> tuple[Tensor, Tensor]:
    return moments[0].value, moments[1].value


def mixed_naively(parts: list[tuple[Tensor, Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mean and variance of a mixture: the last two parts by the filter's formulas, then the next, in this dtype."""
    *others, (weight, mean, var) = [[t.to(dtype) for t in part] for part in parts if (part[0] > 0).all()]
    for share, other, spread in reversed(others):
        weight = weight + share
        q = share / weight
        d = other - mean
        mean, var = (1 - q) * mean + q * other, (1 - q) * var + q * spread + (1 - q) * q * d**2
    return mean, var


def naively(x: Tensor, mean: Tensor, var: Tensor, layer: Any) -> Tensor:
    """The output by these statistics, by the textbook's formula in the dtype of the statistics."""
    dtype = layer.running_mean.dtype
    mean, var = mean.to(dtype), var.to(dtype)
    shape = (mean.shape[0], -1, *[1] * (x.dim() - 2))
    y = (x.to(dtype) - mean.view(shape)) / (var + layer.eps).sqrt().view(shape)
    rows = (1, -1, *[1] * (x.dim() - 2))
    return y * layer.weight.to(dtype).view(rows) + layer.bias.to(dtype).view(rows)


def judge_output(y: Tensor, layer: Any, by: Pair, naive: Tensor, slabs: bounds.Slabs, truth: Truth) -> None:
    """y by these moments, rows (1, C) or (G, C)."""
    x, at = truth.judge.x, truth.at
    weight, bias = certain(layer.weight.detach(), x), certain(layer.bias.detach(), x)
    rho = bounds.inverse_deviation(by[1], layer.eps, at)
    exact = bounds.normalized(x.double(), slabs, by[0], rho, weight, bias, at)
    judge = Judge(f"{truth.judge.call}, {layer.inference} inference", x, slabs, at, truth.judge.found)
    summed = by[1].terms * slabs.count
    judge.beyond(slabs.view(exact.terms).amax((1, 3)), summed.expand_as(judge.overflows))
    judge.compare("y", y, exact.value, naive, exact.error)
