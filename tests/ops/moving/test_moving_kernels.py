"""The kernels of Moving Average Batch Norm against PyTorch operations in float64, over several steps.

Outputs, gradients and every buffer are compared. Memory that the kernels are to fill holds NaN before.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from kalmannorm import MovingAverageBatchNorm1d, MovingAverageBatchNorm2d, recalibrate
from kalmannorm._norms import moving_average, running_statistics
from kalmannorm._ops.moving import triton_moving_run
from kalmannorm._ops.normalize.tiling import launch_of
from kalmannorm._ops.track import triton_one
from kalmannorm._ops.triton_launching import Ready
from support.op_arguments import channels_last, relative_error
from support.poisoned import DEVICE, poison

pytestmark = [  # of Triton's interpreter
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]


@dataclass
class Case:
    shape: tuple[int, ...]
    m: int | None
    real: int = 8
    last: bool = True
    dtype: torch.dtype = torch.float32
    affine: bool = True
    launch: tuple[int, ...] | None = None


CASES = {
    "window over several batches": Case((4, 6, 5, 5), 2, 16),
    "one group per batch": Case((2, 6, 5, 5), 2),
    "one example per batch": Case((1, 6, 5, 5), 1),
    "more groups than the window": Case((8, 6, 3, 3), 1, 4),
    "smaller last group, odd positions": Case((5, 6, 3, 3), 2),
    "NCHW": Case((5, 6, 3, 3), 2, last=False),
    "window of one": Case((4, 6, 5, 5), 8),
    "no statistics batch": Case((4, 6, 5, 5), None),
    "window longer than a tile": Case((5, 5, 2, 3), 1, 40),
    "several blocks of channels": Case((3, 70, 2, 1), 1, 4),
    "C = 1": Case((4, 1, 4, 3), 2),
    "(N, C, L)": Case((4, 6, 5), 2),
    "no γ and β": Case((4, 6, 5, 5), 2, affine=False),
    "shared": Case((4, 6, 7, 3), 2, launch=(16, 4, 2)),
    "shared, NCHW": Case((4, 6, 7, 3), 2, launch=(16, 4, 2), last=False),
    "more shares than are merged at a time": Case((2, 2, 9, 8), 2, 4, launch=(4, 2, 36)),
    "two positions abreast": Case((2, 6, 7, 4), 2, 4, launch=(8, 4, 3, 4, 2)),
    "bf16": Case((4, 6, 5, 5), 2, dtype=torch.bfloat16),
    "fp16, NCHW": Case((4, 6, 5, 5), 1, dtype=torch.float16, last=False),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Norms use the kernels, unless x is float64. The tracking requests of their forwards."""
    poison(monkeypatch)
    calls, ways = [], moving_average.moving_kernels_for

    def chosen(x, *rest):
        return ways(x, *rest) if x.dtype == torch.float64 else triton_moving_run

    def track(request):
        calls.append(request)
        triton_one.track(request)

    monkeypatch.setattr(moving_average, "moving_kernels_for", chosen)
    tracking = SimpleNamespace(track=track)
    monkeypatch.setattr(
        running_statistics, "tracking_for", lambda rows: None if rows.dtype == torch.float64 else tracking
    )
    return calls


def norms(case):
    kind = MovingAverageBatchNorm2d if len(case.shape) == 4 else MovingAverageBatchNorm1d
    norm = kind(
        case.shape[1], statistics_batch_size=case.m, real_batch_size=case.real, warmup_steps=4, affine=case.affine,
        device=DEVICE,
    )  # fmt: skip
    if case.affine:
        torch.nn.init.uniform_(norm.weight, 0.5, 2)
        torch.nn.init.normal_(norm.bias)
    return norm, copy.deepcopy(norm).double()


def step(norm, x, grad):
    x = x.detach().requires_grad_()
    y = norm(x)
    parameters = [norm.weight, norm.bias] if norm.affine else []
    return y, *torch.autograd.grad(y, [x, *parameters], grad)


def force(monkeypatch, launch):
    def chosen(shape, *_, **__):
        how = launch_of(shape, *launch)
        K = launch[4] if len(launch) > 4 else 1
        assert K == how.K, "too few chunks for what the case says"
        return how._replace(splits=max(how.splits, 1))

    monkeypatch.setattr(triton_moving_run, "observing", chosen)


@pytest.mark.parametrize("name", CASES)
def test_matches_pytorch_operations(name, monkeypatch, launches):
    case = CASES[name]
    if case.launch is not None:
        force(monkeypatch, case.launch)
    torch.manual_seed(0)
    norm, twin = norms(case)
    groups = -(-case.shape[0] // (case.m or case.shape[0]))
    steps = max(6, norm.window // groups + 3)  # the window fills, and r corrects
    for number in range(steps):
        x = 0.3 + (1 + 0.5 * number) * torch.randn(case.shape, device=DEVICE)
        x, grad = ((channels_last(each) if case.last else each).to(case.dtype) for each in (x, torch.randn_like(x)))
        found, expected = step(norm, x, grad), step(twin, x.double(), grad.double())
        for index, (a, e) in enumerate(zip(found, expected, strict=True)):
            assert relative_error(a, e) < TOLERANCE[case.dtype], (number, index)
        assert found[0].stride() == found[1].stride() == x.stride()
        assert found[0].dtype == found[1].dtype == case.dtype
        for (key, buffer), other in zip(norm.named_buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(buffer.double(), other.double(), rtol=1e-4, atol=1e-5, msg=key)
    assert norm.groups_seen == steps * groups and len(launches) == steps


def test_the_same_bits_every_time():
    norm, _ = norms(CASES["window over several batches"])
    twin = copy.deepcopy(norm)
    for _ in range(5):
        x, grad = torch.randn(2, 4, 6, 5, 5, device=DEVICE)
        for a, b in zip(step(norm, x, grad), step(twin, x, grad), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_batch_changes_no_buffer(bad, where):
    case = Case((2, 70, 2, 3), 1, 4)
    norm, _ = norms(case)
    for _ in range(3):
        step(norm, *torch.randn(2, *case.shape, device=DEVICE))
    before = copy.deepcopy(dict(norm.named_buffers()))
    x, grad = torch.randn(2, *case.shape, device=DEVICE)
    (x if where == "forward" else grad)[-1, -1, 0, 0] = bad
    step(norm, x, grad)
    past = (
        ["past_squares", "groups_seen", "running_var", "past_gradients"] if where == "forward" else ["past_gradients"]
    )
    for name in past:
        assert torch.equal(getattr(norm, name), before[name]), name
    if where == "backward":
        assert not torch.equal(norm.past_squares, before["past_squares"])
    step(norm, *torch.randn(2, *case.shape, device=DEVICE))
    assert not torch.equal(norm.past_gradients, before["past_gradients"])


def test_recalibration_leaves_the_past():
    norm, _ = norms(CASES["window over several batches"])
    model = torch.nn.Sequential(norm)
    step(norm, *torch.randn(2, 4, 6, 5, 5, device=DEVICE))
    before = norm.past_squares.clone(), norm.groups_seen.clone()
    recalibrate(model, [torch.randn(4, 6, 5, 5, device=DEVICE)], progress=False)
    assert torch.equal(norm.past_squares, before[0]) and torch.equal(norm.groups_seen, before[1])


def test_launches_of_a_step(monkeypatch):
    """After the two that observe: y, the past and tracking, then those of the backward."""
    made, launch = [], Ready.__call__

    def counted(self, *given):
        made.append(self.kernel.__name__)
        launch(self, *given)

    monkeypatch.setattr(Ready, "__call__", counted)
    norm, _ = norms(CASES["window over several batches"])
    step(norm, *torch.randn(2, 4, 6, 5, 5, device=DEVICE))
    forward = ["moving_forward_kernel", "moving_push_kernel", "track_kernel"]
    backward = ["backward_reduce_kernel", "moving_merge_kernel", "moving_backward_kernel", "moving_push_kernel"]
    assert made[-8:] == [*forward, *backward, "sum_over_groups_kernel"]


def test_gaps_in_x_and_a_gradient_of_another_layout():
    norm, twin = norms(CASES["window over several batches"])
    for _ in range(4):
        x, grad = (
            torch.randn(4, 6, 5, 10, device=DEVICE)[..., ::2],
            channels_last(torch.randn(4, 6, 5, 5, device=DEVICE)),
        )
        for a, e in zip(step(norm, x, grad), step(twin, x.double(), grad.double()), strict=True):
            assert relative_error(a, e) < 1e-5
