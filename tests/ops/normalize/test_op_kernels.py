"""The op on Triton's kernels against the naive reference in float64: every output, every gradient.

Memory that the kernels are to fill holds NaN before, so that nothing they leave out can pass.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from kalmannorm._ops.normalize import naive, triton_run
from kalmannorm._ops.normalize import registered as registered
from kalmannorm._ops.normalize.arguments import Inputs
from kalmannorm._ops.normalize.tiling import Shape, launch_for, launch_of
from support.op_arguments import TOLERANCE, channels_last, relative_error
from support.poisoned import DEVICE, poison
from support.wide import narrow

pytestmark = [  # of Triton's interpreter
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
op = registered.batch_kalman_norm
EPS = 1e-5


class Case(NamedTuple):
    """What the op is given; rows of a parameter: 0 for none, 1 for all groups, 2 for a row per group."""

    shape: tuple[int, ...]
    m: int
    last: bool = True
    prior: int = 1
    gain: int = 0  # 0: one number; 1: per channel
    weight: int = 1
    bias: int = 1
    residual: bool = False
    relu: bool = False
    launch: tuple[int, ...] | None = None  # positions and channels of a tile, programs per group, warps, K
    mean: float = 1.0
    dtype: torch.dtype = torch.float32


CASES = {
    "one group": Case((4, 8, 5, 5), 4),
    "N groups": Case((4, 8, 5, 5), 1),
    "ragged last group, odd positions": Case((5, 6, 3, 3), 2),
    "NCHW, ragged, odd positions": Case((5, 6, 3, 3), 2, last=False),
    "C = 1, both layouts are one": Case((3, 1, 4, 3), 2),
    "one position: (N, C)": Case((7, 5), 2),
    "one value per group, the prior gives the variance": Case((3, 5), 1),
    "3-D": Case((4, 3, 6), 2, last=False),
    "5-D channels_last": Case((3, 4, 2, 3, 2), 2),
    "5-D": Case((3, 4, 2, 3, 2), 2, last=False),
    "statistics batch larger than the batch": Case((3, 4, 3, 3), 16),
    "a prior per group": Case((5, 4, 3, 3), 2, prior=2),
    "a gain per channel": Case((5, 4, 3, 3), 2, gain=1),
    "a gain per channel, a prior per group, one group": Case((2, 4, 3, 3), 2, prior=2, gain=1),
    "no prior": Case((6, 4, 3, 3), 2, prior=0),
    "no weight": Case((5, 4, 3, 3), 2, weight=0),
    "no bias": Case((5, 4, 3, 3), 2, bias=0, relu=True),
    "neither": Case((5, 4, 3, 3), 2, weight=0, bias=0, last=False),
    "weight and bias per group, as in Batch Renorm": Case((5, 4, 3, 3), 2, prior=0, weight=2, bias=2),
    "a weight for all, a bias per group": Case((5, 4, 3, 3), 2, weight=1, bias=2, relu=True),
    "relu": Case((5, 4, 3, 3), 2, relu=True),
    "residual alone": Case((5, 4, 3, 3), 2, residual=True),
    "residual and relu": Case((5, 4, 3, 3), 2, residual=True, relu=True),
    "residual and relu, NCHW": Case((5, 4, 5, 3), 3, residual=True, relu=True, last=False),
    "large mean": Case((4, 6, 8, 8), 2, mean=1000.0),
    "large mean, NCHW": Case((4, 6, 8, 8), 2, mean=-1000.0, last=False),
    "streamed": Case((3, 6, 7, 3), 2, relu=True, launch=(16, 4, 2)),
    "streamed, NCHW": Case((3, 6, 7, 3), 2, relu=True, launch=(16, 4, 2), last=False),
    "streamed, more programs than chunks": Case((3, 3, 5, 5), 2, launch=(16, 4, 64)),
    "streamed, one program per group": Case((3, 3, 5, 5), 2, residual=True, relu=True, launch=(16, 4, 1)),
    "streamed, one group, no prior": Case((3, 5, 5, 5), 3, prior=0, launch=(16, 8, 4), last=False),
    "streamed, large mean": Case((4, 3, 8, 8), 4, mean=1000.0, launch=(64, 4, 3)),
    "streamed, more shares than are merged at a time": Case((2, 4, 10, 10), 2, relu=True, launch=(4, 4, 40)),
    "streamed, large mean, shares that begin with a short chunk": Case(
        (4, 4, 5, 8), 4, mean=1000.0, launch=(16, 4, 4), last=False
    ),
    "streamed, two positions abreast": Case((3, 6, 7, 4), 2, relu=True, launch=(8, 4, 3, 4, 2)),
    "streamed, four abreast, none is a whole tile": Case((4, 5, 4, 7), 2, launch=(4, 16, 3, 4, 4), prior=2, gain=1),
    "streamed, abreast, even tiles": Case((4, 6, 8, 8), 2, residual=True, relu=True, launch=(16, 4, 3, 4, 2)),
    "streamed, abreast, large mean": Case((4, 3, 8, 8), 4, mean=1000.0, launch=(8, 4, 3, 4, 4)),
    "streamed, abreast, more shares than are merged at a time": Case((2, 6, 16, 16), 2, launch=(4, 8, 12, 4, 8)),
    "streamed, abreast, bf16": Case(
        (5, 12, 4, 8), 2, residual=True, relu=True, dtype=torch.bfloat16, launch=(4, 16, 2, 4, 4)
    ),
    "even tiles, streamed": Case((4, 8, 4, 8), 2, residual=True, relu=True, launch=(16, 4, 2)),
    "even tiles, streamed, NCHW": Case((4, 8, 4, 8), 2, relu=True, launch=(16, 4, 3), last=False),
    "even tiles, streamed, large mean": Case((4, 8, 4, 8), 4, mean=1000.0, launch=(16, 4, 3)),
    "even tiles, on chip": Case((4, 8, 4, 8), 2, relu=True, launch=(16, 4, 0)),
    "even tiles, on chip, NCHW": Case((4, 8, 4, 8), 2, residual=True, relu=True, launch=(16, 4, 0), last=False),
    "even tiles, held": Case((4, 8, 4, 8), 2, residual=True, relu=True),
    "held, NCHW": Case((3, 8, 4, 4), 1, residual=True, relu=True, last=False),
    "held, a ragged group of more positions than a warp has threads": Case((5, 24, 7, 7), 2, residual=True, relu=True),
    "on chip, many chunks": Case((3, 5, 6, 6), 2, relu=True, launch=(16, 4, 0)),
    "on chip, many chunks, NCHW": Case((3, 3, 5, 5), 2, residual=True, relu=True, launch=(16, 2, 0), last=False),
    "on chip, a tile wider than all channels": Case((4, 3, 4, 4), 2, launch=(8, 16, 0)),
    "residual and relu, streamed": Case((5, 8, 5, 3), 2, residual=True, relu=True, launch=(16, 8, 2)),
    "residual and relu, streamed, NCHW": Case((5, 3, 4, 6), 2, residual=True, relu=True, launch=(16, 2, 3), last=False),
    "residual and relu, on chip, many chunks": Case((5, 16, 3, 3), 2, residual=True, relu=True, launch=(4, 8, 0)),
    "bf16": Case((6, 8, 5, 5), 2, residual=True, relu=True, dtype=torch.bfloat16),
    "bf16, NCHW": Case((5, 6, 4, 4), 2, residual=True, relu=True, dtype=torch.bfloat16, last=False),
    "fp16, residual": Case((5, 8, 3, 4), 2, residual=True, relu=True, dtype=torch.float16),
    "fp16, residual, NCHW, streamed": Case(
        (5, 3, 8, 5), 2, residual=True, relu=True, dtype=torch.float16, launch=(16, 2, 3), last=False
    ),
    "bf16, NCHW, streamed": Case((4, 8, 5, 5), 2, relu=True, dtype=torch.bfloat16, launch=(16, 8, 2), last=False),
    "fp16": Case((6, 8, 5, 5), 3, relu=True, dtype=torch.float16),
}


@pytest.fixture(autouse=True)
def _on_the_kernels(monkeypatch):
    monkeypatch.setattr(registered, "kernels_for", lambda x, size: triton_run)
    poison(monkeypatch)


def force(monkeypatch, case):
    if case.launch is not None:
        monkeypatch.setattr(triton_run, "launch_for", lambda shape, *_, **__: launched(shape, case.launch))
        if case.launch[2]:  # at least one program per group, as `observing` promises
            monkeypatch.setattr(
                triton_run,
                "observing",
                lambda shape, *_, **__: (how := launched(shape, case.launch))._replace(splits=max(how.splits, 1)),
            )


def launched(shape, launch):
    how, K = launch_of(shape, *launch), launch[4] if len(launch) > 4 else 1
    assert K == how.K, "too few chunks for what the case says"
    return how


def tensors(case):
    """x, prior mean and variance, gain, weight, bias, residual."""
    C, groups = case.shape[1], -(-case.shape[0] // case.m)

    def rows(number):
        return {0: None, 1: torch.randn(1, C), 2: torch.randn(groups, C)}[number]

    def parameter(number):
        given = rows(number)
        return given[0] if number == 1 else given

    def activations():
        values = torch.randn(case.shape)
        return channels_last(values) if case.last else values

    x = activations() * 2 + case.mean
    prior = rows(case.prior)
    gain = torch.rand(C) * 0.8 + 0.1 if case.gain else torch.tensor(0.3)
    filtered = (None, None, None) if prior is None else (prior + case.mean, prior.square() + 0.5, gain)
    given = (x, *filtered, parameter(case.weight), parameter(case.bias), activations() if case.residual else None)
    halves = (0, 6)
    return [
        None if t is None else t.to(DEVICE, case.dtype if i in halves else torch.float32).requires_grad_()
        for i, t in enumerate(given)
    ]


def results(function, inputs, case, grads):
    """Outputs and all gradients, of inputs that are there."""
    *first, residual = inputs
    outputs = function(*first, case.m, EPS, residual, case.relu)[:5]
    given = [t for t in inputs if t is not None]
    arriving = [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)]
    return [*outputs, *torch.autograd.grad(outputs, given, arriving)]


# Every kernel and rule once; a GPU runs all of them quickly.
QUICK = (
    "ragged last group, odd positions",
    "NCHW, ragged, odd positions",
    "one position: (N, C)",
    "one value per group, the prior gives the variance",
    "statistics batch larger than the batch",
    "a gain per channel, a prior per group, one group",
    "no prior",
    "neither",
    "weight and bias per group, as in Batch Renorm",
    "a weight for all, a bias per group",
    "residual and relu",
    "residual and relu, NCHW",
    "large mean",
    "streamed",
    "streamed, NCHW",
    "streamed, more shares than are merged at a time",
    "streamed, large mean, shares that begin with a short chunk",
    "streamed, four abreast, none is a whole tile",
    "streamed, abreast, even tiles",
    "streamed, abreast, large mean",
    "even tiles, streamed",
    "even tiles, on chip, NCHW",
    "even tiles, held",
    "held, a ragged group of more positions than a warp has threads",
    "on chip, many chunks",
    "residual and relu, on chip, many chunks",
    "bf16",
    "fp16, residual, NCHW, streamed",
)


@pytest.mark.parametrize("name", narrow(CASES, QUICK))
def test_matches_the_reference(name, monkeypatch):
    case = CASES[name]
    force(monkeypatch, case)
    inputs = tensors(case)
    exact = [None if t is None else t.detach().double().requires_grad_() for t in inputs]
    groups = -(-case.shape[0] // case.m)
    grads = [torch.randn(case.shape, device=DEVICE), *torch.randn(4, groups, case.shape[1], device=DEVICE)]
    actual = results(op, inputs, case, grads)
    expected = results(naive.batch_kalman_norm, exact, case, grads)
    tolerance = max(TOLERANCE[case.dtype] if case.dtype != torch.float32 else 1e-5, 3e-7 * abs(case.mean))
    names = ["y", "mean", "var", "observed mean", "observed var"]
    given = ("x", "prior mean", "prior var", "gain", "weight", "bias", "residual")
    names += [f"gradient of {name}" for name, t in zip(given, inputs, strict=True) if t is not None]
    for name, a, e in zip(names, actual, expected, strict=True):
        assert a.shape == e.shape, name
        assert relative_error(a, e) < tolerance, name
    assert actual[0].stride() == inputs[0].stride() and actual[0].dtype == case.dtype
    for gradient, t in zip(actual[5:], (t for t in inputs if t is not None), strict=True):
        assert gradient.dtype == t.dtype


@pytest.mark.parametrize("name", narrow(CASES, QUICK))
def test_the_output_again_has_the_same_bits(name, monkeypatch):
    case = CASES[name]
    force(monkeypatch, case)
    *first, residual = (None if t is None else t.detach() for t in tensors(case))
    y, mean, var, observed_mean, _ = op(*first, case.m, EPS, residual, case.relu)
    x, _, _, _, weight, bias = first
    inputs = Inputs(x, None, None, None, weight, bias, case.m, EPS, residual, case.relu)
    again = registered.again(inputs, mean, var, observed_mean)
    assert again.stride() == y.stride() and again.data_ptr() != y.data_ptr()
    assert torch.equal(again, y)


@pytest.mark.parametrize(
    "launch",
    [None, (16, 8, 2), (16, 8, 0), (4, 8, 2, 4, 4)],
    ids=["as chosen", "streamed", "on chip", "four positions abreast"],
)
def test_the_same_bits_every_time(launch, monkeypatch):
    case = Case((3, 6, 5, 8), 2, relu=True, launch=launch)
    force(monkeypatch, case)
    inputs = tensors(case)
    grads = [torch.randn(case.shape, device=DEVICE), *torch.randn(4, 2, 6, device=DEVICE)]
    for a, b in zip(results(op, inputs, case, grads), results(op, inputs, case, grads), strict=True):
        assert torch.equal(a, b)


LAUNCHES = pytest.mark.parametrize("launch", [None, (32, 4, 0), (8, 4, 2)], ids=["held", "on chip", "streamed"])


def compare_gradients(case, loss, monkeypatch):
    """Of a loss that is a function of the five outputs."""
    force(monkeypatch, case)
    inputs = tensors(case)[:-1]
    exact = [t.detach().double().requires_grad_() for t in inputs]

    def run(function, given):
        outputs = function(*given, case.m, EPS, None, case.relu)[:5]
        return torch.autograd.grad(loss(*outputs), given, allow_unused=True, materialize_grads=True)

    for index, (a, e) in enumerate(zip(run(op, inputs), run(naive.batch_kalman_norm, exact), strict=True)):
        assert (a.double() - e).norm() < 1e-5 * max(e.norm(), 1), index


@pytest.mark.parametrize("which", range(5), ids=["y", "mean", "var", "observed mean", "observed var"])
@LAUNCHES
def test_a_gradient_from_one_output_alone(which, launch, monkeypatch):
    """What does not arrive is not there; and it may arrive expanded, as the gradient of a sum does."""
    compare_gradients(
        Case((5, 4, 3, 3), 2, relu=True, launch=launch), lambda *outputs: outputs[which].sum(), monkeypatch
    )


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of Triton's interpreter
@LAUNCHES
def test_a_variance_that_overflows_gives_the_naive_output(launch, monkeypatch):
    case = Case((5, 4, 3, 3), 2, relu=True, launch=launch)
    force(monkeypatch, case)
    x, *rest = (t.detach() for t in tensors(case)[:-1])
    x[:, ::2] *= 1e20
    for gain in (0.3, 0.5, 0.999):
        rest[2].fill_(gain)
        found, expected = (f(x, *rest, 2, EPS, None, True) for f in (op, naive.batch_kalman_norm))
        assert found[2][:, ::2].isinf().all() and found[0].isfinite().all()
        for a, e in zip(found, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gain", [1e-6, 0.5 + 1e-6, 1 - 1e-6])
@LAUNCHES
def test_digits_at_the_edges_of_the_gain(launch, gain, monkeypatch):
    """A prior far away, and an outlier that only x̄ follows: every output and every gradient by itself."""
    case = Case((5, 4, 3, 3), 2, prior=2, gain=1, launch=launch)
    force(monkeypatch, case)
    inputs = tensors(case)[:-1]
    with torch.no_grad():
        x, mean, _, q = inputs[:4]
        x[::2, 0, 0, 0] += 1e4
        mean += 1e4 * torch.randn_like(mean)
        q.fill_(gain)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    grads = [torch.randn(case.shape, device=DEVICE), *torch.randn(4, 3, 4, device=DEVICE)]
    grads[2] *= 1e-4
    found, expected = (
        results(f, [*given, None], case, grads) for f, given in ((op, inputs), (naive.batch_kalman_norm, exact))
    )
    for index, (a, e) in enumerate(zip(found, expected, strict=True)):
        assert relative_error(a, e) < 1e-5, index


ROWS = {
    "beside each other": lambda a, b: torch.cat([a, b], 1).pow(3).sum(),
    "one for all groups": lambda a, b: a.sum(0).pow(3).sum() + b.sum(0).pow(2).sum(),
    "across": lambda a, b: torch.stack([a, b]).permute(2, 0, 1).contiguous().pow(3).sum(),
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("first", [1, 3], ids=["posterior", "observation"])
@LAUNCHES
def test_gradients_of_moments_lie_anyhow(rows, first, launch, monkeypatch):
    """As they do where posteriors are concatenated, or pooled over groups."""
    compare_gradients(
        Case((5, 4, 3, 3), 2, launch=launch), lambda *outputs: rows(*outputs[first : first + 2]), monkeypatch
    )


@pytest.mark.parametrize("last", narrow([True, False], [True]), ids=["NHWC", "NCHW"])
@pytest.mark.parametrize("splits", [0, 2], ids=["on chip", "streamed"])
def test_a_beginning_unlike_the_rest(splits, last, monkeypatch):
    """Blank first rows: where sums went on relative to them, 256 values would cost three digits of the variance."""
    x = 10 + 90 * torch.rand(1, 16, 1, 1, device=DEVICE).expand(-1, -1, 64, 64 * max(splits, 1)).clone()
    x.flatten(2)[..., : 16 * max(splits, 1)] = 0
    x = channels_last(x) if last else x
    monkeypatch.setattr(triton_run, "launch_for", lambda shape, *_, **__: launch_of(shape, 16, 16, splits))
    y, _, _, mean, var = op(x, *[None] * 5, 1, EPS)
    exact = x.double().flatten(2)
    assert relative_error(var, exact.var(2, correction=0)) < 1e-4
    assert relative_error(mean, exact.mean(2)) < 1e-6
    assert relative_error(y, naive.batch_kalman_norm(x.double(), *[None] * 5, 1, EPS)[0]) < 1e-4


@pytest.mark.parametrize(
    ("last", "launch"),
    [(True, (8, 8, 3)), (True, (4, 8, 2, 4, 2)), (False, (16, 8, 0))],
    ids=["streamed", "two positions abreast", "on chip"],
)
def test_observing_alone(last, launch, monkeypatch):
    case = Case((5, 6, 3, 4), 2, last=last, launch=launch)
    force(monkeypatch, case)
    x = tensors(case)[0]
    exact = x.detach().double().requires_grad_()
    expected = naive.batch_kalman_norm(exact, *[None] * 5, 2, EPS)[3:]
    actual = registered.observe(x, 2)
    grads = torch.randn(2, 3, 6, device=DEVICE)
    for a, e in zip(actual, expected, strict=True):
        assert relative_error(a, e) < 1e-6
    wanted = torch.autograd.grad(expected, exact, list(grads.double()))
    assert relative_error(*torch.autograd.grad(actual, x, list(grads)), *wanted) < 1e-5


def test_parameters_in_half_precision_get_gradients_in_half_precision():
    case = Case((4, 4, 3, 3), 2, dtype=torch.bfloat16)
    x, mean, var, gain, weight, bias, _ = tensors(case)
    weight, bias = (t.detach().bfloat16().requires_grad_() for t in (weight, bias))
    y, *_ = op(x, mean, var, gain, weight, bias, 2, EPS)
    grads = torch.autograd.grad(y.float().pow(2).sum(), (weight, bias))
    exact = [t.detach().double().requires_grad_() for t in (x, mean, var, gain, weight, bias)]
    expected = torch.autograd.grad(naive.batch_kalman_norm(*exact, 2, EPS)[0].pow(2).sum(), exact[4:])
    for a, e in zip(grads, expected, strict=True):
        assert a.dtype == torch.bfloat16
        assert relative_error(a, e) < 2e-2


def test_parameters_that_do_not_lie_densely():
    case = Case((5, 4, 3, 3), 2, prior=2, gain=1)
    dense = tensors(case)
    spaced = [t if i in (0, 6) else t.detach().repeat_interleave(2, -1)[..., ::2] for i, t in enumerate(dense)]
    spaced = [None if t is None else t.detach().requires_grad_() for t in spaced]
    assert not spaced[1].is_contiguous()
    grads = [torch.randn(case.shape, device=DEVICE), *torch.randn(4, 3, 4, device=DEVICE)]
    for a, b in zip(results(op, dense, case, grads), results(op, spaced, case, grads), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("launch", [None, (16, 4, 0), (16, 4, 2)], ids=["held", "on chip", "streamed"])
def test_a_row_expanded_for_every_group(launch, monkeypatch):
    """The same output; gradients come for each group, and sum up to those of the one row."""
    case = Case((5, 8, 4, 4), 2, gain=1, residual=True, relu=True, launch=launch)
    force(monkeypatch, case)
    x, *one, residual = tensors(case)
    rows = [row.detach().view(1, -1).expand(3, -1).requires_grad_() for row in one]
    grads = [torch.randn(case.shape, device=DEVICE), *torch.randn(4, 3, 8, device=DEVICE)]
    expected, found = (results(op, [x, *given, residual], case, grads) for given in (one, rows))
    assert all(torch.equal(a, b) for a, b in zip(found[:6], expected[:6], strict=True))  # up to the gradient of x
    for a, b, row in zip(found[6:11], expected[6:11], rows, strict=True):
        assert a.shape == row.shape
        torch.testing.assert_close(a.sum(0), b.flatten(), rtol=1e-5, atol=1e-5)
    assert torch.equal(found[11], expected[11])


def test_a_nan_is_not_hidden_by_the_relu():
    x = torch.randn(4, 3, 2, 2, device=DEVICE)
    x[0, 1] = float("nan")
    y, *_ = op(x, None, None, None, None, None, 2, EPS, None, True)
    assert y[:2, 1].isnan().all()
    assert y[2:].isfinite().all() and y[:2, ::2].isfinite().all()


@pytest.mark.parametrize("dtype", narrow([torch.float32, torch.bfloat16, torch.float16], [torch.bfloat16]), ids=str)
@pytest.mark.parametrize("last", [True, False], ids=["NHWC", "NCHW"])
@pytest.mark.parametrize("launch", [None, (16, 8, 0), (16, 8, 2)], ids=["as chosen", "on chip", "streamed"])
def test_a_residual_gets_exactly_what_came_through_the_relu(launch, last, dtype, monkeypatch):
    """Bit for bit g where y > 0 or is NaN, else 0; also where a positive sum is rounded to a y of 0."""
    case = Case((5, 6, 3, 3), 2, last, residual=True, relu=True, launch=launch, dtype=dtype)
    force(monkeypatch, case)
    *first, residual = tensors(case)
    with torch.no_grad():
        weight, bias = first[-2:]
        weight[2], bias[2] = 0, 1e-9
        residual[:, 2] = 0
        residual[0, 1] = float("nan")
    y, *_ = op(*first, case.m, EPS, residual, True)
    g = torch.randn_like(y)
    (actual,) = torch.autograd.grad(y, residual, g)
    assert y[0, 1].isnan().all() and (y[:, 2] == 0).all() == (dtype == torch.float16)
    assert torch.equal(actual, torch.where(y <= 0, 0, g))
    assert actual.stride() == residual.stride()


def test_many_groups_of_few_channels():
    """More groups than programs fit on any but the first axis of a grid, if they were laid there."""
    blocks = launch_for(Shape(200_000, 1, 1, 2, True), 132)
    assert blocks.chunks >= 1
    if DEVICE == "cuda":
        x = torch.randn(200_000, 1, device=DEVICE)
        y, mean, *_ = op(x, None, None, None, None, None, 2, EPS)
        torch.testing.assert_close(mean[:, 0], x.view(-1, 2).mean(1), rtol=1e-5, atol=1e-6)
        assert y.isfinite().all()
