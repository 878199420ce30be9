"""Triton's compiler takes the kernels of the op, of tracking and of priors, for a GPU that need not be there.

Its interpreter lets more pass.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from support.wide import narrow

pytest.importorskip("triton", minversion="3.3")

from kalmannorm import Moments, convert
from kalmannorm._ops import dispatch
from kalmannorm._ops.filters import triton_together
from kalmannorm._ops.moving import triton_moving_run
from kalmannorm._ops.moving.arguments import History, Settings
from kalmannorm._ops.normalize import tiling, triton_run, triton_settled_run
from kalmannorm._ops.normalize.arguments import Inputs, Results, SettledGrads, SettledInputs
from kalmannorm._ops.predict import triton_predict
from kalmannorm._ops.propagate import triton_bundle
from kalmannorm._ops.track import triton_many, triton_one
from kalmannorm._ops.track.request import TrackingRequest
from support.triton_compiled import SMALLEST

CASES = {
    "held, a value for each thread": ((6, 8, 2, 2), True, (32, 32, 0), False),
    "held, channels_last": ((6, 64, 4, 4), True, (32, 32, 0), True),
    "on chip, channels_last": ((6, 64, 4, 4), True, (16, 32, 0), False),
    "streamed, channels_last": ((6, 24, 4, 4), True, (8, 32, 2), True),
    "streamed, positions abreast": ((6, 24, 8, 8), True, (4, 64, 2, 4, 8), True),
    "on chip, lanes that begin anew": ((6, 64, 40, 40), True, (16, 32, 0), False),
    "streamed, lanes that begin anew": ((6, 8, 40, 40), False, (4, 8, 2), False),
    "on chip": ((6, 8, 14, 14), False, (256, 8, 0), True),
    "streamed, one channel": ((6, 1, 5, 1), False, (4, 1, 3), False),
}


@pytest.mark.parametrize(("shape", "last", "launch", "residual"), CASES.values(), ids=CASES.keys())
def test_the_op(shape, last, launch, residual, compiled, monkeypatch):
    monkeypatch.setattr(triton_run, "launch_for", lambda shape, _, **how: tiling.launch_of(shape, *launch))
    C = shape[1]
    x = torch.zeros(shape, dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    filtered = torch.zeros(1, C), torch.ones(1, C), torch.tensor(0.5)
    weight, bias = torch.ones(C), torch.zeros(C)
    results = triton_run.forward(Inputs(x, *filtered, weight, bias, 2, 1e-5, x if residual else None, True))
    grads = list(torch.zeros(4, 3, C)) if residual else [None] * 4
    inputs = Inputs(x, *filtered, weight, None if residual else bias, 2, 1e-5, None, True)
    triton_run.backward(Results(x, *grads), inputs, results if residual else results._replace(y=None), 1)
    again = Inputs(x, None, None, None, weight, bias, 2, 1e-5, x if residual else None, True)
    triton_run.again(again, *results[1:4])
    streamed = {"reduce_kernel", "apply_kernel"}
    expected = {"forward_kernel", "backward_kernel"}
    if launch[0] == 32:
        expected = {f"held_{name}" for name in expected}
        assert "ld.global.v" in compiled["held_forward_kernel"]
    elif launch[2]:
        expected = streamed | {f"backward_{name}" for name in streamed}
    else:  # 196 positions are no multiple of 16, but of 4
        assert re.search(r"cp\.async\S* \[.*\], \[.*\], 0x(8|10)", compiled["forward_kernel"])
    assert compiled.keys() == expected | {"sum_over_groups_kernel", "again_kernel"}
    assert "atom" not in compiled["again_kernel"] and "fma.rn.f32" in compiled["again_kernel"]


def settle(x, m, residual, rows=1):
    """Launch both directions of a settled norm, on `rows` rows of parameters, for one with a residual and a ReLU."""
    G, C = -(-x.shape[0] // m), x.shape[1]
    prior = [torch.zeros(rows, C), torch.ones(rows, C), torch.ones(C) if rows == 1 else torch.ones(rows, C)]
    affine = [torch.ones(C), torch.zeros(C)] if rows == 1 else [torch.ones(rows, C), torch.zeros(rows, C)]
    inputs = SettledInputs(x, *prior, *affine, *torch.ones(2, C), m, 1e-5, x if residual else None, True)
    made = triton_settled_run.forward(inputs)
    grads = list(torch.zeros(4, G, C)) if residual else [None] * 4
    known = made.centre, made.rho, *made[3:5], torch.zeros(C, 3)
    mask = made.y if residual else None
    triton_settled_run.backward(SettledGrads(x, x, mask, *inputs[1:6], *known, *grads, m, True, residual))


@pytest.mark.parametrize(("shape", "last", "launch", "residual"), CASES.values(), ids=CASES.keys())
def test_a_settled_norm(shape, last, launch, residual, compiled, monkeypatch):
    def chosen(shape, _, **how):
        return (how := tiling.launch_of(shape, *launch))._replace(splits=max(how.splits, 1))

    monkeypatch.setattr(triton_settled_run, "settling", chosen)
    x = torch.zeros(shape, dtype=torch.bfloat16)
    settle(x.contiguous(memory_format=torch.channels_last) if last else x, 2, residual, rows=3 if residual else 1)
    merged = {"settled_merge_kernel"} if launch[2] > 1 else set()
    assert compiled.keys() == {"settled_forward_kernel", "settled_backward_kernel", "settled_sums_kernel"} | merged
    assert not any("atom" in assembly for assembly in compiled.values())


@pytest.mark.parametrize(("shape", "last", "launch", "affine"), CASES.values(), ids=CASES.keys())
def test_moving_average(shape, last, launch, affine, compiled, monkeypatch):
    def chosen(shape, _, **how):
        return (how := tiling.launch_of(shape, *launch))._replace(splits=max(how.splits, 1))

    monkeypatch.setattr(triton_moving_run, "observing", chosen)
    C = shape[1]
    x = torch.zeros(shape, dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    seen, past, counts = Moments(*torch.ones(2, 3, C)), torch.ones(15, C), torch.zeros(2, dtype=torch.int64)
    weight, bias = (torch.ones(C), torch.zeros(C)) if affine else (None, None)
    history, settings = History(past, torch.ones(C), *counts), Settings(2, 1e-5, 100)
    _, rows = triton_moving_run.forward(x, weight, bias, seen, history, settings)
    triton_moving_run.append(past, counts[0], seen)
    triton_moving_run.backward(x, x, weight, bias, rows, past, settings)
    own = {f"moving_{name}_kernel" for name in ("forward", "merge", "backward", "push")}
    assert compiled.keys() == own | {"backward_reduce_kernel"} | ({"sum_over_groups_kernel"} if affine else set())
    assert not any("atom" in assembly for assembly in compiled.values())
    assert max(compiled.shared.values()) <= SMALLEST


def functions():
    """Of the modules of kernels, parsed."""
    for path in sorted(Path(dispatch.__file__).parent.rglob("triton_*.py")):
        for each in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(each, ast.FunctionDef):
                yield each


def kernels():
    found = [function for function in functions() if function.name.endswith("_kernel")]
    assert len(found) > 20
    return found


def summed_products(function):
    """The sums over threads in a function, and those of them that are of a product."""

    def product(value):
        if isinstance(value, ast.UnaryOp):
            return product(value.operand)
        if isinstance(value, ast.Name):
            return any(product(each) for each in assigned.get(value.id, ()))
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "tl.where":
            return any(product(each) for each in value.args[1:])
        return isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult)

    nodes, assigned = list(ast.walk(function)), {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned.setdefault(node.targets[0].id, []).append(node.value)
    sums = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.sum"]
    return sums, [ast.unparse(node) for node in sums if product(node.args[0])]


def test_products_are_rounded_before_threads_sum_them():
    """In tiles of any size: `sum_of_products`."""
    found = [summed_products(each) for each in functions()]
    assert sum(len(sums) for sums, _ in found) > 20
    assert not [each for _, products in found for each in products]


@pytest.mark.parametrize(
    "code", ["tl.sum(-(a * b), 0)", "c = a * b\n    tl.sum(c, 0)", "tl.sum(tl.where(m, a * b, 0.0), 0)"]
)
def test_products_are_found_where_they_are(code):
    assert summed_products(ast.parse(f"def kernel():\n    {code}\n").body[0])[1]


def test_every_kernel_waits_for_its_turn():
    """It is the first statement of each: nothing is touched before."""
    for function in kernels():
        first = next(each for each in function.body if not isinstance(getattr(each, "value", None), ast.Constant))
        assert ast.unparse(first) == "await_previous(PDL)", function.name


def test_constants_are_the_last_parameters_of_every_kernel():
    """A launch that was made ready passes them behind what it is given."""
    for function in kernels():
        constants = [argument.annotation is not None for argument in function.args.args]
        assert constants == sorted(constants), function.name


def test_launches_that_overlap_wait_first(compiled, monkeypatch):
    """On Hopper: nothing is read before the launch before is done."""
    monkeypatch.setattr(triton_run, "launch_options", lambda device: {"PDL": True, "launch_pdl": True})
    monkeypatch.setattr(triton_run, "launch_for", lambda shape, _, **how: tiling.launch_of(shape, 16, 32, 2))
    x = torch.zeros((6, 64, 16, 4), dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    inputs = Inputs(x, None, None, None, None, None, 2, 1e-5)
    results = triton_run.forward(inputs)
    triton_run.backward(Results(x, *[None] * 4), inputs, results._replace(y=None), 0)
    for name in ("reduce_kernel", "apply_kernel"):
        for assembly in (compiled[name], compiled[f"backward_{name}"]):
            first = min(
                assembly.find(access) for access in ("ld.global", "st.global", "cp.async") if access in assembly
            )
            assert -1 < assembly.find("griddepcontrol.wait") < first


@pytest.mark.parametrize("dtype", narrow([torch.float32, torch.bfloat16], [torch.float32]), ids=str)  # the larger
@pytest.mark.parametrize(
    ("shape", "m"),
    {
        "held": ((8, 256, 28, 28), 2),
        "wide": ((32, 1024, 28, 28), 2),
        "narrow": ((128, 16, 32, 32), 2),
        "streamed": ((4, 256, 56, 56), 4),
        "streamed, larger": ((16, 256, 56, 56), 16),
        "streamed, the largest": ((64, 64, 112, 112), 2),
        "positions abreast": ((64, 48, 112, 112), 2),
        "positions abreast, one group": ((64, 48, 112, 112), 64),
    }.values(),
    ids=["held", "wide", "narrow", "streamed", "streamed, larger", "streamed, the largest", "abreast", "abreast, one"],
)
@pytest.mark.parametrize(
    "layout", narrow([torch.channels_last, torch.contiguous_format], [torch.channels_last]), ids=str
)
def test_shared_memory_of_what_is_chosen(shape, m, layout, dtype, compiled, monkeypatch):
    monkeypatch.setattr(triton_run, "processors_of", lambda x: 132)
    C = shape[1]
    x = torch.empty(shape, dtype=dtype, memory_format=layout)
    filtered, affine = (torch.zeros(1, C), torch.ones(1, C), torch.ones(C)), (torch.ones(C), torch.zeros(C))
    results = triton_run.forward(Inputs(x, *filtered, *affine, m, 1e-5, x, True))
    inputs = Inputs(x, *filtered, affine[0], None, m, 1e-5, None, True)
    triton_run.backward(Results(x, *[None] * 4), inputs, results, 1)
    triton_run.observe(x, m)
    monkeypatch.setattr(triton_settled_run, "processors_of", lambda x: 132)
    settle(x, m, residual=True)
    settle(x, m, residual=False)
    assert {"reduce_kernel", "observe_kernel", "settled_backward_kernel"} < compiled.shared.keys()
    assert all(size <= SMALLEST for size in compiled.shared.values()), compiled.shared


def request(kind, groups, observes, C=200):
    rows, buffers = Moments(*torch.ones(2, groups, C)), tuple(torch.ones(2, C))
    counts = tuple(torch.zeros(3, dtype=torch.int64))
    seen = (rows, buffers) if observes else (None, None)
    return TrackingRequest(
        rows, seen[0], buffers, seen[1], counts, torch.zeros((), dtype=torch.int32),
        examples=2 * groups, size=2, values=18 * groups, momentum=None if kind == "plain" else 0.1,
        observation_momentum=0.02, eps=1e-5, kind=kind,
    )  # fmt: skip


@pytest.mark.parametrize("groups", [3, 70], ids=["one tile", "several"])
@pytest.mark.parametrize("kind", narrow(["total", "plain", "sigma", "first"], ["total", "sigma", "first"]))
def test_tracking(kind, groups, compiled):
    triton_one.track(request(kind, groups, observes=kind in ("total", "plain")))
    alone = groups == 3
    assert ("atom.global.gpu.acq_rel" in compiled["track_kernel"]) != alone


def test_tracking_few_channels(compiled):
    """Where each thread has one value of a sum."""
    triton_one.track(request("total", 2, True, C=8))
    triton_many.track_many([request("total", 2, True, C=8) for _ in range(2)], {})
    assert len(compiled) == 2


@pytest.mark.parametrize("groups", [3, 70], ids=["one tile", "several"])
@pytest.mark.parametrize("kind", ["total", "plain"])
def test_tracking_together(kind, groups, compiled):
    triton_many.track_many([request(kind, groups, observes=kind == "total") for _ in range(3)], {})
    assert compiled.keys() == {"track_many_kernel"}
    assert "atom.global.gpu.acq_rel" in compiled["track_many_kernel"]


@pytest.mark.parametrize("computation", narrow(["centred", "standardized", "scaled"], ["scaled"]))  # has the most code
@pytest.mark.parametrize("gathered", [False, True], ids=["by address", "gathered"])
@pytest.mark.parametrize("dtype", narrow([torch.float32, torch.bfloat16], [torch.bfloat16]), ids=str)
def test_filters(dtype, gathered, computation, compiled, monkeypatch):
    """Nothing is added by atomics, and no tile needs more shared memory than the sums of its threads."""
    weights = [torch.zeros(8, 3, 3, 3, dtype=dtype), torch.zeros(8, 300, 3, 3, dtype=dtype)]
    layers = triton_together.layers_of(weights)
    if gathered:
        monkeypatch.setattr(triton_together._UPLOADS, "find", lambda *_: None)
    filters, statistics = triton_together.forward(weights, layers, computation)
    known = () if computation == "centred" else (weights, statistics)
    triton_together.backward([filters[0], None], layers, computation, *known)
    assert compiled.keys() == {"filters_kernel", "filters_backward_kernel"}
    assert not any("atom" in assembly for assembly in compiled.values())
    assert max(compiled.shared.values()) <= 2**11


@pytest.mark.parametrize(("C", "P"), [(16, 16), (1, 64)])
def test_predicting_few_channels(C, P, compiled):
    rows = torch.ones(1, P), torch.ones(1, P), torch.ones(C, P), torch.ones(()), torch.ones(1)
    *at, gain = triton_predict.forward(*rows)
    triton_predict.backward(*at, gain, *rows, True)
    assert len(compiled) == 3


@pytest.mark.filterwarnings("ignore:kalmannorm")  # nothing is computed
def test_priors_of_many_norms(compiled, monkeypatch):
    """Of layers with one tap and with several, with padding, in groups and by channel."""
    monkeypatch.setattr("kalmannorm._running.prior_bundles.runner", lambda *_: triton_bundle)
    layers = [
        nn.Conv2d(4, 8, 1),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.Conv2d(8, 8, 3, groups=8),
    ]
    model = nn.Sequential(
        *(each for layer in layers for each in (layer, nn.BatchNorm2d(layer.out_channels), nn.ReLU()))
    )
    model = convert(
        nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), model), torch.randn(4, 4, 9, 9), statistics_batch_size=2
    )
    model(torch.randn(4, 4, 9, 9)).sum().backward()
    kernels = {"layers_kernel", "layers_backward_kernel", "rows_backward_kernel", "tape_kernel", "tape_backward_kernel"}
    assert kernels < compiled.keys()


@pytest.mark.parametrize("groups", [1, 16, 70], ids=["one group", "one tile", "several"])
@pytest.mark.parametrize("gains", narrow([1, 200], [200]), ids=["one gain", "gains"])
def test_predicting(groups, gains, compiled, monkeypatch):
    monkeypatch.setattr(triton_predict, "precision_on", lambda device: "tf32x3" if gains > 1 else "ieee")
    C, P = 200, 48
    rows = torch.ones(groups, P), torch.ones(groups, P), torch.ones(C, P), torch.ones(()), torch.ones(gains)
    *at, gain = triton_predict.forward(*rows)
    triton_predict.backward(*at, gain, *rows, True)
    assert compiled.keys() == {"predict_kernel", "predict_backward_kernel", "predict_sum_kernel"}
    assert "ld.global.v4" in compiled["predict_backward_kernel"]
    assert ("mma.sync" in compiled["predict_kernel"]) == (groups > 1 and gains > 1)
