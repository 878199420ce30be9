"""Labels: a small integer tensor that says which channel each element of a tensor belongs to.

A belief is a vector of K moments. Its `labels` have the rank of the tensor and broadcast to its shape. They say which
entry of the belief each element has. An axis along which they do not change has size 1. The output of a convolution has
`arange(C)` along axis 1. Views, permutations, slices, chunks, shuffles and concatenations need no rules, because the
same function runs on the labels. If a layer needs one belief per channel, it is computed from the labels: one label per
channel is a selection, several labels are a mixture.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LARGEST = 1 << 21
"""Larger beliefs are not computed. Only large constants with a value per position lead to them."""


def along(axis: int, size: int, rank: int) -> Tensor:
    """The labels of a tensor with its channels along one axis."""
    shape = [1] * rank
    shape[axis] = size
    return torch.arange(size).reshape(shape)


def reduce(labels: Tensor) -> Tensor:
    """Give size 1 to axes along which the labels do not change."""
    for axis, (size, stride) in enumerate(zip(labels.shape, labels.stride(), strict=True)):
        first = labels.narrow(axis, 0, 1) if size else labels
        if size > 1 and (stride == 0 or bool((labels == first).all())):
            labels = first
    return labels.clone()


def _aligned(labels: Tensor, rank: int) -> Tensor:
    return labels.reshape((1,) * (rank - labels.dim()) + tuple(labels.shape))


def pair(first: Tensor, second: Tensor, second_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """For two operands that broadcast: the labels of the result, and each operand's entry for every label."""
    rank = max(first.dim(), second.dim())
    first, second = _aligned(first, rank), _aligned(second, rank)
    codes, labels = torch.unique(first * second_size + second, return_inverse=True)
    return labels, codes // second_size, codes % second_size


def channels(labels: Tensor, axis: int, shape: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """One entry per channel along `axis`: (C,) if each channel has one label, else (C, n), whose rows are mixtures.

    Returns the entries and, for mixtures, how often each of them occurs, (C, n).
    """
    size = shape[axis]
    rows = labels.movedim(axis, 0)
    rows = rows.reshape(rows.shape[0], -1).expand(size, -1)
    if rows.shape[1] == 1:
        return rows[:, 0], None
    index, counts = counted(rows)
    if index.shape[1] == 1:
        return index[:, 0], None
    return index, counts / rows.shape[1]


def gathered(labels: Tensor, axes: Sequence[int], shape: Sequence[int]) -> tuple[Tensor, Tensor, int]:
    """The labels after a reduction over `axes`.

    Returns the new labels (reduced axes have size 1), the entries that each new label sums, (K', n), and the number of
    positions over which each of them repeats.
    """
    varying = [axis for axis in axes if labels.shape[axis] > 1]
    still = [axis for axis in range(labels.dim()) if axis not in varying]
    repeats = 1
    for axis in axes:
        if axis not in varying:
            repeats *= shape[axis]
    relabelled = labels.permute(*still, *varying)
    kept = relabelled.shape[: len(still)]
    rows = relabelled.reshape(*kept, -1).reshape(-1, max(1, relabelled[(0,) * len(still)].numel()))
    unique, inverse = torch.unique(rows, dim=0, return_inverse=True)
    new_shape = [1 if axis in varying else labels.shape[axis] for axis in range(labels.dim())]
    return inverse.reshape(new_shape), unique, repeats


def counted(rows: Tensor) -> tuple[Tensor, Tensor]:
    """For rows of entries, (K, n): the distinct entries of each row and how often each occurs, both (K, u)."""
    ordered = rows.sort(1).values
    place = torch.zeros_like(ordered)
    place[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(1)
    most = int(place.max()) + 1
    index = torch.zeros(len(rows), most, dtype=torch.long).scatter_(1, place, ordered)
    count = torch.zeros(len(rows), most, dtype=torch.float64)
    count.scatter_add_(1, place, torch.ones_like(ordered, dtype=torch.float64))
    return index, count


def broadcasts(labels: Tensor, shape: Sequence[int]) -> bool:
    """Whether labels of this form fit a tensor of this shape."""
    return labels.dim() == len(shape) and all(size in (1, full) for size, full in zip(labels.shape, shape, strict=True))
