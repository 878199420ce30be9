"""The kernels of settled norms against PyTorch operations in float64: every output, every gradient.

Memory that the kernels are to fill holds NaN before, so that nothing they leave out can pass.
"""

from __future__ import annotations

import pytest
import torch

from kalmannorm._ops.normalize import aten_settled, triton_settled_run
from kalmannorm._ops.normalize.arguments import SettledInputs
from kalmannorm._ops.normalize.tiling import launch_of
from support.op_arguments import TOLERANCE, relative_error
from support.poisoned import poison
from support.settled_cases import Case, doubled, inputs_of, results
from support.wide import narrow

pytestmark = [  # of Triton's interpreter
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


CASES = {
    "ragged last group, odd positions": Case((5, 6, 3, 3), 2, relu=True),
    "NCHW, ragged, odd positions": Case((5, 6, 3, 3), 2, last=False, moments=True),
    "one group": Case((4, 8, 5, 5), 4, prior=0),
    "N groups": Case((4, 8, 5, 5), 1, gain=1),
    "C = 1": Case((3, 1, 4, 3), 2),
    "one position: (N, C)": Case((7, 5), 2, relu=True),
    "one value per group": Case((3, 5), 1),
    "3-D": Case((4, 3, 6), 2, last=False),
    "5-D channels_last": Case((3, 4, 2, 3, 2), 2, moments=True),
    "statistics batch larger than the batch": Case((3, 4, 3, 3), 16),
    "rows of groups for everything, as in a converted model": Case(
        (5, 4, 3, 3), 2, prior=2, gain=2, weight=2, bias=2, relu=True, moments=True
    ),
    "rows of groups for β alone": Case((5, 4, 3, 3), 2, bias=2, gain=1),
    "residual alone": Case((5, 4, 3, 3), 2, residual=True),
    "residual and relu": Case((5, 4, 3, 3), 2, residual=True, relu=True),
    "residual and relu, NCHW": Case((5, 4, 5, 3), 3, residual=True, relu=True, last=False),
    "large mean": Case((4, 6, 8, 8), 2, mean=1000.0),
    "shared": Case((3, 6, 7, 3), 2, relu=True, launch=(16, 4, 2)),
    "shared, rows of groups": Case((3, 6, 7, 3), 2, weight=2, bias=2, prior=2, gain=2, launch=(16, 4, 2)),
    "shared, NCHW": Case((3, 6, 7, 3), 2, residual=True, relu=True, launch=(16, 4, 2), last=False),
    "shared, large mean": Case((4, 3, 8, 8), 4, mean=1000.0, launch=(16, 4, 3), prior=0),
    "more shares than are merged at a time": Case((2, 4, 10, 10), 2, relu=True, launch=(4, 4, 40)),
    "one program per group, many chunks": Case((3, 5, 6, 6), 2, relu=True, launch=(16, 4, 1)),
    "one program for everything": Case((3, 6, 6, 6), 3, relu=True, launch=(16, 4, 1)),
    "one program for everything, NCHW": Case(
        (2, 5, 5, 7), 2, residual=True, relu=True, moments=True, launch=(16, 2, 1), last=False
    ),
    "lanes that begin anew": Case((2, 3, 30, 10), 2, launch=(4, 4, 1), mean=100.0),
    "two positions abreast": Case((3, 6, 7, 4), 2, relu=True, launch=(8, 4, 3, 4, 2)),
    "four abreast, none is a whole tile, rows of groups": Case(
        (4, 5, 4, 7), 2, prior=2, gain=2, weight=2, bias=2, launch=(4, 16, 3, 4, 4)
    ),
    "abreast, even tiles": Case((4, 6, 8, 8), 2, residual=True, relu=True, launch=(16, 4, 3, 4, 2)),
    "even tiles": Case((4, 8, 4, 8), 2, relu=True, launch=(16, 4, 2), last=False),
    "bf16": Case((6, 8, 5, 5), 2, residual=True, relu=True, dtype=torch.bfloat16),
    "bf16, NCHW": Case((5, 6, 4, 4), 2, relu=True, dtype=torch.bfloat16, last=False),
    "fp16": Case((6, 8, 5, 5), 3, relu=True, dtype=torch.float16),
    "fp16, NCHW, shared": Case(
        (5, 3, 8, 5), 2, residual=True, relu=True, dtype=torch.float16, launch=(16, 2, 3), last=False
    ),
}
QUICK = [name for name in CASES if name not in ("N groups", "C = 1", "3-D", "fp16", "residual alone", "even tiles")]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    poison(monkeypatch)


def force(monkeypatch, case):
    if case.launch is not None:

        def chosen(shape, *_, **__):
            how = launch_of(shape, *case.launch)
            K = case.launch[4] if len(case.launch) > 4 else 1
            assert K == how.K, "too few chunks for what the case says"
            return how._replace(splits=max(how.splits, 1))

        monkeypatch.setattr(triton_settled_run, "settling", chosen)


@pytest.mark.parametrize("name", narrow(CASES, QUICK))
def test_matches_pytorch_operations(name, monkeypatch):
    case = CASES[name]
    force(monkeypatch, case)
    inputs, rest = inputs_of(case)
    actual = results(triton_settled_run, inputs, rest)
    expected = results(aten_settled, SettledInputs(*doubled(inputs)), doubled(rest))
    tolerance = max(TOLERANCE[case.dtype] if case.dtype != torch.float32 else 1e-5, 3e-7 * abs(case.mean))
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.shape == e.shape, index
        assert relative_error(a, e) < tolerance, index
    assert actual[0].stride() == inputs.x.stride() and actual[7].stride() == inputs.x.stride()
    assert actual[0].dtype == actual[7].dtype == case.dtype


@pytest.mark.parametrize(
    "launch", [None, (16, 8, 2), (16, 8, 1), (4, 8, 2, 4, 4)], ids=["as chosen", "shared", "alone", "abreast"]
)
def test_the_same_bits_every_time(launch, monkeypatch):
    case = Case((3, 6, 5, 8), 2, relu=True, moments=True, launch=launch)
    force(monkeypatch, case)
    inputs, rest = inputs_of(case)
    for a, b in zip(results(triton_settled_run, inputs, rest), results(triton_settled_run, inputs, rest), strict=True):
        assert torch.equal(a, b)


def test_running_statistics_may_change_before_the_backward():
    """The forward keeps copies of m and ρ."""
    inputs, _ = inputs_of(Case((3, 6, 5, 8), 2))
    made = triton_settled_run.forward(inputs)
    centre, rho = made.centre.clone(), made.rho.clone()
    inputs.running_mean.fill_(7)
    inputs.running_var.fill_(7)
    assert torch.equal(made.centre, centre) and torch.equal(made.rho, rho)
