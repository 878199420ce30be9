"""Which norms can be folded into the convolution or linear layer before them."""

from __future__ import annotations

from collections import Counter

from torch import nn
from torch.nn.modules.conv import _ConvNd

from kalmannorm._wiring.recording.trace import Op, Trace
from kalmannorm._wiring.rules import names

_LAYERS = names.CONVOLUTIONS | names.TRANSPOSED | {"linear"}


def foldable(model: nn.Module, run: Trace) -> dict[str, nn.Module]:
    """Norms that can be folded, with their layers.

    The norm and the layer each run once, and nothing but the norm reads the layer's output.
    """
    readers: Counter[int] = Counter()
    uses: Counter[tuple[int, str]] = Counter()  # how often each parameter or buffer is read, by owner and name
    for op in run.ops:
        for index in set(op.inputs):
            readers[index] += 1
            owner = run.values[index].owner
            if owner is not None:
                uses[id(owner[0]), owner[1]] += 1
    calls = Counter(norm.name for norm in run.norms)
    read = {module for module, _ in uses}  # norms run as stubs: a norm is in here only if other code reads its tensors
    found: dict[str, nn.Module] = {}
    for norm in run.norms:
        value = run.values[norm.value]
        layer = None if value.op is None else _layer(model, run, run.ops[value.op])
        if layer is None or calls[norm.name] > 1 or id(norm.module) in read:
            continue
        alone = readers[value.index] == 1 and value.index not in run.outputs
        once = uses[id(layer), "weight"] == 1 and uses[id(layer), "bias"] <= 1
        if alone and once:
            found[norm.name] = layer
    return found


def _layer(model: nn.Module, run: Trace, op: Op) -> nn.Module | None:
    """The layer that ran this operation.

    None, unless it used its own unchanged weight and bias, and the channels of its output are on axis 1.
    """
    if op.name not in _LAYERS or len(op.inputs) < 2:
        return None
    layer = model.get_submodule(op.place)
    if not isinstance(layer, (_ConvNd, nn.Linear)) or run.values[op.inputs[1]].owner != (layer, "weight"):
        return None
    given = [run.values[index].owner for index in op.inputs[2:]]
    if given != ([] if layer.bias is None else [(layer, "bias")]):
        return None
    # The channels of a linear layer are on the last axis, those of an unbatched convolution on the first. Only at this
    # rank are they on axis 1.
    return layer if len(run.values[op.outputs[0]].shape) == layer.weight.dim() else None
