"""What the op and the layers are given: one call, whose channels are cases that know nothing of each other."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

from kalmannorm._ops.normalize import arm_sums

POWERS = {torch.float16: (-5.0, 3.5)}
"""Of ten, from which to which the values of a channel go; from -30 to 30 for other dtypes."""
HIGHEST = 1e30
GAINS = (1e-30, 1e-6, 1e-3, 0.3, 0.5, 0.5000001, 0.7, 0.999, 1 - 1e-6, 1 - 2**-24)


class Case(NamedTuple):
    """One call: arguments as the op takes them, and what arrives at its five outputs."""

    x: Tensor
    prior: tuple[Tensor, Tensor] | None
    gain: Tensor | None
    weight: Tensor
    bias: Tensor
    size: int
    eps: float
    grads: list[Tensor]

    def inputs(self, dtype: torch.dtype | None = None) -> list[Tensor | None]:
        """Leaves, all in `dtype` where one is given."""
        mean, var = self.prior or (None, None)
        given = (self.x, mean, var, self.gain, self.weight, self.bias)
        return [None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in given]


def draw(dice: random.Random, wide: bool) -> Case:
    """A wide one has as many channels as pooled sums take."""
    dtype = dice.choice([torch.float32] * 3 + [torch.float64, torch.bfloat16, torch.float16])
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    N, C, size = dice.randint(1, 7), arm_sums.NARROWEST if wide else dice.randint(1, 16), dice.randint(1, 4)
    space = dice.choice([(2, 4), (8, 4)] if wide else [(), (3,), (2, 3), (5, 4), (1, 1)])
    x = torch.randn(N, C, *space, dtype=torch.float64)
    tame = dice.random() < 0.3
    for c in range(C):
        x[:, c] = channel(x[:, c], dtype, tame, dice)
    x = torch.where(x.isfinite(), x.clamp(-HIGHEST, HIGHEST), x).to(dtype)
    if dice.random() < 0.5 and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    groups = -(-N // size)

    def parameter() -> Tensor:
        values = [dice.choice([0.0, 1.0, dice.gauss(0, 1), 10 ** dice.uniform(-10, 10)]) for _ in range(C)]
        row = torch.tensor(values, dtype=statistics)
        return dice.choice([row, row.expand(groups, C)])

    def arriving(*shape: int) -> Tensor:
        sizes = torch.tensor([10 ** dice.uniform(-3, 3) for _ in range(C)]).view(C, *[1] * (len(shape) - 2))
        return torch.randn(shape) * sizes * dice.choice([0, 1, 1, 1])

    prior, gain = None, None
    smallest = min(size, N) if N % size == 0 or size > N else N % size
    if dice.random() < 0.8 or smallest * x[0, 0].numel() == 1:
        prior = draw_prior(x, dice.choice([1, groups]), statistics, dice)
        gains = torch.tensor([dice.choice((*GAINS, dice.random())) for _ in range(C)], dtype=statistics)
        gain = dice.choice([gains, gains[0]])
    grads = [arriving(*x.shape).to(dtype), *(arriving(groups, C).to(statistics) for _ in range(4))]
    return Case(x, prior, gain, parameter(), parameter(), size, dice.choice([1e-5, 1e-5, 1e-3, 1e-12]), grads)


def channel(noise: Tensor, dtype: torch.dtype, tame: bool, dice: random.Random) -> Tensor:
    """Values of one channel, in float64. All channels of a call are tame, or none: the quick formulas want them so."""
    if tame:
        return noise * 10 ** dice.uniform(-2, 2) + dice.gauss(0, 1)
    kind = dice.choice(["any", "any", "any", "shifted", "constant", "denormal", "outlier", "special", "zero"])
    size = 10 ** dice.uniform(*POWERS.get(dtype, (-30.0, 30.0)))
    if kind == "shifted":
        return size * (1 + noise * 10 ** dice.uniform(-8, 0))
    if kind == "constant":
        return torch.full_like(noise, size * dice.choice([-1, 1]))
    if kind == "denormal":
        return noise * torch.finfo(dtype).smallest_normal * 0.1
    values = noise * (0 if kind == "zero" else size)
    one = dice.randrange(noise.numel())
    if kind == "outlier":
        values.view(-1)[one] *= 10 ** dice.uniform(0, 10)
    if kind == "special" and dice.random() < 0.3:
        values.view(-1)[one] = dice.choice([float("nan"), float("inf"), -float("inf")])
    return values


def draw_prior(x: Tensor, groups: int, dtype: torch.dtype, dice: random.Random) -> tuple[Tensor, Tensor]:
    """Rows (G, C), for each channel near its values or anywhere."""
    mean, var = torch.empty(2, groups, x.shape[1], dtype=torch.float64)
    for c in range(x.shape[1]):
        values = x[:, c].double().nan_to_num(0, 0, 0)
        centre, square = values.mean(), values.var(correction=0)
        size = 10 ** dice.uniform(-30, 30)
        near = centre + square.sqrt() * torch.randn(groups, dtype=torch.float64)
        mean[:, c] = dice.choice([near, near, centre, size, -size, 0])
        var[:, c] = dice.choice([square, square * 100, square / 100, 10 ** dice.uniform(-30, 30), 1, 1, 0])
    return mean.clamp(-HIGHEST, HIGHEST).to(dtype), var.clamp(max=HIGHEST).to(dtype)
