"""`example` inference: the moments of a virtual group, which contains one example and m - 1 average examples."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmannorm import _filter as kalman
from kalmannorm._ops.dispatch import expecting_for, on_device_of, transformed
from kalmannorm.moments import Moments


def among_average(example: Moments, average: Moments, size: int) -> Moments:
    """Moments of each example's virtual group, (N, C): the example with weight 1/m, and m - 1 average examples."""
    if size == 1:
        return example
    a = 1 / size
    mean = a * example.mean + (1 - a) * average.mean
    var = a * (example.var + (example.mean - mean).square()) + (1 - a) * (average.var + (average.mean - mean).square())
    return Moments(mean, var)


def expected_of_example(
    prior: Moments | None, gain: Tensor | None, average: Moments, size: int
) -> tuple[Moments | None, Tensor | None]:
    """Prior and average examples combined, and the trust in the example.

    With these, `update` on the example alone gives the same posterior as the prior combined with the virtual group.
    Both are mixtures of the prior, the average examples and the example. Here the first two are mixed into one.
    """
    share = 1 / size
    row = Moments(average.mean.unsqueeze(0), average.var.unsqueeze(0))
    if prior is None or gain is None:
        return (None, None) if size == 1 else (row, torch.full((), share, device=row.mean.device, dtype=row.mean.dtype))
    prior, gain = prior.to(row.mean.dtype), gain.to(row.mean.dtype)
    if size == 1:
        return prior, gain
    kernels = None if transformed() else expecting_for(prior.mean, prior.var, gain, *average[:2])
    if kernels is not None:
        with on_device_of(gain):
            expected: tuple[Moments, Tensor] = kernels.expect(prior, gain, average, size)
        return expected
    trust = gain * share
    return kalman.mix(prior, row, (gain - trust) / (1 - trust), (1 - gain) / (1 - trust)), trust
