"""Moments through linear layers. Inputs are independent, N(mean, var) per channel, equal at every position.

    linear        mean' = W mean + bias
                  var'  = (W∘W) var

    convolution   mean' = sum_t share[t] sum_c W[k, c, t] mean[c] + bias
                  var'  = sum_t share[t] sum_c W²[k, c, t] var[c] + sum_p share[p] (mean_p - sum_p share[p] mean_p)²
                  mean_p = sum_t inside[p, t] sum_c W[k, c, t] mean[c]

inside[p, t] is 1 if tap t lies inside the image at output positions of kind p (see windows.py), and 0 otherwise.
share[p] is the share of positions of kind p. share[t] is the share of positions at which t is inside. The last term of
var' is the variance of the mean over positions. Zero padding causes it, or the stride of a transposed convolution. As a
sum of squares over kinds it can neither cancel nor become negative. Kinds are applied axis by axis, so that a large
kernel stays cheap.

Neighbouring pixels are treated as independent. This makes var' too low for smooth filters. A `cov` is not used and is
dropped. All values are float32 (float64 for float64 moments), also under autocast and with half-precision weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kalmannorm.moments import closed
from kalmannorm.moments.core import Moments, full_precision
from kalmannorm.moments.windows import Axis, Size, axes_of, windows

_PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


def _add_bias(name: str, mean: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return mean
    if bias.shape != mean.shape[-1:]:
        raise ValueError(f"{name}: `bias` must have shape ({mean.shape[-1]},), got {tuple(bias.shape)}")
    return mean + bias.to(mean.dtype)


def linear(m: Moments, weight: Tensor, bias: Tensor | None = None) -> Moments:
    """(R, C) moments through `F.linear` with weight (K, C) and bias (K,). Returns (R, K)."""
    channels = m.mean.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != channels:
        raise ValueError(
            f"linear: `weight` must have shape (outputs, {channels}) for moments of {channels} channels, "
            f"got {tuple(weight.shape)}"
        )
    weight = weight.to(m.mean.dtype)
    with full_precision(m.mean.device):
        mean, var, _ = through_layer(m, weight.unsqueeze(0), windows((), m.mean.dtype, m.mean.device))
    return Moments(_add_bias("linear", mean, bias), var)


def group_weight(channels: int, weight: Tensor, groups: int, transposed: bool) -> Tensor:
    """The weight as (groups, outputs of a group, inputs of a group, *taps), checked against the moments' channels."""
    if weight.dim() not in (3, 4, 5):
        raise ValueError(
            f"convolution: `weight` must have 1, 2 or 3 spatial dimensions after its two channel dimensions, "
            f"got shape {tuple(weight.shape)}"
        )
    rows, columns, *taps = weight.shape
    if groups < 1 or rows % groups:
        raise ValueError(f"convolution: `groups` must divide the first size of `weight`, {rows}, got {groups}")
    inputs = rows if transposed else columns * groups
    if inputs != channels:
        order = "(inputs, outputs / groups, *kernel)" if transposed else "(outputs, inputs / groups, *kernel)"
        raise ValueError(
            f"convolution: `weight` of shape {tuple(weight.shape)}, read as {order} with groups={groups}, takes "
            f"{inputs} channels, but the moments have {channels}"
        )
    weight = weight.reshape(groups, rows // groups, columns, *taps)
    return weight.transpose(1, 2) if transposed else weight


def _contract(values: Tensor, weight: Tensor, share: Tensor) -> Tensor:
    """Sum over channels and taps, each tap weighted by its share: (R, C) to (R, K)."""
    rows, groups = values.shape[0], weight.shape[0]
    weighted = values.reshape(rows, groups, -1, 1) * share.flatten()
    # The weight is the large operand, so its layout in memory is not changed.
    summed = weight.flatten(2) @ weighted.flatten(2).permute(1, 2, 0)  # (groups, K / groups, R)
    return summed.permute(2, 0, 1).flatten(1)


def _at_each_kind(values: Tensor, weight: Tensor, inside: Sequence[Tensor]) -> Tensor:
    """Sum over channels, then over taps axis by axis: (R, C) to (R, K, kinds of position)."""
    rows, groups = values.shape[0], weight.shape[0]
    values = values.reshape(rows, groups, -1).transpose(0, 1).unsqueeze(1)  # (groups, 1, R, C / groups)
    seen = (values @ weight.flatten(3)).flatten(0, 1).transpose(0, 1)  # (R, K, taps)
    seen = seen.reshape(*seen.shape[:2], *weight.shape[3:])
    for axis in inside:  # replaces the first axis of taps by its kinds, as the last axis
        seen = torch.tensordot(seen, axis, dims=([2], [1]))
    return seen.flatten(2)


def convolved(mean: Tensor, var: Tensor, weight: Tensor, *windows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Mean, variance, and the deviation of each kind's mean from the overall mean (R, K, kinds).

    The deviation is None if there is only one kind of position.
    """
    *inside, of_kinds, of_taps = windows
    spread = _contract(var, weight.square(), of_taps)
    if of_kinds.numel() == 1:
        return _contract(mean, weight, of_taps), spread, None
    means, share = _at_each_kind(mean, weight, inside), of_kinds.flatten()
    result = (share * means).sum(2)
    away = means - result.unsqueeze(2)
    return result, spread + (share * away.square()).sum(2), away


def convolved_gradient(
    grads: Sequence[Tensor],
    given: Sequence[Tensor],
    away: Tensor | None,
    windows: Sequence[Tensor],
    asked: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients with respect to mean and variance, (R, C), and weight, (groups, K, C, *taps).

    `grads` are the gradients with respect to the results, (R, K). With z[k, t] = sum_c W[k, c, t] mean[c]:

        dz[k, t]    = share[t] dmean'[k] + 2 dvar'[k] sum_p share[p] inside[p, t] (mean_p - mean')
        dW[k, c, t] = dz[k, t] mean[c] + 2 dvar'[k] share[t] W[k, c, t] var[c]
        dmean[c]    = sum dz[k, t] W[k, c, t]        dvar[c] = sum dvar'[k] share[t] W²[k, c, t]
    """
    (grad_mean, grad_var), (mean, var, weight) = grads, given
    *inside, of_kinds, of_taps = windows
    groups, outputs, inputs, *taps = weight.shape
    rows, share = mean.shape[0], of_taps.flatten()
    tap_count = share.numel()
    if away is None:
        grad_taps = grad_mean.unsqueeze(2) * share  # (R, K, taps)
    else:
        grad_kinds = of_kinds.flatten() * (grad_mean.unsqueeze(2) + 2 * grad_var.unsqueeze(2) * away)
        grad_taps = grad_kinds.reshape(*grad_mean.shape, *of_kinds.shape)
        for axis in inside:
            grad_taps = torch.tensordot(grad_taps, axis, dims=([2], [0]))
    grad_taps = grad_taps.reshape(rows, groups, outputs, tap_count).permute(1, 2, 3, 0)  # (groups, K, taps, R)
    by_group = grad_var.reshape(rows, groups, outputs).permute(1, 2, 0)  # (groups, K, R)
    flat = weight.flatten(2)
    d_mean = d_var = d_weight = None
    if asked[0]:
        if tap_count == 1:
            d_mean = (grad_taps[:, :, 0].transpose(1, 2) @ flat).transpose(0, 1).flatten(1)
        else:
            d_mean = (weight.flatten(3) @ grad_taps).sum(1).permute(2, 0, 1).flatten(1)
    if asked[1]:
        by_tap = (by_group.transpose(1, 2) @ flat.square()).reshape(groups, rows, inputs, tap_count)
        d_var = (by_tap @ share).transpose(0, 1).flatten(1)
    if asked[2]:
        weighted = (2 * var.reshape(rows, groups, inputs, 1) * share).flatten(2).transpose(0, 1)
        d_weight = (by_group @ weighted).mul_(flat)
        means = mean.reshape(rows, groups, inputs).transpose(0, 1)  # (groups, R, C / groups)
        if inputs == 1:
            d_weight += (grad_taps @ means.unsqueeze(1)).flatten(2)
        elif tap_count == 1:
            d_weight += grad_taps[:, :, 0] @ means
        else:  # a matrix product: an elementwise product with few taps is slow
            taps_apart = torch.eye(tap_count, dtype=mean.dtype, device=mean.device)
            spread = means.reshape(groups, 1, rows, inputs, 1) * taps_apart.reshape(1, tap_count, 1, 1, tap_count)
            d_weight.baddbmm_(grad_taps.flatten(2), spread.flatten(3).flatten(1, 2))
        d_weight = d_weight.reshape(groups, outputs, inputs, *taps)
    return [d_mean, d_var, d_weight]


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, var: Tensor, weight: Tensor, *windows: Tensor) -> tuple[Tensor, Tensor]:
        result, spread, away = convolved(mean, var, weight, *windows)
        ctx.save_for_backward(mean, var, weight, *windows, away)
        return result, spread

    @staticmethod
    def backward(ctx: Any, grad_mean: Tensor, grad_var: Tensor) -> tuple[Any, ...]:
        *given, away = ctx.saved_tensors
        grads, rest = (grad_mean, grad_var), [None] * (len(given) - 3)
        with full_precision(grad_mean.device):
            if torch.is_grad_enabled():
                return *closed.again(lambda *given: convolved(*given)[:2], given, grads)[:3], *rest
            return *convolved_gradient(grads, given[:3], away, given[3:], ctx.needs_input_grad), *rest


def through_layer(m: Moments, weight: Tensor, windows: Sequence[Tensor]) -> Moments:
    """(R, C) to (R, K), with a weight (groups, K / groups, C / groups, *taps)."""
    apply = _Convolved.apply if closed.applicable(m.mean, m.var) else convolved
    mean, var, *_ = apply(m.mean, m.var, weight, *windows)
    return Moments(mean, var)


def geometry(
    kernel_size: tuple[int, ...],
    *,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    padding_mode: str = "zeros",
    input_size: Size | None = None,
    transposed: bool = False,
    output_padding: Size = 0,
) -> tuple[Axis, ...]:
    """The axes of a convolution with these options. Options are checked."""
    if padding_mode not in _PADDING_MODES:
        raise ValueError(f"convolution: `padding_mode` must be one of {_PADDING_MODES}, got {padding_mode!r}")
    if transposed and padding_mode != "zeros":
        raise ValueError(f"convolution: a transposed convolution has `padding_mode` 'zeros' only, got {padding_mode!r}")
    axes = axes_of(
        kernel_size,
        input_size,
        stride=stride,
        padding=padding,
        dilation=dilation,
        transposed=transposed,
        output_padding=output_padding,
    )
    if padding_mode != "zeros":
        axes = tuple(axis._replace(size=None) for axis in axes)
    return axes


def convolution(
    m: Moments,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
    input_size: Size | None = None,
    transposed: bool = False,
    output_padding: Size = 0,
) -> Moments:
    """(R, C) moments through a convolution with 1, 2 or 3 spatial dimensions. Returns (R, K).

    The number of dimensions is that of `weight`. The options are those of `torch.nn.Conv2d`. With `transposed` they are
    those of `ConvTranspose2d`, whose weight has inputs and outputs swapped. `input_size` is the spatial size of the
    input. Without it the image has no edges: every tap is inside, except for the pattern that the stride of a
    transposed convolution causes. The same holds for a `padding_mode` other than "zeros", because it fills the border
    with values of the image.
    """
    grouped = group_weight(m.mean.shape[-1], weight, groups, transposed).to(m.mean.dtype)
    axes = geometry(
        tuple(weight.shape[2:]),
        stride=stride,
        padding=padding,
        dilation=dilation,
        padding_mode=padding_mode,
        input_size=input_size,
        transposed=transposed,
        output_padding=output_padding,
    )
    with full_precision(m.mean.device):
        mean, var, _ = through_layer(m, grouped, windows(axes, m.mean.dtype, m.mean.device))
    return Moments(_add_bias("convolution", mean, bias), var)
