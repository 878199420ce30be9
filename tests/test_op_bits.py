"""One bit for each value in the place of y, in plain torch: the numbers of y, whoever traces or differentiates twice.

The kernels that do so on CUDA: `tests/kernels/test_op_kernels.py`.
"""

from __future__ import annotations

import pytest
import torch

from kalmannorm import batch_kalman_norm
from kalmannorm import op as registered
from kalmannorm.kernels import bits
from test_op import TOLERANCE, channels_last
from test_op_fused import call, inputs_of

op = registered.batch_kalman_norm
WHOLE = {"eights": (5, 16, 4, 2), "(N, C)": (7, 8), "one position": (3, 8, 1, 1), "3-D": (4, 8, 2, 2, 2)}
SHAPES = {f"{name}-{last}": (shape, last) for name, shape in WHOLE.items() for last in (False, True)}
SHAPES |= {"odd positions": ((5, 8, 3, 3), True), "odd channels": ((5, 3, 2, 4), False), "one row": ((3, 2, 16), False)}


@pytest.fixture
def bits_kept(monkeypatch):
    """As on CUDA."""
    monkeypatch.setattr(registered, "keeps_bits", bits.whole_bytes)


@pytest.mark.parametrize(("shape", "last"), SHAPES.values(), ids=SHAPES.keys())
def test_bits_tell_what_the_output_does(shape, last):
    y = torch.randn(shape).relu()
    y = channels_last(y) if last else y
    y.masked_fill_(torch.rand(shape) < 0.2, float("nan")).masked_fill_(torch.rand(shape) < 0.2, -0.0)
    packed = torch.empty(y.numel() // 8, dtype=torch.uint8)
    bits.pack(y, packed)
    assert bits.whole_bytes(y)
    assert torch.equal(bits.shut(packed, y), y <= 0)


@pytest.mark.parametrize(("shape", "last"), [((5, 8, 3, 3), False), ((5, 3, 2, 4), True), ((4, 3), False)], ids=str)
def test_rows_without_whole_bytes_keep_the_output(shape, last, bits_kept):
    inputs = inputs_of(shape, 2, residual=True, last=last)
    assert op(*inputs[:6], 2, 1e-5, inputs[6], True)[5].shape == (0,)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("shape", "last"), SHAPES.values(), ids=SHAPES.keys())
def test_the_same_numbers_as_with_the_output(shape, last, dtype, monkeypatch):
    inputs = inputs_of(shape, 2, dtype, residual=True, last=last)
    g = torch.randn(shape).to(dtype)
    results = []
    for keeps in (lambda x: False, bits.whole_bytes):
        monkeypatch.setattr(registered, "keeps_bits", keeps)
        y, *_, kept = op(*inputs[:6], 2, 1e-5, inputs[6], True)
        results.append((y, *torch.autograd.grad(y, inputs, g)))
    assert kept.shape == (y.numel() // 8,) and not kept.requires_grad
    for with_output, with_bits in zip(*results, strict=True):
        assert torch.equal(with_output, with_bits)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_gradcheck(last, bits_kept):
    inputs = inputs_of((3, 8, 2, 4), 2, residual=True, last=last)
    leaves = inputs[0], inputs[6]

    def function(x, residual):
        return call(op, [x, *inputs[1:6], residual], 2, True)[0]

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)
    torch.library.opcheck(op, (*inputs[:6], 2, 1e-5, inputs[6], True))


def test_compiled(bits_kept):
    """With another number of examples too: how many bits there are follows the batch."""

    def function(x, residual):
        return batch_kalman_norm(x, None, None, None, None, statistics_batch_size=2, residual=residual, relu=True)[0]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for examples in (4, 5):
        x, residual = (channels_last(torch.randn(examples, 16, 3, 3)).requires_grad_() for _ in range(2))
        results = []
        for run in (function, compiled):
            y = run(x, residual)
            results.append((y, *torch.autograd.grad(y.pow(2).sum(), (x, residual))))
        for a, e in zip(*results, strict=True):
            torch.testing.assert_close(a, e)
