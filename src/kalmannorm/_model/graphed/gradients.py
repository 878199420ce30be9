"""The gradients of a captured backward, as one tensor per dtype.

A model has hundreds of parameters. To copy each gradient out of the memory of a graph, torch would have to allocate
hundreds of tensors in every step, and the GPU would wait. So the graph itself joins them, one copy is made, and its
parts are handed out. They have the dtype and strides of the parameters, and so autograd takes them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes. Kernels read a part that begins at a multiple of it as fast as a tensor of its own."""


class _Kind:
    """Gradients of one dtype: which they are, where they begin, and their shapes."""

    def __init__(self, numbers: list[int], likes: Sequence[Tensor]) -> None:
        self.numbers, self.first = numbers, likes[numbers[0]]
        sizes = [likes[number].numel() for number in numbers]
        step = ALIGNMENT // self.first.element_size()
        self.sizes: list[int] = []
        self.parts: list[int] = []
        for size in sizes:
            self.parts.append(len(self.sizes))
            self.sizes += [size, -size % step] if size % step else [size]
        forms = ((likes[number].shape, torch.empty_like(likes[number], device="meta").stride()) for number in numbers)
        self.shapes = [None if len(shape) == 1 else (shape, strides) for shape, strides in forms]

    def joined(self, sums: Sequence[Sequence[Tensor]]) -> Tensor:
        """Not by `torch.cat`, whose kernel for parts of any size has a fraction of the memory's speed."""
        result = self.first.new_empty(sum(self.sizes))
        alike: dict[tuple[int, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}  # one kernel for each of these
        for part, number in zip(self._divided(result), self.numbers, strict=True):
            for place, term in enumerate(sums[number]):
                both = alike.setdefault((place, term.dtype), ([], []))
                both[0].append(part)
                both[1].append(term)
        for (place, _), (parts, terms) in sorted(alike.items(), key=lambda item: item[0][0]):
            (torch._foreach_add_ if place else torch._foreach_copy_)(parts, terms)
        return result

    def copied(self, joined: Tensor) -> list[Tensor]:
        return self._divided(joined.clone())

    def _divided(self, joined: Tensor) -> list[Tensor]:
        parts = joined.split_with_sizes(self.sizes)
        both = zip(self.parts, self.shapes, strict=True)
        return [parts[part] if shape is None else parts[part].as_strided(*shape) for part, shape in both]


class Gradients:
    """How gradients are joined and copied. `places`: where `copied` has the copy of each of them.

    Args:
        likes: the tensors that they belong to.
    """

    def __init__(self, likes: Sequence[Tensor]) -> None:
        kinds: dict[torch.dtype, list[int]] = {}
        for number, like in enumerate(likes):
            kinds.setdefault(like.dtype, []).append(number)
        self._kinds = [_Kind(numbers, likes) for numbers in kinds.values()]
        order = [number for kind in self._kinds for number in kind.numbers]
        self.places = {number: place for place, number in enumerate(order)}

    def joined(self, sums: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """One tensor per dtype. Each gradient is given as the terms of a sum, the first of any dtype."""
        return [kind.joined(sums) for kind in self._kinds]

    def copied(self, joined: Sequence[Tensor]) -> list[Tensor]:
        """New tensors with the values of all tensors that were joined."""
        return [part for kind, tensor in zip(self._kinds, joined, strict=True) for part in kind.copied(tensor)]
