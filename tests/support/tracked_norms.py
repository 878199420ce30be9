"""Norms whose running statistics are tracked, a forward, and how their buffers are compared."""

from __future__ import annotations

import torch

from kalmannorm import BatchKalmanNorm1d, BatchRenorm1d, GhostBatchNorm1d, Moments, MovingAverageBatchNorm1d
from support.poisoned import DEVICE

NORMS = {
    "kalman": lambda C, **options: BatchKalmanNorm1d(C, C, transition="weights", **options),
    "ghost": GhostBatchNorm1d,
    "plain variances": lambda C, **options: GhostBatchNorm1d(C, total_variance=False, **options),
    "cumulative": lambda C, **options: GhostBatchNorm1d(C, momentum=None, **options),
    "renorm": lambda C, **options: BatchRenorm1d(C, warmup_steps=1, r_steps=3, d_steps=3, **options),
    "moving average": MovingAverageBatchNorm1d,
}


def forward(norm, x):
    if isinstance(norm, BatchKalmanNorm1d):
        C = x.shape[1]
        return norm(x, Moments(torch.zeros(1, C, device=DEVICE), torch.ones(1, C, device=DEVICE)))
    return norm(x)


def assert_alike(norm, twin):
    for (name, actual), expected in zip(norm.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
