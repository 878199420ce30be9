"""Which convolutions are normalized: all that reads their output goes through a norm, before another layer or the end.

The norm removes the scale of such a convolution, so its filters can be standardized. Where several convolutions are
summed before the norm, it removes the scale that they have in common.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.conv import _ConvNd

from kalmannorm._wiring.recording.trace import Op, Trace
from kalmannorm._wiring.rules import names

_HOMOGENEOUS = names.SAME | names.REARRANGEMENTS | names.POOLS | names.MEANS | names.SUMS | names.PRODUCTS
_HOMOGENEOUS |= names.QUOTIENTS | {"relu", "leaky_relu", "prelu", "pad", "neg"}
"""A factor before them is a factor after them. Other operations are those that a convolution must not reach."""
_PLAIN = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def normalized_convolutions(model: nn.Module, runs: Iterable[Trace]) -> list[nn.Module]:
    """Plain convolutions that are normalized in every run in which they ran. Depthwise ones are left out.

    A depthwise filter with a mean of 0 would not pass on the mean of its map, and a norm cannot bring it back.
    """
    found: dict[int, nn.Module] = {}
    places = {id(module): name for name, module in model.named_modules()}
    refused: set[int] = set()
    for run in runs:
        readers: dict[int, list[Op]] = {}
        for op in run.ops:
            for index in set(op.inputs):
                readers.setdefault(index, []).append(op)
        outputs = set(run.outputs)
        for index, value in enumerate(run.values):
            if value.owner is None or value.owner[1] != "weight" or type(value.owner[0]) not in _PLAIN:
                continue
            layer = value.owner[0]
            uses = readers.get(index, [])
            if not uses and index not in outputs:
                continue  # it did not run here, like an auxiliary head in eval
            found[id(layer)] = layer
            own = all(op.place == places.get(id(layer)) for op in uses) and "forward" not in vars(layer)
            normalized = own and all(_is_normalized(run, op, index, readers, outputs) for op in uses)
            if index in outputs or not normalized:
                refused.add(id(layer))
    chosen = [layer for key, layer in found.items() if key not in refused]
    return [layer for layer in chosen if not _is_depthwise(layer) and layer.weight[0].numel() > 1]  # type: ignore[index]


def _is_depthwise(layer: nn.Module) -> bool:
    assert isinstance(layer, _ConvNd)
    return layer.groups > 1 and layer.in_channels == layer.groups


def _is_normalized(run: Trace, use: Op, weight: int, readers: dict[int, list[Op]], outputs: set[int]) -> bool:
    """Whether the weight is used here as that of a convolution, and only norms read what comes of it."""
    if use.name not in names.CONVOLUTIONS or len(use.inputs) < 2 or use.inputs[1] != weight:
        return False
    pending, seen = list(use.outputs), set(use.outputs)
    if not any(readers.get(index) for index in pending):
        return False
    while pending:
        index = pending.pop()
        if index in outputs:
            return False
        for op in readers.get(index, ()):
            if op.norm is not None or op.name in names.OTHER_NORMS:
                continue
            if op.name not in _HOMOGENEOUS:
                return False
            fresh = [each for each in op.outputs if each not in seen]
            seen.update(fresh)
            pending += fresh
    return True
