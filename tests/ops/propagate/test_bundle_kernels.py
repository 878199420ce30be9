"""Bundles on Triton's kernels against the same in PyTorch's operations and float64: every entry, every gradient.

Memory that the kernels are to fill holds NaN before, so that nothing they leave out can pass.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torchvision
from torch.nn import functional as F

from kalmannorm._ops.propagate import aten, triton_bundle, triton_tables
from kalmannorm._ops.propagate.bundle import ROWS
from kalmannorm._running import bundling
from support.bundled_nets import IMAGE, VECTOR, Blocks, Branches, Pre, Smooth, Twice, bundles, converted
from support.poisoned import DEVICE, poison

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # Triton's interpreter

CASES = {
    "residual chain, groups, depthwise": (Blocks, IMAGE, {}),
    "channels_last": (lambda: Blocks().to(memory_format=torch.channels_last), IMAGE, {}),
    "two knots": (lambda: Blocks(F.hardswish), IMAGE, {}),
    "branches, transposed, gate": (Branches, IMAGE, {}),
    "sums before norms, linear layers": (Pre, VECTOR, {"per_channel_gain": True}),
    "quadrature": (Smooth, (4, 4), {}),
    "no layers": (Twice, (4, 4), {}),
    "standardized filters": (Blocks, IMAGE, {"weight_standardization": True}),
    "filters beside weights": (
        lambda: Branches().to(memory_format=torch.channels_last),
        IMAGE,
        {"weight_standardization": True},
    ),
}


def relative(found, expected):
    assert found.shape == expected.shape
    return ((found.double().cpu() - expected.cpu()).abs().max() / expected.abs().max().cpu().clamp(min=1e-3)).item()


def run(bundle, tensors, at_rows, at, asked):
    made = triton_bundle.forward(bundle, tensors, torch.float32, torch.device(DEVICE), True)
    return made, triton_bundle.backward(bundle, tensors, made.saved, made.state, at_rows, at, asked)


def arriving(bundle, missing=()):
    others = bundle.results[len(bundle.norms) :]
    at = [tuple(torch.randn(1, result.numel(), device=DEVICE) for _ in range(2)) for result in others]
    for i, row in missing:
        at[i] = tuple(None if r == row else grad for r, grad in enumerate(at[i]))
    return torch.randn(ROWS, bundle.channels, device=DEVICE), at


def double(values):
    return [None if value is None else value.double() for value in values]


@torch.no_grad()
def compare(bundle, tensors, missing=(), tolerance=2e-6):
    at_rows, at = arriving(bundle, missing)
    asked = [True] * len(tensors)
    made, grads = run(bundle, tensors, at_rows, at, asked)
    exact = aten.forward(bundle, double(tensors), torch.float64, torch.device(DEVICE), True)
    pairs = [tuple(double(pair)) for pair in at]
    expected = aten.backward(bundle, double(tensors), exact.saved, exact.state, at_rows.double(), pairs, asked)
    assert all(relative(a, b) < tolerance for a, b in zip(made.rows, exact.rows, strict=True))
    for found, wanted in zip(made.others, exact.others, strict=True):
        assert all(relative(a, b) < tolerance for a, b in zip(found, wanted, strict=True))
    for i, (found, wanted) in enumerate(zip(grads, expected, strict=True)):
        assert found.dtype == tensors[i].dtype
        assert found.dim() < 4 or found.stride() == tensors[i].stride()
        assert relative(found, wanted) < (tolerance if found.dtype == torch.float32 else 1e-2), i


def prepared(make, shape, options, monkeypatch):
    model = converted(make(), shape, **options).to(DEVICE)
    found = bundles(model, torch.randn(shape, device=DEVICE), monkeypatch)
    poison(monkeypatch)
    return [(bundle, [tensor.requires_grad_() for tensor in tensors]) for bundle, tensors in found]


@pytest.mark.parametrize("case", CASES)
def test_equals_float64(case, monkeypatch):
    for bundle, tensors in prepared(*CASES[case], monkeypatch):
        compare(bundle, tensors)


def test_parts_that_hand_on(monkeypatch):
    """What one bundle gives, the next is given; gradients that did not arrive count as zero."""
    monkeypatch.setattr(bundling, "TOGETHER", 2)
    found = prepared(*CASES["residual chain, groups, depthwise"], monkeypatch)
    assert len(found) == 3 and found[2][0].given
    (first, tensors), last = found[1:]  # before them, the norm without a prior
    assert len(first.results) > len(first.norms)
    compare(first, tensors, missing=[(0, 0)])
    compare(first, tensors, missing=[(0, 0), (0, 1)])
    compare(*last)


@torch.no_grad()
def test_no_norm_returned_a_gradient(monkeypatch):
    monkeypatch.setattr(bundling, "TOGETHER", 2)
    bundle, tensors = prepared(*CASES["residual chain, groups, depthwise"], monkeypatch)[1]
    _, at = arriving(bundle)
    asked = [bool(mask >> len(bundle.norms)) for mask in bundle.masks]
    _, grads = run(bundle, tensors, None, at, asked)
    exact = aten.forward(bundle, double(tensors), torch.float64, torch.device(DEVICE), True)
    pairs = [tuple(double(pair)) for pair in at]
    expected = aten.backward(bundle, double(tensors), exact.saved, exact.state, None, pairs, asked)
    assert any(asked) and not all(asked)
    for found, wanted in zip(grads, expected, strict=True):
        assert (found is None and wanted is None) or relative(found, wanted) < 2e-6


def test_half_precision_weights(monkeypatch):
    """Weights are read in their own dtype, and so are their gradients written."""
    ((bundle, tensors),) = prepared(*CASES["channels_last"], monkeypatch)
    half = [tensor.detach().bfloat16() if tensor.dim() > 1 else tensor.detach() for tensor in tensors]
    biases = [layer.bias for stage in bundle.stages for layer in stage.layers if layer.bias is not None]
    for place in biases:
        half[place] = half[place].bfloat16()
    assert triton_bundle.applies(bundle, half)
    compare(bundle, [tensor.requires_grad_() for tensor in half])


@torch.no_grad()
def test_bit_for_bit_the_same_again(monkeypatch):
    ((bundle, tensors),) = prepared(*CASES["residual chain, groups, depthwise"], monkeypatch)
    arrived = arriving(bundle)
    first, second = (run(bundle, tensors, *arrived, [True] * len(tensors)) for _ in range(2))
    assert torch.equal(first[0].rows, second[0].rows)
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


@torch.no_grad()
def test_weights_that_need_no_gradient_and_weights_that_moved(monkeypatch):
    ((bundle, tensors),) = prepared(*CASES["sums before norms, linear layers"], monkeypatch)
    frozen = bundle.stages[0].layers[0].weight
    tensors[frozen].requires_grad_(False)
    arrived = arriving(bundle)
    asked = [i != frozen for i in range(len(tensors))]
    _, before = run(bundle, tensors, *arrived, asked)
    assert before[frozen] is None
    elsewhere = [tensor.clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    _, after = run(bundle, elsewhere, *arrived, asked)
    for a, b in zip(before, after, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def in_one_memory(tensors):
    """Copies of these tensors in one memory, the first one at its end."""
    starts, size = [], 0
    for tensor in reversed(tensors):
        starts.append(size)
        size += -(-tensor.numel() // 4) * 4
    memory = torch.zeros(size, device=DEVICE)
    places = [memory.as_strided(t.shape, t.stride(), s) for t, s in zip(tensors, reversed(starts), strict=True)]
    return [place.copy_(tensor) for place, tensor in zip(places, tensors, strict=True)]


def moved(bundle, tensors, move):
    """The same tensors, with filters elsewhere."""
    filters = dict(zip(bundle.filters, move([tensors[place] for place in bundle.filters]), strict=True))
    return [filters.get(place, tensor).requires_grad_() for place, tensor in enumerate(tensors)]


@torch.no_grad()
@pytest.mark.parametrize("case", ["standardized filters", "filters beside weights"])
@pytest.mark.parametrize("together", [True, False], ids=["in one memory", "one by one"])
def test_filters_are_read_where_each_forward_puts_them(case, together, monkeypatch):
    """One table serves them all."""
    ((bundle, tensors),) = [each for each in prepared(*CASES[case], monkeypatch) if each[0].filters]
    arrived, asked, kept, written = arriving(bundle), [True] * len(tensors), [], []
    bind = triton_tables.bind
    monkeypatch.setattr(triton_bundle, "bind", lambda *given: written.append(given) or bind(*given))
    expected = run(bundle, tensors, *arrived, asked)
    written.clear()
    for number in range(3):
        odd = torch.zeros(5 + 9 * number, device=DEVICE)  # memory is elsewhere in each forward
        now = moved(bundle, tensors, in_one_memory if together else lambda each: [torch.clone(t) for t in each])
        kept += [odd, now]
        found = run(bundle, now, *arrived, asked)
        assert torch.equal(found[0].rows, expected[0].rows)
        assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))
        if together:
            copied = {tensor.data_ptr() for tensor in found[0].saved[1:]}
            assert copied == {now[bundle.filters[0]].data_ptr()}
    assert len(written) == (together and len(bundle.filters) > 1)  # those of `prepared` are not in one memory


@torch.no_grad()
def test_a_known_table_is_not_used_for_filters_that_lie_in_another_way(monkeypatch):
    ((bundle, tensors),) = [each for each in prepared(*CASES["standardized filters"], monkeypatch) if each[0].filters]
    arrived, asked = arriving(bundle), [True] * len(tensors)
    expected = run(bundle, tensors, *arrived, asked)
    made = triton_bundle.forward(
        bundle, moved(bundle, tensors, in_one_memory), torch.float32, torch.device(DEVICE), True, expected[0].state
    )
    assert made.state is not expected[0].state
    assert torch.equal(made.rows, expected[0].rows)


@torch.no_grad()
def test_a_weight_of_many_outputs_is_shared_by_programs(monkeypatch):
    """Gradients at the inputs are then sums over the programs' shares."""
    monkeypatch.setattr(triton_tables, "ROW_WORK", 64)
    for bundle, tensors in prepared(*CASES["residual chain, groups, depthwise"], monkeypatch):
        bundle = dataclasses.replace(bundle, tables={})
        assert any(row[18] < row[4] for row in triton_tables.tables_of(bundle, torch.device(DEVICE)).rows)
        compare(bundle, tensors)


def test_priors_of_resnet101_take_few_launches(monkeypatch):
    """Step by step a forward and its backward were some 20,000."""
    model = converted(torchvision.models.resnet101(), (2, 3, 32, 32)).to(memory_format=torch.channels_last)
    forward = backward = 0
    for bundle, tensors in bundles(model, torch.randn(2, 3, 32, 32), monkeypatch):
        tables = triton_tables.tables_of(bundle, torch.device("cpu"))
        bound = triton_tables.bind(bundle, tables, tensors, [True] * len(tensors), (), None)
        tapes = sum(map(len, tables.tapes))
        forward += 3 + tapes + sum(len(stage.forward) for stage in bound.stages)
        backward += 4 + tapes + sum(len(stage.forward) + len(stage.backward) for stage in bound.stages)
    assert forward <= 30 and backward <= 45
