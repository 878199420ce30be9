"""Argument checks. Each error names the argument, the given value and a value that would work."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from kalmannorm._groups import group_count, group_size, statistics_dtype
from kalmannorm.moments import Moments


def positive_int(name: str, value: object) -> int:
    """`value` as an int. Accepts all integer types, such as numpy's, but not bool."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, got {value!r}")
    number = operator.index(value)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number


def real(name: str, value: object) -> float:
    """`value` as a float. Accepts all real numbers, such as numpy's, but not bool."""
    if type(value) is float:  # torch.compile can trace this branch
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(value)


def check_number(name: str, value: object, low: float, high: float) -> None:
    if not low <= real(name, value) <= high:
        raise ValueError(f"{name} must lie in [{low}, {high}], got {value}")


def open_unit_interval(name: str, value: object) -> float:
    """`value` as a float strictly between 0 and 1."""
    number = real(name, value)
    if not 0 < number < 1:
        raise ValueError(
            f"{name} must lie inside (0, 1), got {number}; to use the observation alone, leave out the prior"
        )
    return number


def check_moments(name: str, value: object) -> None:
    if not isinstance(value, tuple) or not hasattr(value, "mean"):
        given = "a tuple" if isinstance(value, tuple) else f"a {type(value).__name__}"
        raise TypeError(f"{name} must be kalmannorm.Moments, got {given}; pass norm.posterior or Moments(mean, var)")


def check_previous(previous: Moments, prior_features: int | None, *, carried: bool) -> None:
    """Raise unless `previous` fits a layer with `prior_features`. `carried`: the layer uses it as the prior itself."""
    check_moments("previous", previous)
    if prior_features is None:
        raise ValueError(
            "previous was given to a layer without prior_features; build the layer with prior_features="
            f"{previous.mean.shape[-1]}, or call it without previous"
        )
    for part in ("mean", "var"):
        shape = tuple(getattr(previous, part).shape)
        if len(shape) != 2 or shape[1] != prior_features:
            remedy = "propagate it with kalmannorm.moments" if carried else "use its width as prior_features"
            expected = f"(groups, prior_features) = (·, {prior_features})"
            raise ValueError(f"previous.{part} must be {expected}, got {shape}; {remedy}")
    if previous.mean.shape != previous.var.shape:
        shapes = tuple(previous.mean.shape), tuple(previous.var.shape)
        raise ValueError(f"previous.mean and previous.var must have the same shape, got {shapes[0]} and {shapes[1]}")


def check_input(x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor, got a {type(x).__name__}")
    if x.dim() < 2:
        raise ValueError(f"x must be (N, C, *), got shape {tuple(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"x must be a floating-point tensor, got {x.dtype}; convert it with x.float()")
    if x.shape[0] == 0 or x.numel() == 0:
        raise ValueError(f"x must hold at least one value per channel, got an empty batch of shape {tuple(x.shape)}")


def check_enough_values(x: Tensor, statistics_batch_size: int | None, layer: Any = None) -> None:
    """Raise if a group has one value per channel. Without a prior its variance is 0, and its output is β for all x.

    Only the first group matters: a smaller last group joins the group before it. `layer` is the norm that gets x.
    """
    N = x.shape[0]
    if min(group_size(N, statistics_batch_size), N) * (x.numel() // (N * x.shape[1])) > 1:
        return
    where = "" if layer is None else f"{layer._layer_name.name}: "
    given, enough = "", "Use at least two examples"
    if statistics_batch_size == 1:
        given = "with statistics_batch_size=1, "
        enough = "Use 2 or more (`convert` can set it by layer), and at least two examples"
    raise ValueError(
        f"{where}{given}x of shape {tuple(x.shape)} has one value per channel in a group, and there is no prior. The "
        f"variance of one value is 0. {enough}{', or give a prior' if layer is None else ''}."
    )


def check_prior(prior: Moments, x: Tensor, statistics_batch_size: int | None) -> None:
    check_moments("prior", prior)
    N, C = x.shape[:2]
    groups = group_count(N, group_size(N, statistics_batch_size))
    for part, value in (("mean", prior.mean), ("var", prior.var)):
        if value.dim() != 2 or value.shape[1] != C or value.shape[0] not in (1, groups):
            expected = f"(1, {C})" if groups == 1 else f"({groups}, {C}) or (1, {C})"
            given, shape = tuple(value.shape), tuple(x.shape)
            raise ValueError(f"prior.{part} must be {expected} for x of shape {shape}, got {given}")


def check_channels(name: str, value: Tensor | None, x: Tensor) -> None:
    if value is not None and value.shape != x.shape[1:2]:
        raise ValueError(f"{name} must be ({x.shape[1]},) for x of shape {tuple(x.shape)}, got {tuple(value.shape)}")


def check_residual(residual: Tensor, x: Tensor) -> None:
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"residual must have the shape and dtype of x, {tuple(x.shape)} {x.dtype}, "
            f"got {tuple(residual.shape)} {residual.dtype}"
        )


def check_gain(gain: Tensor | float | None, x: Tensor) -> Tensor:
    if gain is None:
        raise ValueError("gain must be given if there is a prior: a number in (0, 1) or a tensor, got None")
    if not isinstance(gain, Tensor):
        number = open_unit_interval("gain", gain)
        return torch.full((), number, dtype=statistics_dtype(x), device=x.device)
    if gain.shape not in ((), (1,), x.shape[1:2]):
        raise ValueError(f"gain must be (), (1,) or ({x.shape[1]},), got shape {tuple(gain.shape)}")
    return gain
