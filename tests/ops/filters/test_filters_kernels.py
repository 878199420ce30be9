"""Filters of many convolutions in one launch: the numbers of the definition, in both directions, and the same bits
however many layers are computed together."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from kalmannorm._norms.computed_weights import compute_weights
from kalmannorm._ops import dispatch
from kalmannorm._ops.filters import definition, together, triton_together
from kalmannorm._ops.filters.together import filters_of
from support.poisoned import DEVICE, poison
from support.wide import narrow

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # of Triton's interpreter

SHAPES = {
    "one value": (1, 1, 1, 1),
    "depthwise": (37, 1, 3, 3),
    "one tap": (5, 70, 1, 1),
    "odd": (7, 3, 7, 5),
    "longer than the tile of many rows": (6, 8, 3, 3),
    "several passes over a row": (3, 300, 3, 3),
    "1d": (4, 5, 3),
    "3d": (3, 4, 2, 3, 2),
    "more rows than a tile": (70, 2, 3, 3),
}
COMPUTATIONS = ["centred", "standardized", "scaled"]
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    """On a CPU they run in Triton's interpreter, on memory that is NaN until it is filled."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(dispatch, "has_kernels", lambda device: True)
    monkeypatch.setattr(triton_together, "_UPLOADS", triton_together.Uploads())
    poison(monkeypatch)


def weights(dtype=torch.float32, last=False, shapes=None):
    made = []
    for number, shape in enumerate(shapes or SHAPES.values()):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(number)) * 0.3 + 0.1 * number
        layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape)) if last else None
        weight = weight.contiguous(memory_format=layout or torch.contiguous_format)
        made.append(weight.to(DEVICE, dtype).requires_grad_())
    return made


def gradients_like(tensors):
    made = []
    for number, tensor in enumerate(tensors):
        grad = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(100 + number))
        made.append(torch.empty_like(tensor).copy_(grad))
    return made


def by_definition(given, grads, computation):
    exact = [weight.detach().double().requires_grad_() for weight in given]
    made = [getattr(definition, computation)(weight) for weight in exact]
    return made, torch.autograd.grad(made, exact, [grad.double() for grad in grads])


def counted(monkeypatch):
    """A list that gets the name of every kernel that is launched."""
    launched, original = [], triton_together.ready

    def ready(kernel, *args, **options):
        launched.append(kernel.__name__)
        return original(kernel, *args, **options)

    monkeypatch.setattr(triton_together, "ready", ready)
    return launched


def assert_near(found, expected, dtype):
    """Relative to the largest number of each."""
    for one, other in zip(found, expected, strict=True):
        error = (one.double() - other).abs().max() / other.abs().max().clamp(min=1.0)
        assert error < TOLERANCES[dtype], error


@pytest.mark.parametrize("computation", COMPUTATIONS)
@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", narrow(list(TOLERANCES), [torch.float32, torch.bfloat16]), ids=str)
def test_are_those_of_the_definition(dtype, last, computation, monkeypatch):
    launched, given = counted(monkeypatch), weights(dtype, last)
    grads = gradients_like(given)
    made = filters_of(given, computation)
    found = torch.autograd.grad(made, given, grads)
    assert launched == ["filters_kernel", "filters_backward_kernel"]
    for each, weight in zip((*made, *found), given * 2, strict=True):
        assert (each.shape, each.stride(), each.dtype) == (weight.shape, weight.stride(), weight.dtype)
        assert each.data_ptr() % 16 == 0
    expected = by_definition(given, grads, computation)
    assert_near(made, expected[0], dtype)
    assert_near(found, expected[1], dtype)


@pytest.mark.parametrize("computation", COMPUTATIONS)
def test_bits_do_not_depend_on_other_layers(computation):
    given = weights()
    grads = gradients_like(given)
    made = filters_of(given, computation)
    found = torch.autograd.grad(made, given, grads)
    for weight, grad, filter, change in zip(given, grads, made, found, strict=True):
        alone = filters_of([weight], computation)[0]
        assert torch.equal(alone, filter)
        assert torch.equal(torch.autograd.grad(alone, weight, grad)[0], change)
    for one, other in zip(filters_of(given, computation), made, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("computation", COMPUTATIONS)
def test_filters_that_nobody_uses_and_frozen_weights(computation):
    given = weights()
    given[3].requires_grad_(False)
    made, grads = filters_of(given, computation), gradients_like(given)
    assert [each.requires_grad for each in made] == [place != 3 for place in range(len(made))]
    used = [place for place in range(len(made)) if place not in (1, 3)]
    sum((made[place] * grads[place]).sum() for place in used).backward()
    assert given[1].grad is None and given[3].grad is None
    expected = by_definition(given, grads, computation)[1]
    assert_near([given[place].grad for place in used], [expected[place] for place in used], torch.float32)


@pytest.mark.parametrize("computation", COMPUTATIONS)
def test_gradients_in_another_order(computation):
    """As cuDNN makes them for activations in channels_last: with other strides, and expanded."""
    given = weights()
    grads = gradients_like(weights(last=True))
    grads[3] = grads[3][:, :1].expand_as(given[3])
    found = torch.autograd.grad(filters_of(given, computation), given, grads)
    assert_near(found, by_definition(given, grads, computation)[1], torch.float32)


@pytest.mark.parametrize("computation", COMPUTATIONS)
def test_while_a_graph_is_captured(computation, monkeypatch):
    """Nothing is uploaded."""
    given = weights()
    grads = gradients_like(given)
    expected = filters_of(given, computation)
    expected_grads = torch.autograd.grad(expected, given, grads)

    before = triton_together._UPLOADS.known

    class Capturing:
        def find(self, key, device, make):
            return before[key][1] if key[0] == "layers" and key in before else None

    monkeypatch.setattr(triton_together, "_UPLOADS", Capturing())
    made = filters_of(given, computation)
    found = torch.autograd.grad(made, given, grads)
    some = torch.autograd.grad(filters_of(given, computation)[2:], given, grads[2:], allow_unused=True)
    for one, other in zip((*made, *found), (*expected, *expected_grads), strict=True):
        assert torch.equal(one, other)
    assert some[0] is None and some[1] is None
    assert all(torch.equal(one, other) for one, other in zip(some[2:], expected_grads[2:], strict=True))
    before.clear()
    for one, other in zip(filters_of(given, computation), expected, strict=True):  # no table: PyTorch operations
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("computation", COMPUTATIONS)
def test_second_derivatives(computation):
    given = weights(shapes=((3, 2, 3, 3), (4, 5, 1, 1)))
    grads = gradients_like(given)

    def penalty(made, tensors):
        first = torch.autograd.grad(made, tensors, [grad.to(made[0].dtype) for grad in grads], create_graph=True)
        return torch.autograd.grad(sum((g * w).square().sum() for g, w in zip(first, tensors, strict=True)), tensors)

    exact = [weight.detach().double().requires_grad_() for weight in given]
    expected = penalty([getattr(definition, computation)(weight) for weight in exact], exact)
    for one, other in zip(penalty(filters_of(given, computation), given), expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_other_differentiation_takes_plain_operations(monkeypatch):
    launched, weight = counted(monkeypatch), weights(shapes=((3, 2, 3, 3),))[0].detach()
    grad = torch.func.grad(lambda w: filters_of([w], "standardized")[0].pow(3).sum())(weight)
    weight.requires_grad_()
    expected = torch.autograd.grad(definition.standardized(weight).pow(3).sum(), weight)[0]
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)
    torch.func.jvp(lambda w: filters_of([w], "standardized")[0], (weight.detach(),), (torch.ones_like(weight),))
    assert not launched


def test_weights_that_kernels_cannot_read(monkeypatch):
    """float64, and rows with gaps. Other dtypes have launches of their own."""
    launched = counted(monkeypatch)
    gaps = torch.randn(4, 6, 3, 3, device=DEVICE)[:, ::2]
    torch.testing.assert_close(filters_of([gaps], "standardized")[0], definition.standardized(gaps))
    exact = torch.randn(4, 6, 3, 3, device=DEVICE, dtype=torch.float64)
    torch.testing.assert_close(filters_of([exact], "standardized")[0], definition.standardized(exact))
    assert not launched
    mixed = [*weights(shapes=((3, 2, 3, 3),)), exact, *weights(torch.bfloat16, shapes=((3, 2, 3, 3),))]
    assert [each.dtype for each in filters_of(mixed, "standardized")] == [each.dtype for each in mixed]
    assert launched == ["filters_kernel"] * 2


def test_few_lists_of_addresses_are_kept():
    uploads = triton_together._UPLOADS
    weights = [torch.randn(2, 2, 1, 1, device=DEVICE) for _ in range(2 * triton_together.KEPT)]
    for weight in weights:
        filters_of([weight], "centred")
    assert len(uploads.known) == triton_together.KEPT


@pytest.mark.parametrize("gradients", [True, False], ids=["training", "without gradients"])
def test_one_launch_for_a_model(gradients, monkeypatch):
    """And one for its backward. The hooks of the model make it."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(8, 4, 1)).to(DEVICE)
    compute_weights(model, "standardized")
    launched, x = counted(monkeypatch), torch.randn(2, 3, 8, 8, device=DEVICE)
    with nullcontext() if gradients else torch.inference_mode():
        out = model(x)
    if gradients:
        out.sum().backward()
    assert launched == ["filters_kernel", "filters_backward_kernel"][: 1 + gradients]
    expected = x
    for module in model:
        weight = None if isinstance(module, nn.ReLU) else definition.standardized(module.weight)
        expected = (
            expected.relu()
            if weight is None
            else nn.functional.conv2d(expected, weight, module.bias, groups=module.groups)
        )
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_several_ranks_get_gradients_during_the_backward(ranks, monkeypatch):
    """In one process the node of all filters runs at the end."""
    layers = [nn.Conv2d(8, 8, 1, bias=False) for _ in range(4)]
    model = nn.Sequential(nn.Conv2d(8, 8, 1), *layers).to(DEVICE)
    compute_weights(model, "standardized")
    monkeypatch.setattr(together, "_several_ranks", lambda: ranks > 1)
    monkeypatch.setattr(together, "RANKS_AT_ONCE", 2 * 4 * 64)
    launched, order = counted(monkeypatch), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    x = torch.randn(2, 8, 4, 4, device=DEVICE)
    loss = model(x).square().sum()
    loss.backward()
    chunks = [["4"], ["3", "2"], ["1", "0"]]
    assert len(launched) == 2 * (len(chunks) if ranks > 1 else 1)
    assert sorted(order) == sorted(name for name, _ in model.named_parameters())
    if ranks > 1 and hasattr(loss.grad_fn, "_set_sequence_nr"):  # not in every version of torch
        assert order[0] == "4.weight" and set(order[1:3]) == {"3.weight", "2.weight"}
    elif ranks == 1:
        assert order[0] == "0.bias"
