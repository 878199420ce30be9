"""Convolutions and linear layers of a bundle in few PyTorch operations, for one row of moments and dense weights.

The equations are those of `moments/linear.py`. Layers with groups and transposed layers also use its functions. Here
the weight is one matrix (K, C T). One small matrix (kinds, taps) over all axes says which taps are inside.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kalmannorm._ops.propagate import native_layers
from kalmannorm._ops.propagate.bundle import Layer
from kalmannorm.moments.linear import convolved, convolved_gradient, group_weight
from kalmannorm.moments.windows import windows


class Geometry(NamedTuple):
    """Which taps are inside for each kind of position (kinds, taps), the shares of kinds and of taps, the identity
    matrix of taps."""

    inside: Tensor
    of_kinds: Tensor
    of_taps: Tensor
    apart: Tensor


def geometry(layer: Layer, dtype: torch.dtype, device: torch.device) -> Geometry:
    with torch.inference_mode(False):  # the kept tensors are also used in training
        *rows, of_kinds, of_taps = windows(layer.axes, dtype, device)
        inside = torch.ones((1, 1), dtype=dtype, device=device)
        for row in rows:
            inside = torch.kron(inside, row)
        apart = torch.eye(of_taps.numel(), dtype=dtype, device=device)
        return Geometry(inside, of_kinds.flatten(), of_taps.flatten(), apart)


def _dense(layer: Layer) -> bool:
    return layer.groups == 1 and not layer.transposed


def _grouped(layer: Layer, weight: Tensor) -> Tensor:
    return group_weight(layer.a.numel(), weight, layer.groups, layer.transposed)


def forward(layer: Layer, given: Tensor, weight: Tensor, seen: Geometry, out: Tensor) -> Tensor | None:
    """From moments (2, C): write mean and variance into `out` (2, K).

    Returns the deviation of each kind's mean from the mean (K, kinds), or None if there is one kind.
    """
    if not _dense(layer):
        around = windows(layer.axes, given.dtype, given.device)
        mean, var, away = convolved(given[:1], given[1:], _grouped(layer, weight), *around)
        out[0], out[1] = mean[0], var[0]
        return away
    if native_layers.fits(weight):
        return native_layers.forward(given, weight, seen[:3], out)
    taps = seen.of_taps.numel()
    matrix = weight.reshape(layer.outputs, -1)
    weighted = given if taps == 1 else (given.unsqueeze(2) * seen.of_taps).flatten(1)
    torch.mv(matrix.square(), weighted[1], out=out[1])
    if len(seen.of_kinds) == 1:
        torch.mv(matrix, weighted[0], out=out[0])
        return None
    # (K, taps). A batched matrix product would run row by row on a CPU.
    sums = (matrix.view(layer.outputs, -1, taps) * given[0].unsqueeze(1)).sum(1)
    means = sums @ seen.inside.t()
    torch.mv(means, seen.of_kinds, out=out[0])
    away = means - out[0].unsqueeze(1)
    out[1].addmv_(away.square(), seen.of_kinds)
    return away


def backward(
    layer: Layer,
    grad: Tensor,
    given: Tensor,
    weight: Tensor,
    away: Tensor | None,
    seen: Geometry,
    asked: bool,
    room: native_layers.Room,
) -> tuple[Tensor, Tensor | None]:
    """Gradients with respect to the moments, (2, C), and the weight (if `asked`), from the gradients `grad` (2, K)."""
    if not _dense(layer):
        around = windows(layer.axes, given.dtype, given.device)
        grad_both, both = (grad[:1], grad[1:]), (given[:1], given[1:], _grouped(layer, weight))
        mean, var, d_weight = convolved_gradient(grad_both, both, away, around, (True, True, asked))
        assert mean is not None and var is not None
        if d_weight is not None:
            d_weight = (d_weight.transpose(1, 2) if layer.transposed else d_weight).reshape(layer.shape)
        return torch.cat([mean, var]), d_weight
    if native_layers.fits(weight):
        return native_layers.backward(grad, given, weight, away, seen[:3], asked, room, layer.weight)
    taps = seen.of_taps.numel()
    matrix = weight.reshape(layer.outputs, -1)
    by_tap = torch.mv(matrix.square().t(), grad[1])
    if taps == 1:
        grad_taps = grad[0].unsqueeze(1)
        moments = torch.stack([torch.mv(matrix.t(), grad[0]), by_tap])
    else:
        if away is None:
            grad_taps = grad[0].unsqueeze(1) * seen.of_taps
        else:
            grad_kinds = torch.addcmul(grad[0].unsqueeze(1), grad[1].unsqueeze(1), away, value=2) * seen.of_kinds
            grad_taps = grad_kinds @ seen.inside  # (K, taps)
        # Products of all pairs of taps. Only those of a tap with itself are needed, but a batched product is slower.
        pairs = torch.mm(grad_taps.t(), matrix).view(taps, -1, taps)
        sums = pairs.diagonal(dim1=0, dim2=2).sum(1)
        moments = torch.stack([sums, torch.mv(by_tap.view(-1, taps), seen.of_taps)])
    if not asked:
        return moments, None
    weighted = given if taps == 1 else (given.unsqueeze(2) * seen.of_taps).flatten(1)
    d_weight = torch.mul(matrix, weighted[1] * 2).mul_(grad[1].unsqueeze(1))
    # A matrix product: an elementwise product with few taps is slow.
    spread = given[:1] if taps == 1 else (given[0].unsqueeze(1) * seen.apart.unsqueeze(1)).flatten(1)
    return moments, d_weight.addmm_(grad_taps, spread).view(layer.shape)
