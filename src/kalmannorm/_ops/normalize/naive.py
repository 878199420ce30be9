"""The reference of the op: a Python loop over groups, written like the equations. All tests compare with it.

It is slow on purpose. Plain autograd can differentiate it any number of times. It shares no code with the fast paths.
"""

from __future__ import annotations

import torch
from torch import Tensor


def batch_kalman_norm(
    x: Tensor,
    prior_mean: Tensor | None,
    prior_var: Tensor | None,
    gain: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics_batch_size: int,
    eps: float,
    residual: Tensor | None = None,
    relu: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, posterior mean and variance, observed mean and variance. Arguments are those of `functional`."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    N, C = x.shape[:2]
    m = statistics_batch_size or N
    shape = (1, C) + (1,) * (x.dim() - 2)
    over = [0, *range(2, x.dim())]
    results: list[tuple[Tensor, ...]] = []
    for group, start in enumerate(range(0, N, m)):

        def row(t: Tensor | None, group: int = group) -> Tensor | None:
            """The row of this group, from (C,), (1, C) or (G, C)."""
            if t is None or t.dim() < 2:
                return t
            return t[group if t.shape[0] > 1 else 0]

        values = x[start : start + m].to(dtype)
        seen_mean = values.mean(over)
        seen_var = (values - seen_mean.view(shape)).square().mean(over)
        mean, var = seen_mean, seen_var
        predicted_mean, predicted_var, q = row(prior_mean), row(prior_var), row(gain)
        if predicted_mean is not None and predicted_var is not None and q is not None:
            p = 1 - q
            mean = p * predicted_mean + q * seen_mean
            var = p * predicted_var + q * seen_var + p * q * (seen_mean - predicted_mean) ** 2
        y = (values - mean.view(shape)) / torch.sqrt(var.view(shape) + eps)
        scale, shift = row(weight), row(bias)
        if scale is not None:
            y = y * scale.to(dtype).view(shape)
        if shift is not None:
            y = y + shift.to(dtype).view(shape)
        if residual is not None:
            y = y + residual[start : start + m].to(dtype)
        if relu:
            y = torch.relu(y)
        results.append((y.to(x.dtype), mean, var, seen_mean, seen_var))
    outputs, *moments = zip(*results, strict=True)
    mean, var, seen_mean, seen_var = (torch.stack(rows) for rows in moments)
    return torch.cat(outputs), mean, var, seen_mean, seen_var
