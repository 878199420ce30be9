"""Running statistics moved in one launch: the buffers that the separate operations leave, batch after batch."""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace

import pytest
import torch

from kalmannorm import GhostBatchNorm1d, accumulate_statistics, recalibrate
from kalmannorm._norms import running_statistics
from kalmannorm._ops.track import triton_one
from support.poisoned import DEVICE, poison
from support.tracked_norms import NORMS, assert_alike, forward

pytestmark = [  # of Triton's interpreter
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]

SIZES = {
    "one group": (4, 5, 4),
    "N groups": (6, 5, 1),
    "ragged": (7, 5, 3),
    "C = 1": (4, 1, 2),
    "several programs, the last not full": (40, 70, 1),
    "more groups than a tile": (70, 3, 1),
}


@pytest.fixture
def launches(monkeypatch):
    """The kernel does it, on poisoned memory; how often it was called."""
    calls = []

    def track(request):
        calls.append(request)
        triton_one.track(request)

    poison(monkeypatch)
    monkeypatch.setattr(running_statistics, "tracking_for", lambda rows: SimpleNamespace(track=track))
    return calls


def pair(make, C, m):
    """One norm for the kernel, and its twin for the separate operations."""
    norm = make(C, statistics_batch_size=m).to(DEVICE)
    twin = copy.deepcopy(norm)
    twin._launch = lambda rows: None
    return norm, twin


@pytest.mark.parametrize(("N", "C", "m"), SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("make", NORMS.values(), ids=NORMS.keys())
def test_leaves_what_the_separate_operations_leave(make, N, C, m, launches):
    norm, twin = pair(make, C, m)
    for step in range(3):
        x = torch.randn(N, C, 3, device=DEVICE) * (step + 1) + step
        torch.testing.assert_close(forward(norm, x), forward(twin, x))
        assert_alike(norm, twin)
    assert len(launches) == 3
    assert norm.num_batches_tracked == 3 and norm.values_tracked == 3 * N * 3
    assert norm._arrived == 0


@pytest.mark.parametrize("channel", [0, -1])
@pytest.mark.parametrize("C", [70, 5], ids=["several programs", "one program"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38], ids=["nan", "inf", "overflow"])
def test_a_bad_batch_moves_nothing(bad, C, channel, launches):
    """In whichever program's channels it is, and the next batch moves them again."""
    norm, twin = pair(GhostBatchNorm1d, C, 1)
    good, worse = torch.randn(2, 40, C, 3, device=DEVICE)
    forward(norm, good)
    before = copy.deepcopy(dict(norm.named_buffers()))
    worse[0, channel, 0] = bad
    forward(norm, worse)
    for name, buffer in norm.named_buffers():
        assert torch.equal(buffer, before[name] + (name == "skipped_batches")), name
    forward(norm, good)
    forward(twin, good)
    forward(twin, good)
    twin.skipped_batches += 1
    assert_alike(norm, twin)


def test_a_batchnorm_checkpoint_counts_its_batches(launches):
    """values_tracked is 0 and num_batches_tracked is not: they count as batches like this one."""
    norm, twin = pair(NORMS["cumulative"], 5, 2)
    for layer in (norm, twin):
        layer.num_batches_tracked.fill_(3)
        forward(layer, torch.arange(60.0, device=DEVICE).view(4, 5, 3))
    assert norm.values_tracked == 4 * 12
    assert_alike(norm, twin)


def test_the_same_bits_every_time(launches):
    norm, _ = pair(GhostBatchNorm1d, 70, 1)
    twin = copy.deepcopy(norm)
    x = torch.randn(40, 70, 2, device=DEVICE)
    for layer in (norm, twin):
        forward(layer, x)
        forward(layer, x * 2)
    assert all(torch.equal(a, b) for a, b in zip(norm.buffers(), twin.buffers(), strict=True))


def test_changes_are_seen_by_autograd(launches):
    norm, _ = pair(GhostBatchNorm1d, 5, 2)
    leaf = torch.ones(5, device=DEVICE, requires_grad=True)
    product = leaf * norm.running_mean
    forward(norm, torch.randn(4, 5, 3, device=DEVICE))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_who_accumulates_is_left_alone(launches):
    norm, twin = pair(GhostBatchNorm1d, 5, 2)
    x = torch.randn(4, 5, 3, device=DEVICE)
    for layer in (norm, twin):
        with accumulate_statistics(layer):
            forward(layer, x)
    assert not launches
    assert_alike(norm, twin)


def test_recalibration_sees_what_norms_see(launches):
    norm, twin = pair(GhostBatchNorm1d, 5, 2)
    data = [torch.randn(4, 5, 3, device=DEVICE) for _ in range(3)]
    for layer in (norm, twin):
        recalibrate(layer, data, progress=False)
    assert not launches
    assert norm.values_tracked == 3 * 12 and norm.num_batches_tracked == 0
    assert_alike(norm, twin)


def test_the_count_is_no_part_of_the_state(launches):
    norm, _ = pair(GhostBatchNorm1d, 5, 2)
    forward(norm, torch.randn(4, 5, 3, device=DEVICE))
    file = io.BytesIO()
    torch.save(norm, file)
    file.seek(0)
    assert "_arrived" not in torch.load(file, weights_only=False).__dict__
    assert "_arrived" not in copy.deepcopy(norm).__dict__
    assert all("arrived" not in name for name in norm.state_dict())
