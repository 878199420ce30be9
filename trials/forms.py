"""The forms that are tried. A form says what normalizes in training, and how the backward treats the batch's share.

`Form.apply` converts a BatchNorm model. Most forms are the library's own norms, some with its `ClosingPhase`. The time
filter is not in the library. It is built here from the library's op:

    forward   the op with prior (μ, Σ), the moving moments of earlier steps, and gain q = 1 - λ
    backward  the op's gradient, minus ρ λ γ (ā + x̂ c̄): ā and c̄ are moving averages of g and g x̂

The op returns the observed moments with their gradient. So the second line is a gradient that `Inject` adds at x̄ and
S. ā and c̄ need no additional pass, because they are averages of dβ / M and dγ / M.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import kalmannorm
from kalmannorm._norms.grouped import GroupedNorm
from kalmannorm._norms.transition import LearnedTransition
from kalmannorm._ops.filters.definition import centred, standardized
from kalmannorm.functional import normalize
from kalmannorm.moments import Moments

RATIO = 4.0
"""The largest factor by which the predicted change may scale a variance."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """One way to normalize. Fields that the kind does not use have their defaults."""

    kind: Literal["batch", "ghost", "renorm", "group", "standardized", "moving", "online", "kalman", "time"]
    """`standardized` is group norm with standardized weights, `moving` Moving Average Batch Norm, `online` Online
    Normalization."""
    m: int = 128
    real: int = 32
    """For `moving`: the batch that it imitates."""
    filters: Literal["plain", "centred", "standardized", "scaled"] = "plain"
    """Whether the filters of convolutions are centred or standardized. `standardized` and `moving` do it anyway.
    "scaled", for `kalman` and `ghost`: the library's `weight_standardization`, which also divides by the root of the
    number of inputs. It takes fewer launches."""
    transition: Literal["weights", "learned"] = "weights"
    """For `kalman`: what computes the prior. "learned" is the paper's."""
    gain: float | None = None
    """For `kalman`: the initial value of the gain. None: 0.5 for "weights", 0.9 for "learned"."""
    fixed: bool = False
    """For `kalman`: the gain keeps its initial value."""
    error: float | None = None
    """For `kalman`: the initial gain of each layer follows from the noise of its observation. This is the mean squared
    error that its prior is taken to have, in units of the variance: see `_gains_by_noise`. It replaces `gain`."""
    channels: bool = False
    """For `kalman`: one gain for each channel instead of one for each layer."""
    start: Literal["zero", "small", "identity"] = "zero"
    """For "learned": the initial matrix A. "small" is a tenth of Glorot's, "identity" passes on the first channels."""
    rank: int | None = None
    """For "learned": the rank of A. None: dense."""
    noise: Literal["shared", "layer", "channel"] = "shared"
    """For "learned": one r for the model, one for each layer, or one for each channel."""
    blind: bool = False
    """For `kalman`: no gradient goes through the prior into the layers before. Gain, A and r still learn."""
    total: bool = True
    """For `kalman` and `ghost`: the running variance includes the variance of the group means."""
    momentum: float | None = None
    """Of the running statistics, per step. None: that of the norm."""
    closing: bool = False
    """For `kalman` and `ghost`: correct towards running statistics late in training, as Batch Renorm."""
    close: tuple[float, float] = (0.5, 0.8)
    """For `closing`: the shares of training between which the correction rises from none to all."""
    means: Literal["own", "average"] = "own"
    """For `closing`: the backward's means of g and g x̂ are those of the group, or they become moving averages."""
    fade: float = 0.0
    """For `kalman` with `means` "average": 1 is the library's `fade_prior`. The gain rises with λ to 1, so running
    statistics become those of observations, and gradients go through observations alone."""
    alpha: float = 0.1
    """For `time`: momentum of the moving moments, per step."""
    gradient_alpha: float | None = None
    """For `time`: momentum of ā and c̄; None is `alpha`. For `closing` with `means` "average": that of the averages of
    gradients; None is the library's 0.1."""
    top: float = 1.0
    """For `time` and `closing`: λ at the end of its rise."""
    ramp: tuple[float, float] = (0.05, 0.25)
    """For `time`: the shares of training between which λ rises from 0 to `top`."""
    level: Literal["time", "drift", "mixture"] = "time"
    """For `time`: "drift" changes μ and Σ by the change of the depth prior since they were averaged. "mixture" combines
    three sources: the depth prior by (1 - λ) p, the moving moments by λ, the observation by (1 - λ) q. So it is BKN at
    λ = 0 and the time filter at λ = 1."""
    backward: Literal["average", "feedback", "depth", "none"] = "average"
    """For `time`: ā and c̄ as plain averages or by error feedback, or gradients through the depth prior instead."""
    power: float = 0.0
    """For `time`: α falls with the learning rate. It is multiplied by (rate / first rate) to this power."""

    @property
    def uses_depth(self) -> bool:
        return self.kind == "kalman" or (self.kind == "time" and (self.level != "time" or self.backward == "depth"))

    @property
    def name(self) -> str:
        """The kind, m, and every field that is not at its default."""
        words = [f"{self.kind} m={self.m}"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in ("kind", "m") and value != field.default:
                words.append(f"{field.name}={value}")
        return " ".join(words)

    def apply(self, model: nn.Module, example: Tensor, steps: int) -> Time | kalmannorm.ClosingPhase | None:
        """Convert the model in place. Some forms also return an object that the training loop has to call."""
        if self.filters in ("centred", "standardized"):
            _compute_filters(model, {"centred": centred, "standardized": standardized}[self.filters])
        size: dict[str, Any] = {"statistics_batch_size": self.m}
        if self.momentum is not None:
            size["momentum"] = self.momentum
        if self.kind == "batch":
            return None
        if self.kind in ("group", "standardized"):
            kalmannorm.convert(
                model, example, to="group", inplace=True, weight_standardization=self.kind == "standardized"
            )
            return None
        if self.kind == "online":
            kalmannorm.convert(model, example, to="online", inplace=True)
            return None
        if self.kind == "moving":
            kalmannorm.convert(model, example, to="moving-average", inplace=True, real_batch_size=self.real, **size)
            return None
        if self.kind == "renorm":
            schedule = {"warmup_steps": steps // 32, "r_steps": steps // 4, "d_steps": 5 * steps // 32}
            kalmannorm.convert(model, example, to="renorm", inplace=True, **size, **schedule)
            return None
        size["total_variance"] = self.total
        if self.filters == "scaled":
            size["weight_standardization"] = True
        if self.uses_depth:
            self._filter(model, example, size)
        else:
            kalmannorm.convert(model, example, to="ghost", inplace=True, **size)
        if self.closing and self.means == "average":
            start, end = self.close
            momentum = {} if self.gradient_alpha is None else {"momentum": self.gradient_alpha}
            return kalmannorm.ClosingPhase(
                model, steps, start=start, end=end, top=self.top, fade_prior=self.fade == 1, **momentum
            )
        if self.kind == "time" or self.closing:
            return Time(self, [module for module in model.modules() if isinstance(module, GroupedNorm)])
        return None

    def _filter(self, model: nn.Module, example: Tensor, options: dict[str, Any]) -> None:
        """Convert to Kalman norms, and change what `convert` has no option for."""
        if self.gain is not None:
            options["gain"] = self.gain
        if self.rank is not None:
            options["rank"] = self.rank
        options["per_channel_gain"] = self.channels
        kalmannorm.convert(model, example, transition=self.transition, inplace=True, **options)
        if self.error is not None:
            _gains_by_noise(model, example, self.m, self.error)
        for norm in (module for module in model.modules() if isinstance(module, kalmannorm.BatchKalmanNorm)):
            if norm.gain_logit is None:
                continue
            norm.gain_logit.requires_grad_(not self.fixed)
            if self.blind:
                norm._predict = types.MethodType(_blind, norm)  # type: ignore[method-assign]
            if norm.transition is not None:
                self._begin(norm.transition)

    def _begin(self, transition: LearnedTransition) -> None:
        """The initial A and r of one norm."""
        with torch.no_grad():
            if self.start == "small":
                nn.init.xavier_uniform_(transition.matrix, gain=0.1)
            elif self.start == "identity":
                nn.init.eye_(transition.matrix)
        if self.noise != "shared":
            factor = transition.matrix if transition.rank is None else transition.left
            transition._lender.clear()
            transition.noise = nn.Parameter(factor.new_ones(len(factor) if self.noise == "channel" else 1))


class _Computed(nn.Module):
    """A parametrization by a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, weight: Tensor) -> Tensor:
        return self.function(weight)


def _compute_filters(model: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Priors read the computed weights, as the convolutions do."""
    for module in [module for module in model.modules() if isinstance(module, nn.Conv2d)]:
        parametrize.register_parametrization(module, "weight", _Computed(function))


class Memory:
    """The state of one norm: views of rows that contain all channels of all norms."""

    mu: Tensor
    var: Tensor
    at_mean: Tensor
    at_var: Tensor
    a: Tensor
    c: Tensor
    observation: Moments
    prior: Moments
    power: Tensor
    tilt: Tensor
    d_weight: Tensor
    d_bias: Tensor
    values: int

    def __init__(self, time: Time) -> None:
        self.time = time


class Tap(torch.autograd.Function):
    """γ and β for the op. The op's own dγ and dβ are kept, without gradients from other uses of γ and β."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor, cell: Memory) -> tuple[Tensor, Tensor]:
        ctx.cell = cell
        return weight.view_as(weight), bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, d_weight: Tensor, d_bias: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.cell.d_weight, ctx.cell.d_bias = d_weight.detach(), d_bias.detach()
        return d_weight, d_bias, None


class Inject(torch.autograd.Function):
    """Returns y unchanged. The backward adds these gradients at the observed moments."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, mean: Tensor, var: Tensor, at_mean: Tensor, at_var: Tensor) -> Tensor:
        ctx.save_for_backward(at_mean, at_var)
        ctx.mark_dirty(y)  # not a view, because an in-place activation could not write into it
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        at_mean, at_var = ctx.saved_tensors
        return grad, at_mean, at_var, None, None


class Time:
    """The state of all norms of a model, in rows, so that a step updates it in a few operations."""

    def __init__(self, form: Form, norms: list[GroupedNorm]) -> None:
        self.form, self.norms = form, norms
        device = norms[0].running_mean.device  # type: ignore[union-attr]
        widths = [norm.num_features for norm in norms]
        names = {"mu": 0.0, "var": 1.0, "a": 0.0, "c": 0.0, "at_mean": 0.0, "at_var": 1.0}
        self.rows = {name: torch.full((sum(widths),), fill, device=device) for name, fill in names.items()}
        self.lam = torch.zeros((), device=device)
        self.alpha = torch.ones((), device=device)
        self.gradient_alpha = torch.ones((), device=device)
        self.counted = torch.zeros((), device=device)
        parts = {name: row.split(widths) for name, row in self.rows.items()}
        self.cells = []
        for number, norm in enumerate(norms):
            cell = Memory(self)
            for name in names:
                setattr(cell, name, parts[name][number])
            self.cells.append(cell)
            norm.time_cell = cell  # type: ignore[assignment]
            norm._normalize = types.MethodType(_timed if form.kind == "time" else _closing, norm)  # type: ignore[method-assign]
            if form.kind == "time":
                norm._track_batch = types.MethodType(_untracked, norm)  # type: ignore[method-assign]

    def schedule(self, share: float) -> float:
        """λ at this share of the training."""
        start, end = self.form.ramp if self.form.kind == "time" else self.form.close
        return self.form.top * min(max((share - start) / (end - start), 0.0), 1.0)

    @torch.no_grad()
    def move(self, rate: Tensor) -> None:
        """After the backward: update the state from this step.

        `rate` is the learning rate relative to the first one.
        """
        if self.form.kind != "time":
            return
        cells, rows = self.cells, self.rows
        start = 1 / (self.counted + 1)
        falling = rate.clamp(min=0.01) ** self.form.power
        torch.maximum(self.form.alpha * falling, start, out=self.alpha)
        torch.maximum((self.form.gradient_alpha or self.form.alpha) * falling, start, out=self.gradient_alpha)
        self.counted += 1
        counts = [cell.values for cell in cells]
        a = torch.cat([cell.d_bias / count for cell, count in zip(cells, counts, strict=True)])
        c = torch.cat([cell.d_weight / count for cell, count in zip(cells, counts, strict=True)])
        seen = torch.cat([cell.observation.mean for cell in cells], 1)
        mean = seen.mean(0)
        var = torch.cat([cell.observation.var for cell in cells], 1).mean(0) + seen.var(0, unbiased=False)
        alpha = self.alpha
        off = mean - rows["mu"]
        rows["var"].lerp_(var, alpha).add_(alpha * (1 - alpha) * off.square())
        rows["mu"].add_(alpha * off)
        if self.form.backward == "feedback":  # the part that was subtracted is the part that the batch really had
            power, tilt = (torch.cat([getattr(cell, name) for cell in cells]) for name in ("power", "tilt"))
            a = a - tilt * rows["c"]
            c = c - tilt * rows["a"] + (1 - power) * rows["c"]
        rows["a"].lerp_(a, self.gradient_alpha)
        rows["c"].lerp_(c, self.gradient_alpha)
        if self.form.uses_depth:
            missing = [cell.mu[None] for cell in cells]
            at = [getattr(cell, "prior", None) for cell in cells]
            means = torch.cat([m if p is None else p.mean for p, m in zip(at, missing, strict=True)], 1)[0]
            variances = torch.cat([1 + 0 * m if p is None else p.var for p, m in zip(at, missing, strict=True)], 1)[0]
            rows["at_mean"].lerp_(means, alpha)
            rows["at_var"].lerp_(variances, alpha)

    @torch.no_grad()
    def settle(self) -> None:
        """Before inference: write the filter's state into the population statistics."""
        if self.form.kind == "time":
            for norm, cell in zip(self.norms, self.cells, strict=True):
                norm.running_mean.copy_(cell.mu)  # type: ignore[union-attr]
                norm.running_var.copy_(cell.var)  # type: ignore[union-attr]


def _untracked(self: Any, posterior: Moments, observation: Moments, x: Tensor, size: int) -> None:
    """Does nothing, because `Time.move` updates all norms at once."""


def _timed(self: Any, x: Tensor, prior: Moments | None, gain: Any, residual: Any, relu: bool) -> Any:
    cell, form = self.time_cell, self.time_cell.time.form
    lam = cell.time.lam
    mean, var, trust = cell.mu[None], cell.var[None], 1 - lam
    if prior is not None and form.level == "mixture":
        mean, var, trust = _mixture(prior, gain, Moments(mean, var), lam)
    elif prior is not None:
        prior = Moments(prior.mean.mean(0, keepdim=True), prior.var.mean(0, keepdim=True))
        cell.prior = Moments(prior.mean.detach(), prior.var.detach())
        if form.level == "drift":
            mean = mean + (cell.prior.mean - cell.at_mean)
            var = var * (cell.prior.var / cell.at_var).clamp(1 / RATIO, RATIO)
        if form.backward == "depth":  # the old value, with the gradient of the prior
            mean = mean + (prior.mean - cell.prior.mean)
            var = var * (prior.var / cell.prior.var)
    weight, bias = Tap.apply(self.weight, self.bias, cell)  # type: ignore[no-untyped-call]
    y, posterior, seen = normalize(
        x, Moments(mean, var), trust, weight, bias, statistics_batch_size=form.m, eps=self.eps
    )
    cell.observation = Moments(seen.mean.detach(), seen.var.detach())
    cell.values = x.numel() // x.shape[1]
    with torch.no_grad():
        rho = (posterior.var + self.eps).rsqrt()
        off = seen.mean - posterior.mean
        if form.backward == "feedback":
            cell.power = ((seen.var + off.square()) * rho.square()).mean(0)
            cell.tilt = (off * rho).mean(0)
        pull = -cell.values / len(rho) * lam * rho * self.weight
        at_mean, at_var = pull * (cell.a + rho * off * cell.c), 0.5 * pull * rho * cell.c
    if form.backward in ("average", "feedback"):
        y = Inject.apply(y, seen.mean, seen.var, at_mean, at_var)  # type: ignore[no-untyped-call]
    return y, posterior, seen


def _gains_by_noise(model: nn.Module, example: Tensor, m: int, error: float) -> None:
    """The gain of a Kalman filter, P / (P + R), for the mean of a group.

    R = 1 / (m H W) is the variance of the mean of that many independent values, P the error of the prior. Both are in
    units of the variance of a channel. Neighbouring values are not independent, so R is larger in truth.
    """

    def note(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        values = m * math.prod(inputs[0].shape[2:])
        assert isinstance(norm, kalmannorm.BatchKalmanNorm) and norm.gain_logit is not None
        norm.gain_logit.fill_(math.log(error * values))  # the logit of P / (P + R)

    norms = [each for each in model.modules() if isinstance(each, kalmannorm.BatchKalmanNorm)]
    hooks = [norm.register_forward_pre_hook(note) for norm in norms if norm.gain_logit is not None]
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(example)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()


def _blind(self: Any, previous: Moments | None, rows: int) -> tuple[Moments | None, Tensor | None]:
    """A and r get gradients, and so does the gain. The layers before get none."""
    if previous is not None and self.transition is not None:
        previous = Moments(previous.mean.detach(), previous.var.detach())
    prior, gain = type(self)._predict(self, previous, rows)
    if prior is not None and self.transition is None:
        prior = Moments(prior.mean.detach(), prior.var.detach())
    return prior, gain


def _mixture(depth: Moments, gain: Tensor, time: Moments, lam: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The prior and the gain with which the op combines all three sources: mean and total variance of their mixture."""
    trust = (1 - lam) * gain
    share = lam / (1 - trust)  # the share of time in all that is not the observation
    mean = torch.lerp(depth.mean, time.mean, share)
    off = time.mean - depth.mean
    return mean, torch.lerp(depth.var, time.var, share) + share * (1 - share) * off.square(), trust


def _closing(self: Any, x: Tensor, prior: Moments | None, gain: Any, residual: Any, relu: bool) -> Any:
    """Apply r and d of Batch Renorm to the norm's own posterior, with a strength that rises from 0 to 1."""
    lam, size = self.time_cell.time.lam, self.time_cell.time.form.m
    _, posterior, _ = normalize(x.detach(), prior, gain, None, None, statistics_batch_size=size, eps=self.eps)
    with torch.no_grad():
        sigma = (self.running_var + self.eps).sqrt()
        ratio = (posterior.var + self.eps).sqrt() / sigma
        r = ratio.clamp(1 / 3, 3) ** lam
        d = lam * ((posterior.mean - self.running_mean) / sigma).clamp(-5, 5)
    weight, bias = self.weight * r, self.weight * d + self.bias
    return normalize(x, prior, gain, weight, bias, statistics_batch_size=size, eps=self.eps)
