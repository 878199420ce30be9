"""The op in PyTorch's own operations: how much memory it takes, and what expanded forms may cost in digits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from kalmannorm import batch_kalman_norm
from kalmannorm._ops.normalize import aten, naive
from kalmannorm._ops.normalize.arguments import Inputs, Results
from kalmannorm._ops.normalize.registered import batch_kalman_norm as op
from support.op_arguments import arguments, channels_last, relative_error

pytestmark = pytest.mark.usefixtures("each_kernels")
LAYOUTS = {"contiguous": torch.Tensor.contiguous, "channels_last": channels_last}


class LargeTensors(TorchDispatchMode):
    """New storages of at least so many bytes that operations come back with; kept, so that no address comes twice."""

    def __init__(self, size: int, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.size, self.seen = size, {t.untyped_storage().data_ptr() for t in known}
        self.new: list[torch.Tensor] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for t in results if isinstance(results, (tuple, list)) else [results]:
            if not isinstance(t, torch.Tensor) or t.untyped_storage().nbytes() < self.size:
                continue
            if t.untyped_storage().data_ptr() not in self.seen:
                self.seen.add(t.untyped_storage().data_ptr())
                self.new.append(t)
        return results


@pytest.mark.parametrize("N", [4, 5], ids=["N4", "N5-ragged"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_as_large_as_x_is_made_but_the_results(layout, N):
    """New memory costs as much as passes do: y in the forward, dx in the backward, and no temporary beside them."""
    inputs = [t.detach() for t in arguments((N, 3, 16, 16), 2, torch.float32, rows="one")]
    x, g = LAYOUTS[layout](inputs[0]), LAYOUTS[layout](torch.randn_like(inputs[0]))
    rest = inputs[1:]
    with LargeTensors(x.untyped_storage().nbytes() // 2, [x, g]) as forward:
        results = aten.forward(Inputs(x, *rest, 2, 1e-5))
    assert [t.untyped_storage().data_ptr() for t in forward.new] == [results.y.untyped_storage().data_ptr()]
    with LargeTensors(x.untyped_storage().nbytes() // 2, [x, g]) as backward:
        inputs = Inputs(x, *rest[:4], None, 2, 1e-5)
        dx, *_ = aten.backward(Results(g, *[None] * 4), inputs, results._replace(y=None), 1)
    assert [t.untyped_storage().data_ptr() for t in backward.new] == [dx.untyped_storage().data_ptr()]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mean", [2, aten.FAR - 0.5, aten.FAR + 0.5], ids=["near", "just-near", "just-far"])
def test_digits_at_moderate_means(mean, layout):
    """Below the mean from which x is centred, float32: output and dx are right to 1e-6 there, and beyond it too."""
    x = LAYOUTS[layout]((torch.randn(8, 16, 12, 12, dtype=torch.float64) + mean).float())
    g = torch.randn_like(x)
    results = []
    for leaf in (x.clone().requires_grad_(), x.double().requires_grad_()):
        if leaf.dtype == torch.float32:
            y, _ = batch_kalman_norm(leaf, None, None, None, None)
        else:
            y = F.batch_norm(leaf, None, None, training=True)
        results.append((y.detach(), torch.autograd.grad(y, leaf, g.to(y.dtype))[0]))
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual, expected) < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mean", [2, aten.FAR - 0.5, aten.FAR + 0.5], ids=["near", "just-near", "just-far"])
def test_digits_of_the_gradient_of_a_scale(mean, layout):
    """Σ g (x - x̄) / σ, also where g has a mean: right to what x̄ in float32 leaves of it, below that mean and beyond."""
    x = LAYOUTS[layout]((torch.randn(8, 48, 24, 24, dtype=torch.float64) + mean).float())
    g = LAYOUTS[layout](torch.randn_like(x) + 1)
    found, expected = (torch.ones(48, dtype=dtype, requires_grad=True) for dtype in (torch.float32, torch.float64))
    batch_kalman_norm(x, None, None, found, None)[0].backward(g)
    F.batch_norm(x.double(), None, None, expected, training=True).backward(g.double())
    rounding = torch.finfo(torch.float32).eps * mean * g.double().abs().sum((0, 2, 3))
    assert ((found.grad.double() - expected.grad).abs() / rounding).square().mean().sqrt().item() < 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_digits_where_the_prior_is_wider_than_the_batch(layout):
    """x̄ lies few deviations of the posterior from 0 and 300 of x's own: Σ g (x - mean) must not be Σ g x - mean Σ g."""
    inputs = arguments((8, 48, 24, 24), 2, torch.float32)
    x = LAYOUTS[layout](3 + 0.005 * inputs[0].detach())
    g = LAYOUTS[layout](torch.randn_like(x))
    rest, grads = (torch.full_like(inputs[1], 3), *inputs[2:]), []
    for dtype, function in ((torch.float32, op), (torch.float64, naive.batch_kalman_norm)):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, *rest)]
        grads.append(torch.autograd.grad(function(*leaves, 2, 1e-5)[0], leaves[4], g.to(dtype))[0])
    assert relative_error(*grads) < 2e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_channel_that_stands_still(layout):
    """No variance, and a mean far from 0: the output is β, and nothing is NaN."""
    x = torch.randn(4, 3, 6, 6)
    x[:, 1] = 300.0
    x = LAYOUTS[layout](x).requires_grad_()
    y, posterior = batch_kalman_norm(x, None, None, torch.ones(3), torch.full((3,), 2.0), statistics_batch_size=2)
    assert (y[:, 1] == 2).all()
    assert (posterior.var[:, 1] == 0).all()
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    assert dx.isfinite().all()
