"""Moments through linear layers: independent inputs N(mean, var) per channel, the same at every position.

    linear        mean' = W mean + bias                     var' = (W∘W) var

    convolution   at an output position of kind p (see windows.py), inside[p, t] telling whether tap t meets the image,
                  mean_p[k] = sum_t inside[p, t] sum_c W[k, c, t] mean[c]
                  var_p[k]  = sum_t inside[p, t] sum_c W²[k, c, t] var[c]
                  and over all positions, by the law of total variance with share[p] of them,
                  mean' = sum_p share[p] mean_p + bias
                  var'  = sum_p share[p] (var_p + (mean_p + bias - mean')²)

The second term of var' is what zero padding (or the stride of a transposed convolution) does to the mean. Written over
kinds of positions it is a sum of squares: it cannot cancel or turn negative. Kinds are applied axis by axis, so a large
kernel stays cheap.

Neighbouring pixels are taken as independent, which biases var' low for smooth filters. A `cov` is not used and is
dropped. All is float32 (float64 for float64 moments), under autocast and with half-precision weights too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available

from kalmannorm.moments.core import Moments
from kalmannorm.moments.windows import Size, axes_of, windows

_PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


def _full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Autocast would run the contractions in half precision."""
    if is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _add_bias(name: str, mean: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return mean
    if bias.shape != mean.shape[-1:]:
        raise ValueError(f"{name}: `bias` must have shape ({mean.shape[-1]},), got {tuple(bias.shape)}")
    return mean + bias.to(mean.dtype)


def linear(m: Moments, weight: Tensor, bias: Tensor | None = None) -> Moments:
    """(R, C) moments through `F.linear`: weight (K, C), bias (K,); gives (R, K)."""
    if weight.dim() != 2 or weight.shape[1] != m.channels:
        raise ValueError(
            f"linear: `weight` must have shape (outputs, {m.channels}) for moments of {m.channels} channels, "
            f"got {tuple(weight.shape)}"
        )
    weight = weight.to(m.mean.dtype)
    with _full_precision(m.mean.device):
        mean, var = m.mean @ weight.T, m.var @ weight.square().T
    return Moments(_add_bias("linear", mean, bias), var)


def _grouped(m: Moments, weight: Tensor, groups: int, transposed: bool) -> Tensor:
    """The weight as (groups, inputs of a group, outputs of a group, *taps), checked against the moments."""
    if weight.dim() not in (3, 4, 5):
        raise ValueError(
            f"convolution: `weight` must have 1, 2 or 3 spatial dimensions after its two channel dimensions, "
            f"got shape {tuple(weight.shape)}"
        )
    rows, columns, *taps = weight.shape
    if groups < 1 or rows % groups:
        raise ValueError(f"convolution: `groups` must divide the first size of `weight`, {rows}, got {groups}")
    channels = rows if transposed else columns * groups
    if channels != m.channels:
        order = "(inputs, outputs / groups, *kernel)" if transposed else "(outputs, inputs / groups, *kernel)"
        raise ValueError(
            f"convolution: `weight` of shape {tuple(weight.shape)}, read as {order} with groups={groups}, takes "
            f"{channels} channels, but the moments have {m.channels}"
        )
    weight = weight.to(m.mean.dtype).reshape(groups, rows // groups, columns, *taps)
    return weight if transposed else weight.transpose(1, 2)


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
    *inside, share = windows(axes, m.mean.dtype, m.mean.device)

    def at_each_kind(values: Tensor, weight: Tensor) -> Tensor:
        """(R, C) to (R, K, kinds of axis 1, kinds of axis 2, ...)."""
        seen = torch.einsum("rgc,gck...->rgk...", values.reshape(m.groups, groups, -1), weight).flatten(1, 2)
        for rows in inside:  # takes the first axis of taps away, puts its kinds last
            seen = torch.tensordot(seen, rows, dims=([2], [1]))
        return seen

    with _full_precision(m.mean.device):
        means = at_each_kind(m.mean, grouped)
        variances = at_each_kind(m.var, grouped.square())
    spatial = tuple(range(2, means.dim()))
    mean = (share * means).sum(spatial)
    if share.numel() > 1:
        offsets = means - mean.reshape(*mean.shape, *(1 for _ in spatial))
        variances = variances + offsets.square()
    return Moments(_add_bias("convolution", mean, bias), (share * variances).sum(spatial))
