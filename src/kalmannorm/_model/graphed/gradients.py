"""The gradients of a captured backward, as one tensor per dtype.

A model has hundreds of parameters. To copy each gradient out of the memory of a graph, torch would have to allocate
hundreds of tensors in every step, and the GPU would wait. So the graph itself joins them, one copy is made, and its
parts are handed out. They keep the strides of the parameters, and so autograd takes them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes. Kernels read a part that begins at a multiple of it as fast as a tensor of its own."""


class _Kind:
    """Gradients of one dtype: which they are, where they begin, and their shapes."""

    def __init__(self, numbers: list[int], tensors: Sequence[Tensor]) -> None:
        self.numbers = numbers
        first, sizes = tensors[numbers[0]], [tensors[number].numel() for number in numbers]
        step = ALIGNMENT // first.element_size()
        self.sizes: list[int] = []
        self.parts: list[int] = []
        for size in sizes:
            self.parts.append(len(self.sizes))
            self.sizes += [size, -size % step] if size % step else [size]
        self.shapes = [
            None if tensors[number].dim() == 1 else (tensors[number].shape, tensors[number].stride())
            for number in numbers
        ]

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Not by `torch.cat`, whose kernel for parts of any size has a fraction of the memory's speed."""
        own = [tensors[number] for number in self.numbers]
        result = own[0].new_empty(sum(self.sizes))
        torch._foreach_copy_(self._divided(result), own)
        return result

    def copied(self, joined: Tensor) -> list[Tensor]:
        return self._divided(joined.clone())

    def _divided(self, joined: Tensor) -> list[Tensor]:
        parts = joined.split_with_sizes(self.sizes)
        both = zip(self.parts, self.shapes, strict=True)
        return [parts[part] if shape is None else parts[part].as_strided(*shape) for part, shape in both]


class Gradients:
    """How dense tensors are joined and copied. `places`: where `copied` has the copy of each of them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        kinds: dict[torch.dtype, list[int]] = {}
        for number, tensor in enumerate(tensors):
            kinds.setdefault(tensor.dtype, []).append(number)
        self._kinds = [_Kind(numbers, tensors) for numbers in kinds.values()]
        order = [number for kind in self._kinds for number in kind.numbers]
        self.places = {number: place for place, number in enumerate(order)}

    def joined(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """One tensor per dtype."""
        return [kind.joined(tensors) for kind in self._kinds]

    def copied(self, joined: Sequence[Tensor]) -> list[Tensor]:
        """New tensors with the values of all tensors that were joined."""
        return [part for kind, tensor in zip(self._kinds, joined, strict=True) for part in kind.copied(tensor)]
