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
        self.pad = first.new_zeros(step)
        self.gaps = [-size % step for size in sizes]
        self.sizes: list[int] = []
        self.parts: list[int] = []
        for size, gap in zip(sizes, self.gaps, strict=True):
            self.parts.append(len(self.sizes))
            self.sizes += [size, gap] if gap else [size]
        self.shapes = [
            None if tensors[number].dim() == 1 else (tensors[number].shape, tensors[number].stride())
            for number in numbers
        ]

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        parts: list[Tensor] = []
        for number, gap in zip(self.numbers, self.gaps, strict=True):
            parts.append(tensors[number].as_strided((tensors[number].numel(),), (1,)))
            if gap:
                parts.append(self.pad[:gap])
        return torch.cat(parts)

    def copied(self, joined: Tensor) -> list[Tensor]:
        parts = joined.clone().split_with_sizes(self.sizes)
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
