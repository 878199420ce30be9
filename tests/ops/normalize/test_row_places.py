"""The places in memory that direct launches get are those of the arguments of checked launches."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kalmannorm._ops.normalize import triton_rows
from kalmannorm._ops.normalize.row_kernels import RowGradients
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

    mask = y if residual and relu else None
    d_other = d_other if kernels.keeps_output else None
    own, of_many = torch.empty(5, kernels.groups, C), torch.empty(5, kernels.groups, PITCH)[:, :, 8 : 8 + C]
    for d_rows in (own, of_many):
        given = kernels.backward_arguments(grad_y, x, mask, dx, d_rows, d_other, rows.unbind(0), moments, START)
        scratch = given[0][4] if shared else None
        memory = grad_y, x, mask, dx, d_other, rows, at, d_rows, scratch
        places = kernels._backward_places(mask is not None, d_rows.stride(0))
        assert resolved(places, memory) == [list(map(address, each)) for each in given]


def test_gradients_of_rows_in_one_memory():
    """Each backward that reaches the bundle has memory of its own: gradients of γ and β are views of it."""
    like = torch.empty(1)
    assert RowGradients.fitting([4, 6], [1, 1]) is None and RowGradients.fitting([4, 8], [1, 2]) is None
    gradients = RowGradients.fitting([4, 8], [1, 1])
    gradients.places = {0: 0, 16: 1}
    parts = [gradients.of(start, like).fill_(start + 1) for start in (0, 16)]
    assert [part.shape for part in parts] == [(5, 1, 4), (5, 1, 8)]
    assert gradients.of(16, like) is parts[1]
    whole = gradients.take(parts)
    assert torch.equal(whole, torch.tensor([1.0] * 4 + [17.0] * 8).expand(5, 12))
    assert whole.data_ptr() == parts[0].data_ptr() and whole.is_contiguous()
    assert gradients.take(parts) is None
    later = [gradients.of(start, like) for start in (0, 16)]
    assert later[0].data_ptr() != parts[0].data_ptr()
    for arrived in ([later[0], None], [later[0], later[1].clone()], [later[0], parts[1]]):
        assert gradients.take(arrived) is None
        later = [gradients.of(start, like) for start in (0, 16)]
    assert gradients.take(later) is not None
