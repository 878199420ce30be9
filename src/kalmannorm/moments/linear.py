"""Moments through linear layers: independent inputs N(mean, var) per channel, the same at every position.

    linear        mean' = W mean + bias
                  var'  = (W∘W) var

    convolution   mean' = sum_t share[t] sum_c W[k, c, t] mean[c] + bias
                  var'  = sum_t share[t] sum_c W²[k, c, t] var[c] + sum_p share[p] (mean_p - sum_p share[p] mean_p)²
                  mean_p = sum_t inside[p, t] sum_c W[k, c, t] mean[c]

Here inside[p, t] tells whether tap t meets the image at output positions of kind p (see windows.py), share[p] how many
positions are of that kind, and share[t] at how many of them t is inside. The last term of var' is what zero padding (or
the stride of a transposed convolution) does to the mean from one position to the next. Written over kinds of positions
it is a sum of squares, which cannot cancel or turn negative; kinds are applied axis by axis, so that a large kernel
stays cheap.

Neighbouring pixels are taken as independent, which biases var' low for smooth filters. A `cov` is not used and is
dropped. All is float32 (float64 for float64 moments), under autocast and with half-precision weights too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kalmannorm.moments.core import Moments, full_precision
from kalmannorm.moments.windows import Size, axes_of, windows

_PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


def _add_bias(name: str, mean: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return mean
    if bias.shape != mean.shape[-1:]:
        raise ValueError(f"{name}: `bias` must have shape ({mean.shape[-1]},), got {tuple(bias.shape)}")
    return mean + bias.to(mean.dtype)


def linear(m: Moments, weight: Tensor, bias: Tensor | None = None) -> Moments:
    """(R, C) moments through `F.linear`: weight (K, C), bias (K,); gives (R, K)."""
    channels = m.mean.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != channels:
        raise ValueError(
            f"linear: `weight` must have shape (outputs, {channels}) for moments of {channels} channels, "
            f"got {tuple(weight.shape)}"
        )
    weight = weight.to(m.mean.dtype)
    with full_precision(m.mean.device):
        mean, var = m.mean @ weight.T, m.var @ weight.square().T
    return Moments(_add_bias("linear", mean, bias), var)


def _grouped(m: Moments, weight: Tensor, groups: int, transposed: bool) -> Tensor:
    """The weight as (groups, outputs of a group, inputs of a group, *taps), checked against the moments."""
    if weight.dim() not in (3, 4, 5):
        raise ValueError(
            f"convolution: `weight` must have 1, 2 or 3 spatial dimensions after its two channel dimensions, "
            f"got shape {tuple(weight.shape)}"
        )
    rows, columns, *taps = weight.shape
    if groups < 1 or rows % groups:
        raise ValueError(f"convolution: `groups` must divide the first size of `weight`, {rows}, got {groups}")
    channels = rows if transposed else columns * groups
    if channels != m.mean.shape[-1]:
        order = "(inputs, outputs / groups, *kernel)" if transposed else "(outputs, inputs / groups, *kernel)"
        raise ValueError(
            f"convolution: `weight` of shape {tuple(weight.shape)}, read as {order} with groups={groups}, takes "
            f"{channels} channels, but the moments have {m.mean.shape[-1]}"
        )
    weight = weight.to(m.mean.dtype).reshape(groups, rows // groups, columns, *taps)
    return weight.transpose(1, 2) if transposed else weight


def _contract(values: Tensor, weight: Tensor, share: Tensor) -> Tensor:
    """Over channels and taps at once, each tap by its share: (R, C) to (R, K)."""
    rows, groups = values.shape[0], weight.shape[0]
    weighted = values.reshape(rows, groups, -1, 1) * share.flatten()
    # The weight is the large operand, and stays as it lies in memory.
    summed = weight.flatten(2) @ weighted.flatten(2).permute(1, 2, 0)  # (groups, K / groups, R)
    return summed.permute(2, 0, 1).flatten(1)


def _at_each_kind(values: Tensor, weight: Tensor, inside: Sequence[Tensor]) -> Tensor:
    """Over channels, then taps axis by axis: (R, C) to (R, K, kinds of position)."""
    rows, groups = values.shape[0], weight.shape[0]
    values = values.reshape(rows, groups, -1).transpose(0, 1).unsqueeze(1)  # (groups, 1, R, C / groups)
    seen = (values @ weight.flatten(3)).flatten(0, 1).transpose(0, 1)  # (R, K, taps)
    seen = seen.reshape(*seen.shape[:2], *weight.shape[3:])
    for axis in inside:  # takes the first axis of taps away, puts its kinds last
        seen = torch.tensordot(seen, axis, dims=([2], [1]))
    return seen.flatten(2)


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
    """(R, C) moments through a convolution in 1, 2 or 3 spatial dimensions, told from `weight`; gives (R, K).

    The options are those of `torch.nn.Conv2d` (or, with `transposed`, `ConvTranspose2d`, whose weight is laid out the
    other way round). `input_size` is the spatial size of the map that enters. Without it the image has no edges: every
    tap is inside, and a transposed convolution is left with the pattern of its stride, which needs no size. The same
    holds for a `padding_mode` other than "zeros", which fills the border with values like the others.
    """
    if padding_mode not in _PADDING_MODES:
        raise ValueError(f"convolution: `padding_mode` must be one of {_PADDING_MODES}, got {padding_mode!r}")
    if transposed and padding_mode != "zeros":
        raise ValueError(f"convolution: a transposed convolution has `padding_mode` 'zeros' only, got {padding_mode!r}")
    grouped = _grouped(m, weight, groups, transposed)
    axes = axes_of(
        tuple(weight.shape[2:]),
        input_size,
        stride=stride,
        padding=padding,
        dilation=dilation,
        transposed=transposed,
        output_padding=output_padding,
    )
    if padding_mode != "zeros":
        axes = tuple(axis._replace(size=None) for axis in axes)
    *inside, of_kinds, of_taps = windows(axes, m.mean.dtype, m.mean.device)
    with full_precision(m.mean.device):
        var = _contract(m.var, grouped.square(), of_taps)
        if of_kinds.numel() == 1:
            mean = _contract(m.mean, grouped, of_taps)
        else:
            means, share = _at_each_kind(m.mean, grouped, inside), of_kinds.flatten()
            mean = (share * means).sum(2)
            var = var + (share * (means - mean.unsqueeze(2)).square()).sum(2)
    return Moments(_add_bias("convolution", mean, bias), var)
