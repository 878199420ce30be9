"""Three ways of inference: who sees whom, and how they meet at the edges."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kalmannorm import BatchKalmanNorm1d, BatchKalmanNorm2d, BatchKalmanNorm3d, GhostBatchNorm2d, Moments, set_inference
from support.inference_net import Net
from support.wide import narrow


def trained(m=2, **options):
    net = Net(m, **options)
    with torch.no_grad():
        for _ in range(20):
            net(torch.randn(8, 3, 7, 6) + torch.randn(8, 3, 1, 1))
    return net.eval()


def test_example_ignores_its_neighbours():
    """Alone, in any batch, at any place: the same output to float32 rounding, and no gradient between examples."""
    net, x = trained(), torch.randn(7, 3, 7, 6) + torch.randn(7, 3, 1, 1)
    set_inference(net, "example")
    alone = torch.cat([net(row) for row in x.split(1)])
    order = torch.randperm(7)
    scale = alone.abs().max()
    for together in (net(x), net(x[order])[order.argsort()], torch.cat([net(x[:3]), net(x[3:])])):
        assert (together - alone).abs().max() <= 1e-5 * scale
    x.requires_grad_()
    (dx,) = torch.autograd.grad(net(x)[2].sum(), x)
    assert dx[2].abs().max() > 0
    assert dx[[0, 1, 3, 4, 5, 6]].abs().max() == 0


def test_population_ignores_neighbours_and_batch_does_not():
    net, x = trained(), torch.randn(4, 3, 7, 6)
    torch.testing.assert_close(net(x)[:1], net(x[:1]), rtol=1e-5, atol=1e-5)
    set_inference(net, "batch")
    assert (net(x)[:1] - net(x[:1])).abs().max() > 1e-2


def test_example_with_m_1_equals_batch():
    net, x = trained(m=1), torch.randn(5, 3, 7, 6)
    set_inference(net, "example")
    example = net(x)
    set_inference(net, "batch")
    torch.testing.assert_close(example, net(x), rtol=1e-5, atol=1e-5)


def test_example_approaches_population_for_a_fixed_prior():
    """m → ∞ with a prior that does not vary by group: the population's posterior is that of the average observation."""
    prior = Moments(torch.randn(1, 4).double(), torch.rand(1, 4).double() + 0.5)
    x = torch.randn(64, 4, 3, 3, dtype=torch.float64) * 2 + 1

    def layer(m):
        made = BatchKalmanNorm2d(
            4, 4, statistics_batch_size=m, transition="identity", gain=0.3, momentum=None, dtype=torch.float64
        )
        made(x, prior)  # one batch of one group: running = posterior of the whole, observed = its observation
        return made.eval()

    gaps = []
    for m in (10**2, 10**4, 10**6):
        made = layer(m)
        population = made(x, prior)
        made.set_inference("example")
        gaps.append((made(x, prior) - population).abs().max().item())
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 1e-5


@pytest.mark.parametrize("kind", [BatchKalmanNorm1d, BatchKalmanNorm2d, BatchKalmanNorm3d])
def test_population_is_exactly_a_batch_norm(kind):
    shape = (6, 4) + (3,) * {BatchKalmanNorm1d: 1, BatchKalmanNorm2d: 2, BatchKalmanNorm3d: 3}[kind]
    layer = kind(4, 2, statistics_batch_size=2)
    layer(torch.randn(shape), Moments(torch.randn(3, 2), torch.rand(3, 2)))
    layer.eval()
    x = torch.randn(shape)
    expected = F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias, eps=layer.eps)
    assert torch.equal(layer(x, Moments(torch.randn(1, 2), torch.rand(1, 2))), expected)


@pytest.mark.parametrize("N", [4, 5, 1], ids=["N4", "N5-ragged", "N1"])
@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_batch_mode_equals_training(N, covariance):
    net, x = trained(covariance=covariance), torch.randn(N, 3, 7, 6)
    set_inference(net, "batch")
    inference = net(x)
    torch.testing.assert_close(inference, net.train()(x), rtol=1e-4, atol=1e-5)


def test_virtual_group_is_one_example_among_average_ones():
    """Against a group really made of the example and m - 1 copies with the average's moments."""
    m = 4
    layer = GhostBatchNorm2d(1, statistics_batch_size=m, momentum=None, dtype=torch.float64)
    average = torch.randn(1, 1, 50, 50, dtype=torch.float64) * 3 + 2
    layer(average)
    layer.eval().set_inference("example")
    x = torch.randn(1, 1, 50, 50, dtype=torch.float64)
    group = torch.cat([x, *[average] * (m - 1)])
    expected = F.batch_norm(group, None, None, training=True)[:1]
    torch.testing.assert_close(layer(x), expected, rtol=1e-10, atol=1e-10)


def test_posterior_has_one_row_per_group_in_every_mode():
    net, x = trained(attribute=True), torch.randn(6, 3, 7, 6)
    for mode, rows in (("population", 1), ("batch", 3), ("example", 6)):
        set_inference(net, mode)
        net(x)
        assert all(norm.posterior.mean.shape[0] == rows for norm in net.norms)


def test_inference_in_half_precision():
    net, x = trained(), torch.randn(6, 3, 7, 6)
    half = trained()
    half.load_state_dict(net.state_dict())
    half.bfloat16()
    for mode in ("population", "batch", "example"):
        set_inference(net, mode)
        set_inference(half, mode)
        expected, actual = net(x), half(x.bfloat16())
        assert actual.dtype == torch.bfloat16
        assert ((actual.float() - expected).norm() / expected.norm()) < 2e-2


@pytest.mark.parametrize("make", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["copy", "pickle"])
def test_example_after_training_on_small_batches_as_they_are(make):
    """Batches of 2 that are one group each, then m = 2 for inference: as with groups of 2 from the beginning."""
    torch.manual_seed(0)
    grouped, whole = Net(2), Net(None)
    whole.load_state_dict(grouped.state_dict())
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(2, 3, 7, 6) + torch.randn(2, 3, 1, 1)
            grouped(x), whole(x)
    x = torch.randn(5, 3, 7, 6)
    set_inference(grouped.eval(), "example")
    with pytest.raises(ValueError, match=r"set_inference\(model, 'example', statistics_batch_size=m\)"):
        set_inference(whole.eval(), "example")
    set_inference(whole, "example", statistics_batch_size=2)
    torch.testing.assert_close(whole(x), grouped(x), rtol=0, atol=0)
    again = make(whole)
    set_inference(again, "population")
    set_inference(again, "example")  # m was kept
    torch.testing.assert_close(again(x), grouped(x), rtol=0, atol=0)
    set_inference(again, "example", statistics_batch_size=4)
    assert (again(x) - grouped(x)).abs().max() > 1e-3


def test_m_of_example_inference_does_not_change_training_or_batch():
    layer, x = BatchKalmanNorm2d(3), torch.randn(6, 3, 4, 4)
    set_inference(layer, "example", statistics_batch_size=2)
    torch.testing.assert_close(layer(x), F.batch_norm(x, None, None, training=True))
    set_inference(layer.eval(), "batch")
    torch.testing.assert_close(layer(x), F.batch_norm(x, None, None, training=True))
    assert "statistics_batch_size=None" in repr(layer)
    assert "example_batch_size=2" in repr(layer)


def test_m_of_example_inference_by_layer():
    model = nn.Sequential(BatchKalmanNorm2d(3), nn.Sequential(BatchKalmanNorm2d(3, statistics_batch_size=4)))
    set_inference(model, "example", statistics_batch_size={"0": 2})
    assert (model[0].example_batch_size, model[1][0].example_batch_size) == (2, None)
    assert [norm.inference for norm in (model[0], model[1][0])] == ["example"] * 2


def test_set_inference_sets_all_or_none():
    model = nn.Sequential(BatchKalmanNorm2d(3, statistics_batch_size=2), BatchKalmanNorm2d(3))
    with pytest.raises(ValueError, match=r"layer '1'.*statistics_batch_size=None"):
        set_inference(model, "example")
    assert model[0].inference == "population"


@pytest.mark.parametrize("mode", ["population", "batch", "example"])
@pytest.mark.parametrize("attribute", [False, True], ids=["returned", "attribute"])
@pytest.mark.parametrize("channels_last", narrow([False, True], [False]), ids=["contiguous", "channels_last"])
def test_export_holds_no_trace_of_us(mode, channels_last, attribute):
    """Plain ATen operations, and a dynamic batch; in `batch` mode any number of whole groups."""
    net = trained(attribute=attribute)
    set_inference(net, mode)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(4, 3, 7, 6).contiguous(memory_format=memory_format)
    batch = 2 * torch.export.Dim("groups", min=2, max=32) if mode == "batch" else torch.export.Dim("batch", max=64)
    program = torch.export.export(net, (x,), strict=False, dynamic_shapes={"x": {0: batch}})
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [t for t in targets if "kalmannorm" in t]
    for N in (4, 6, 12) if mode == "batch" else (2, 4, 7):
        z = torch.randn(N, 3, 7, 6).contiguous(memory_format=memory_format)
        torch.testing.assert_close(program.module()(z), net(z), rtol=1e-5, atol=1e-5)
    held = [norm.posterior for norm in net.norms]
    assert held == [None] * 3 or all(type(posterior.mean) is torch.Tensor for posterior in held)


@pytest.mark.parametrize("finish", [{}, {"relu": True}, {"relu": True, "residual": True}], ids=["", "relu", "residual"])
@pytest.mark.parametrize("prior", [None, 1, "rows"], ids=["no prior", "one row", "rows"])
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("mode", ["batch", "example"])
def test_the_op_infers_what_plain_operations_do(mode, size, prior, finish, monkeypatch):
    """Exports run in plain operations, everything else in the op: the numbers and gradients are the same."""
    C, x = 3, (3 + 2 * torch.randn(6, 3, 4, 5)).double()
    layer = BatchKalmanNorm2d(
        C, prior_features=C, transition="identity", per_channel_gain=True, statistics_batch_size=size, inference=mode
    ).double()
    with torch.no_grad():
        for tensor in (layer.weight, layer.bias, layer.gain_logit, layer.observed_mean, layer.observed_var):
            tensor.uniform_(0.2, 2)
    layer.eval()
    rows = {None: 0, 1: 1, "rows": 6 if mode == "example" else -(-6 // size)}[prior]
    previous = Moments(torch.randn(rows, C).double(), torch.rand(rows, C).double() + 0.1) if rows else None
    options = {**finish, "residual": torch.randn_like(x)} if "residual" in finish else finish

    def inferred():
        given = x.clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a layer that was called without its prior
            y, posterior = layer(given, previous, return_posterior=True, **options)
        parameters = [given, layer.weight, layer.bias, *([layer.gain_logit] if rows else [])]
        return [y, *posterior[:2], *torch.autograd.grad(y.square().sum(), parameters)]

    found = inferred()
    monkeypatch.setattr("kalmannorm._norms.grouped.plainly", lambda: True)
    for a, b in zip(found, inferred(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
