"""The arguments of a recorded call by name, whether they were passed by position or by name."""

from __future__ import annotations

from typing import Any

from kalmannorm._wiring.recording.trace import Op

CONVOLUTION = {"input": None, "weight": None, "bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
TRANSPOSED = {
    "input": None, "weight": None, "bias": None, "stride": 1, "padding": 0, "output_padding": 0, "groups": 1,
    "dilation": 1,
}  # fmt: skip
LINEAR = {"input": None, "weight": None, "bias": None}
LAYER_NORM = {"input": None, "normalized_shape": None, "weight": None, "bias": None, "eps": 1e-5}
RMS_NORM = {"input": None, "normalized_shape": None, "weight": None, "eps": None}
GROUP_NORM = {"input": None, "num_groups": None, "weight": None, "bias": None, "eps": 1e-5}
MOMENTS_NORM = {"input": None, "running_mean": None, "running_var": None, "weight": None, "bias": None}
PAD = {"input": None, "pad": None, "mode": "constant", "value": None}
REDUCTION = {"input": None, "dim": None, "keepdim": False}
SOFTMAX = {"input": None, "dim": None}
NORMALIZE = {"input": None, "p": 2.0, "dim": 1, "eps": 1e-12}
ATTENTION = {"query": None, "key": None, "value": None}
GLU = {"input": None, "dim": -1}
MASKED_FILL = {"input": None, "mask": None, "value": None}
TWO = {"input": None, "other": None, "alpha": 1}


def named(op: Op, signature: dict[str, Any]) -> dict[str, Any]:
    """All arguments by the names of the signature, with defaults. Additional positional arguments are dropped."""
    found = dict(signature)
    for name, value in zip(signature, op.args, strict=False):
        found[name] = value
    aliases = {"self": "input", "x": "input", "axis": "dim", "keepdims": "keepdim", "tensors": "input"}
    for name, value in op.kwargs.items():
        name = aliases.get(name, name)
        if name in found:
            found[name] = value
    return found
