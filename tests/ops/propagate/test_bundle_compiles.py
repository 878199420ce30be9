"""Triton's compiler takes the kernels of bundles; that they are right is tested in `test_bundle_kernels.py`."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from support.wide import narrow

pytest.importorskip("triton", minversion="3.3")

from kalmannorm._ops.propagate import triton_bundle
from support.bundled_nets import IMAGE, Blocks, Branches, Smooth, bundles, converted
from support.triton_compiled import SMALLEST, TYPES

TAPE = {"tape_kernel", "tape_backward_kernel"}
LEAVES = {"collect_kernel", "leaves_kernel", "leaves_backward_kernel", "gains_backward_kernel"}
LAYERS = {"layers_kernel", "rows_backward_kernel", "layers_backward_kernel"}
CASES = {
    "groups, depthwise, borders": (Blocks, IMAGE, torch.float32),
    "channels_last in half precision": (lambda: Blocks().to(memory_format=torch.channels_last), IMAGE, torch.bfloat16),
    "transposed, a gate": (Branches, IMAGE, torch.float32),
    "quadrature": (Smooth, (4, 4), torch.float32),
    "in rows of four": (
        lambda: nn.Sequential(nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64)),
        (4, 64),
        torch.float32,
    ),
}


@pytest.mark.parametrize("case", narrow(CASES, ("channels_last in half precision", "transposed, a gate", "quadrature")))
@torch.no_grad()
def test_bundles(case, compiled, monkeypatch):
    monkeypatch.setitem(TYPES, torch.float64, "fp64")
    make, shape, dtype = CASES[case]
    for bundle, tensors in bundles(converted(make(), shape), torch.randn(shape), monkeypatch):
        layers = [layer for stage in bundle.stages for layer in stage.layers]
        for place in {layer.weight for layer in layers} | {layer.bias for layer in layers} - {None}:
            tensors[place] = tensors[place].to(dtype)
        tensors = [tensor.requires_grad_() for tensor in tensors]
        assert triton_bundle.applies(bundle, tensors)
        made = triton_bundle.forward(bundle, tensors, torch.float32, torch.device("cpu"), True)
        at = [tuple(torch.zeros(2, 1, result.numel())) for result in bundle.results[len(bundle.norms) :]]
        triton_bundle.backward(bundle, tensors, made.saved, made.state, made.rows, at, [True] * len(tensors))
    assert compiled.keys() == TAPE | LEAVES | LAYERS
    assert max(compiled.shared.values()) <= SMALLEST
    if case == "in rows of four":
        assert "st.global.v4" in compiled["layers_backward_kernel"]
        for name in LAYERS - {"rows_backward_kernel"}:  # weights are loaded ahead, 16 bytes at a time
            assert re.search(r"cp\.async\S* \[.*\], \[.*\], 0x10", compiled[name]), name
