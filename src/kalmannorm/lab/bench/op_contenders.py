"""The norms that are timed, with or without a ReLU, as a user would write them.

    BatchNorm             nn.BatchNorm2d, then F.relu: the baseline
    BatchNorm, inductor   the same, compiled
    GroupNorm             nn.GroupNorm with up to 32 groups of channels, then F.relu; its parameters have x's dtype
    ghost by reshape      batch norm on groups of m examples as written by hand: groups become channels
    BKN                   BatchKalmanNorm2d with a prior and a gain, as in a converted model
    BKN settled           the same at the end of its closing phase: running statistics and averages of gradients

Layers update their running statistics. At the level of the op there are none: F.batch_norm, F.group_norm and
`kalmannorm.batch_kalman_norm` alone. A result may have another memory layout than x.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kalmannorm._norms.closing import Target
from kalmannorm._norms.kalman import BatchKalmanNorm2d
from kalmannorm._norms.settled import normalize_settled
from kalmannorm._running.prior_bundles import Prior
from kalmannorm.functional import batch_kalman_norm
from kalmannorm.lab.bench.timing import Call
from kalmannorm.lab.bench.truth import EPS, Truth, of_channels, of_groups, of_settled
from kalmannorm.moments import Moments

BASELINE, INDUCTOR, GROUPNORM = "BatchNorm", "BatchNorm, inductor", "GroupNorm"
Forward = Callable[[Tensor], Tensor]


class Inputs:
    """One set of tensors for all contenders."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format, device: torch.device):
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device)

        def image() -> Tensor:
            return normal(*shape).to(dtype).contiguous(memory_format=layout)

        channels = shape[1]
        self.x, self.upstream = (0.5 + 2 * image()).requires_grad_(), image()
        self.weight, self.bias = 1 + 0.1 * normal(channels), normal(channels)
        self.mean, self.var = normal(1, channels).requires_grad_(), (1 + normal(1, channels) ** 2).requires_grad_()
        # As in the bundles of a converted model: on a GPU one gain for each channel.
        self.gain = torch.full(() if device.type == "cpu" else (channels,), 0.6, device=device, requires_grad=True)
        self.running = 0.5 + 0.1 * normal(channels), 4 + normal(channels).abs()
        # Sums of as many gradients as there are values of a channel.
        self.averages = (self.x.numel() / channels) ** 0.5 * normal(channels, 3)

    def affine(self, dtype: torch.dtype = torch.float32) -> tuple[nn.Parameter, nn.Parameter]:
        return nn.Parameter(self.weight.to(dtype, copy=True)), nn.Parameter(self.bias.to(dtype, copy=True))


@dataclass(frozen=True)
class Contender:
    name: str
    statistics_batch: int | None
    """None if examples do not share statistics."""
    forward: Forward
    leaves: Sequence[Tensor]
    """The tensors to differentiate, x first."""
    truth: Callable[[Tensor], Truth]
    """The expected results for this gradient of the output, which is zero where a ReLU makes them uncertain."""
    passes: int
    """Reads and writes of a tensor like x, forward and backward, that it needs at least."""

    def step(self, upstream: Tensor) -> Call:
        """Forward and backward. Returns the output and the gradients of the leaves."""
        x = self.leaves[0]
        arriving = torch.empty_like(self.forward(x)).copy_(upstream)  # in the memory layout of the result

        def call() -> Sequence[Tensor]:
            y = self.forward(x)
            return y.detach(), *torch.autograd.grad(y, self.leaves, arriving)

        return call


class GhostByReshape(nn.Module):
    """Examples g, g + G, g + 2G, … form group g, so (N, C) has the memory layout of (N / G, G C)."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter, groups: int, *, track: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.groups = weight, bias, groups
        self.running_mean = torch.zeros_like(weight).repeat(groups) if track else None
        self.running_var = torch.ones_like(weight).repeat(groups) if track else None

    def forward(self, x: Tensor) -> Tensor:
        N, C, H, W = x.shape
        weight, bias = self.weight.repeat(self.groups), self.bias.repeat(self.groups)
        channels = x.reshape(-1, self.groups * C, H, W)
        y = F.batch_norm(channels, self.running_mean, self.running_var, weight, bias, True, 0.1, EPS)
        return y.view(N, C, H, W)


def contenders(
    inputs: Inputs, statistics_batches: Sequence[int], *, relu: bool, layer: bool, inductor: bool
) -> list[Contender]:
    """The baseline first. Contenders that depend on the statistics batch appear once for each size."""
    x = inputs.x
    examples = x.shape[0]
    found = [_batch_norm(inputs, relu, layer, compiled=False)]
    if inductor:
        found.append(_batch_norm(inputs, relu, layer, compiled=True))
    found.append(_group_norm(inputs, relu, layer))
    for size in statistics_batches:
        if size < examples and examples % size == 0:  # it supports no smaller last group, and one group is the baseline
            found.append(_ghost(inputs, size, relu, layer))
    found += [_bkn(inputs, size, relu, layer) for size in statistics_batches]
    return found + [_settled(inputs, size, relu, layer) for size in statistics_batches]


def _followed(norm: Forward, relu: bool) -> Forward:
    return (lambda x: F.relu(norm(x))) if relu else norm


def _batch_norm(inputs: Inputs, relu: bool, layer: bool, *, compiled: bool) -> Contender:
    x = inputs.x
    weight, bias = inputs.affine()

    def alone(x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, weight, bias, True, 0.0, EPS)

    norm = nn.BatchNorm2d(x.shape[1], eps=EPS, device=x.device)
    norm.weight, norm.bias = weight, bias
    forward = _followed(norm if layer else alone, relu)
    if compiled:
        forward = torch.compile(forward, dynamic=False)
    leaves, size = [x, weight, bias], x.shape[0]
    truth = partial(of_groups, leaves, size=size, relu=relu)
    passes = 13 if relu and not compiled else 8
    return Contender(INDUCTOR if compiled else BASELINE, size, forward, leaves, truth, passes)


def _group_norm(inputs: Inputs, relu: bool, layer: bool) -> Contender:
    x = inputs.x
    weight, bias = inputs.affine(x.dtype)  # on a GPU it accepts one dtype only
    groups = channel_groups(x.shape[1])
    norm = nn.GroupNorm(groups, x.shape[1], eps=EPS, device=x.device)
    norm.weight, norm.bias = weight, bias
    forward = _followed(norm if layer else lambda x: F.group_norm(x, groups, weight, bias, EPS), relu)
    leaves = [x, weight, bias]
    truth = partial(of_channels, leaves, groups=groups, relu=relu)
    return Contender(GROUPNORM, None, forward, leaves, truth, 13 if relu else 8)


def channel_groups(channels: int) -> int:
    """The largest divisor of the channels up to 32, as in `convert(to="group")`."""
    return max(groups for groups in range(1, 33) if channels % groups == 0)


def _ghost(inputs: Inputs, size: int, relu: bool, layer: bool) -> Contender:
    x, affine = inputs.x, inputs.affine()
    norm = GhostByReshape(*affine, x.shape[0] // size, track=layer)
    leaves = [x, *affine]
    truth = partial(of_groups, leaves, size=size, relu=relu, strided=True)
    copied = 0 if x.is_contiguous() else 2
    return Contender("ghost by reshape", size, _followed(norm, relu), leaves, truth, (13 if relu else 8) + copied)


def _bkn(inputs: Inputs, size: int, relu: bool, layer: bool) -> Contender:
    x, affine = inputs.x, inputs.affine()
    norm = BatchKalmanNorm2d(
        x.shape[1], x.shape[1], statistics_batch_size=size, transition="weights", eps=EPS, device=x.device
    )
    norm.weight, norm.bias = affine

    def in_a_model(x: Tensor) -> Tensor:
        prior = Prior.of(Moments(inputs.mean, inputs.var), inputs.gain)
        y, _ = norm.forward(x, prior, relu=relu, return_posterior=True)
        return y

    def alone(x: Tensor) -> Tensor:
        prior = Moments(inputs.mean, inputs.var)
        return batch_kalman_norm(x, prior, inputs.gain, *affine, statistics_batch_size=size, eps=EPS, relu=relu)[0]

    leaves = [x, *affine, inputs.mean, inputs.var, inputs.gain]
    truth = partial(of_groups, leaves, size=size, relu=relu)
    return Contender("BKN", size, in_a_model if layer else alone, leaves, truth, 8)


def _settled(inputs: Inputs, size: int, relu: bool, layer: bool) -> Contender:
    x, affine = inputs.x, inputs.affine()
    mean, var = inputs.running
    norm = BatchKalmanNorm2d(
        x.shape[1], x.shape[1], statistics_batch_size=size, transition="weights", eps=EPS, device=x.device,
        momentum=0.0,  # statistics are updated, but stay, so that every call has the same results
    )  # fmt: skip
    norm.weight, norm.bias = affine
    norm.begin_closing()
    with torch.no_grad():
        assert norm.running_mean is not None and norm.running_var is not None
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(var)
        norm.closing.strength.fill_(1)
        norm.closing.averages.copy_(inputs.averages)
    norm.settle_closing(True)

    def in_a_model(x: Tensor) -> Tensor:
        prior = Prior.of(Moments(inputs.mean, inputs.var), inputs.gain)
        y, _ = norm.forward(x, prior, relu=relu, return_posterior=True)
        return y

    def alone(x: Tensor) -> Tensor:
        prior, target = Moments(inputs.mean, inputs.var), Target(mean, var, inputs.averages, None)
        y, *_ = normalize_settled(
            x, prior, inputs.gain, affine, target, norm.closing.probe, statistics_batch_size=size, eps=EPS, relu=relu
        )
        return y

    leaves = [x, *affine, inputs.mean, inputs.var, inputs.gain]
    truth = partial(of_settled, leaves, running=inputs.running, averages=inputs.averages, size=size, relu=relu)
    return Contender("BKN settled", size, in_a_model if layer else alone, leaves, truth, 5)
