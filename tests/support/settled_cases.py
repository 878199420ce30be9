"""Arguments for the kernels of settled norms, and all results of both directions."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kalmannorm._ops.normalize.arguments import SettledGrads, SettledInputs
from support.op_arguments import channels_last
from support.poisoned import DEVICE

EPS = 1e-5


class Case(NamedTuple):
    """Rows of the prior: 0 for none, 1 for all groups, 2 for a row per group. γ and β have 1 or 2, too."""

    shape: tuple[int, ...]
    m: int
    last: bool = True
    prior: int = 1
    gain: int = 0  # 0: one number; 1: per channel; 2: equal rows of groups
    weight: int = 1
    bias: int = 1
    residual: bool = False
    relu: bool = False
    moments: bool = False  # whether gradients arrive at posterior and observation
    launch: tuple[int, ...] | None = None  # positions and channels of a tile, programs per group, warps, K
    mean: float = 1.0
    dtype: torch.dtype = torch.float32
    device: str = DEVICE


def inputs_of(case):
    """The arguments of the forward, and of the backward those that the forward does not return."""
    torch.manual_seed(0)
    C, groups = case.shape[1], -(-case.shape[0] // case.m)

    def activations():
        values = torch.randn(case.shape)
        return (channels_last(values) if case.last else values).to(case.device, case.dtype)

    def rows(number, values):
        return {0: None, 1: values[:1], 2: values}[number]

    def affine(number):
        return rows(number, torch.randn(groups, C))[0] if number == 1 else torch.randn(groups, C)

    x = (activations().float() * 2 + case.mean).to(case.dtype)
    prior = [rows(case.prior, torch.randn(groups, C) + case.mean), rows(case.prior, torch.rand(groups, C) + 0.5)]
    per_channel = torch.rand(C) * 0.8 + 0.1
    gain = {0: torch.tensor(0.3), 1: per_channel, 2: per_channel.expand(groups, C).contiguous()}[case.gain]
    running = torch.randn(C) + case.mean, 1 + torch.rand(C)
    given = [*prior, gain if case.prior else None, affine(case.weight), affine(case.bias), *running]
    given = [None if each is None else each.to(case.device) for each in given]
    inputs = SettledInputs(x, *given, case.m, EPS, activations() if case.residual else None, case.relu)
    moments = [each.to(case.device) if case.moments else None for each in torch.randn(4, groups, C)]
    return inputs, [activations(), torch.randn(C, 3).to(case.device), *moments]  # equal on all devices


def results(module, inputs, rest):
    """All that both directions return."""
    grad_y, averages, *moments = rest
    made = module.forward(inputs)
    masks = inputs.relu and inputs.residual is not None
    given = SettledGrads(
        grad_y, inputs.x, made.y if masks else None, *inputs[1:6], made.centre, made.rho, made.observed_mean,
        made.observed_var, averages, *moments, inputs.statistics_batch_size, inputs.relu, masks,
    )  # fmt: skip
    return [*made, *module.backward(given)]


def doubled(values):
    return [each.double() if isinstance(each, torch.Tensor) else each for each in values]
