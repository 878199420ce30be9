"""The places in memory that direct launches get are those of the arguments of checked launches."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kalmannorm._ops.normalize import triton_rows
from kalmannorm._ops.normalize.triton_rows import TritonRows
from kalmannorm._ops.triton_launching import _resolver

PITCH, START = 200, 24  # of rows and moments that lie in larger memory


def address(tensor):
    return None if tensor is None else tensor.data_ptr()


def resolved(places, memory):
    return [_resolver(each)([address(tensor) for tensor in memory]) for each in places]


@pytest.mark.parametrize("shape", [(4, 8, 5, 5), (2, 64, 56, 56)], ids=["alone", "shared"])
@pytest.mark.parametrize("relu", [False, True], ids=["", "relu"])
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
def test_places(shape, residual, relu, monkeypatch):
    monkeypatch.setattr(triton_rows, "processors_of", lambda x: 132)
    C = shape[1]
    x, y, grad_y, dx, other, d_other = (torch.empty(shape).to(memory_format=torch.channels_last) for _ in range(6))
    rows = torch.empty(5, PITCH).as_strided((5, 2, C), (PITCH, 0, 1), 8)
    kernels = TritonRows(x, 2, 1e-5, residual=residual, relu=relu, pitch=PITCH)
    shared = shape[0] == 2
    assert (kernels.forward_scratch is not None, kernels.backward_scratch is not None) == (shared, shared)
    moments = torch.empty(START + 4 * kernels.step + 8)
    at = moments[START:]
    other = other if residual else None
    given = kernels.forward_arguments(x, y, rows.unbind(0), other, moments, START)
    scratch = given[0][1] if shared else None
    found = resolved(kernels._forward_places(), (x, y, other, rows, at, scratch))
    assert found == [list(map(address, each)) for each in given]

    d_rows, mask = torch.empty(5, kernels.groups, C), y if residual and relu else None
    d_other = d_other if kernels.keeps_output else None
    given = kernels.backward_arguments(grad_y, x, mask, dx, d_rows, d_other, rows.unbind(0), moments, START)
    scratch = given[0][4] if shared else None
    memory = grad_y, x, mask, dx, d_other, rows, at, d_rows, scratch
    assert resolved(kernels._backward_places(mask is not None), memory) == [list(map(address, each)) for each in given]
