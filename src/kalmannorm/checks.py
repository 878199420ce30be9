"""What a user may get wrong: each check names the argument, what was given and what would work."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmannorm.groups import group_count, group_size, statistics_dtype
from kalmannorm.moments import Moments


def check_input(x: Tensor, statistics_batch_size: int | None) -> None:
    if x.dim() < 2:
        raise ValueError(f"x must be (N, C, *), got shape {tuple(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"x must be a floating-point tensor, got {x.dtype}; convert it with x.float()")
    if x.shape[0] == 0 or x.numel() == 0:
        raise ValueError(f"x must hold at least one value per channel, got an empty batch of shape {tuple(x.shape)}")
    check_statistics_batch_size(statistics_batch_size)


def check_statistics_batch_size(value: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"statistics_batch_size must be an int or None, got {value!r}")
    if isinstance(value, int) and value < 1:
        raise ValueError(f"statistics_batch_size must be at least 1, got {value}; None takes the whole batch")


def check_enough_values(x: Tensor, statistics_batch_size: int | None) -> None:
    """Without a prior a group of one value has no variance: its output would be β whatever x is."""
    N = x.shape[0]
    size = group_size(N, statistics_batch_size)
    smallest = N % size or size if size < N else N
    if smallest * (x.numel() // (N * x.shape[1])) == 1:
        raise ValueError(
            f"x of shape {tuple(x.shape)} in statistics batches of {size} has a group with one value per channel, and "
            "there is no prior to fill in its variance. Give the layer a prior (prior_features and `previous`), raise "
            "statistics_batch_size, or drop the last, smaller batch."
        )


def check_prior(prior: Moments, x: Tensor, statistics_batch_size: int | None, name: str = "prior") -> None:
    N, C = x.shape[:2]
    groups = group_count(N, group_size(N, statistics_batch_size))
    for part, value in (("mean", prior.mean), ("var", prior.var)):
        if value.dim() != 2 or value.shape[1] != C or value.shape[0] not in (1, groups):
            expected = f"(1, {C})" if groups == 1 else f"({groups}, {C}) or (1, {C})"
            given, shape = tuple(value.shape), tuple(x.shape)
            raise ValueError(f"{name}.{part} must be {expected} for x of shape {shape}, got {given}")


def check_channels(name: str, value: Tensor | None, x: Tensor) -> None:
    if value is not None and value.shape != x.shape[1:2]:
        raise ValueError(f"{name} must be ({x.shape[1]},) for x of shape {tuple(x.shape)}, got {tuple(value.shape)}")


def check_gain(gain: Tensor | float | None, x: Tensor) -> Tensor:
    if gain is None:
        raise ValueError("gain must be given where there is a prior: a number in (0, 1) or a tensor, got None")
    if not isinstance(gain, Tensor):
        if isinstance(gain, bool) or not isinstance(gain, (int, float)):
            raise TypeError(f"gain must be a number in (0, 1) or a tensor, got {gain!r}")
        if not 0 < gain < 1:
            raise ValueError(f"gain must lie inside (0, 1), got {gain}; pass prior=None to trust the observation alone")
        return torch.full((), gain, dtype=statistics_dtype(x), device=x.device)
    if gain.shape not in ((), (1,), x.shape[1:2]):
        raise ValueError(f"gain must be (), (1,) or ({x.shape[1]},), got shape {tuple(gain.shape)}")
    return gain
