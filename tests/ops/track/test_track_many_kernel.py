"""Running statistics of many norms moved in one launch: the buffers that each norm's separate operations leave."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from kalmannorm import GhostBatchNorm1d
from kalmannorm._norms import running_statistics
from kalmannorm._ops.track import triton_many
from kalmannorm._ops.track.triton_many import track_many
from support.poisoned import DEVICE, poison
from support.tracked_norms import NORMS, assert_alike, forward
from support.wide import narrow

pytestmark = [  # of Triton's interpreter
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]

SIZES = {
    "one group": (4, 1, 4),
    "N groups": (6, 5, 1),
    "ragged": (7, 70, 3),
    "several blocks, the last not full": (40, 300, 1),
    "another m": (40, 130, 16),
}
MORE_GROUPS_THAN_A_TILE = (70, 40, 1)


class Norms:
    """Norms whose moves are collected and made together, and their twins, which are tracked at once, one by one."""

    def __init__(self, *makes):
        self.requests, self.tables, self.norms, self.twins = [], {}, [], []
        for make in makes:
            norm = make().to(DEVICE)
            twin = copy.deepcopy(norm)
            twin._launch = lambda rows: None
            norm.wire = SimpleNamespace(
                postpone=lambda request, kernels: self.requests.append(request) or True,
                track_first_run=lambda: None,
                normalize=lambda *_: None,  # the long way
                begin=lambda: 0,
            )
            self.norms.append(norm)
            self.twins.append(twin)

    def run(self, inputs):
        for norm, twin, x in zip(self.norms, self.twins, inputs, strict=True):
            forward(norm, x)
            forward(twin, x)
        track_many(self.requests, self.tables)
        self.requests.clear()

    def assert_alike(self):
        for norm, twin in zip(self.norms, self.twins, strict=True):
            assert_alike(norm, twin)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Kernels run on poisoned memory; which moves they made one by one."""
    calls = []
    poison(monkeypatch)
    monkeypatch.setattr(running_statistics, "tracking_for", lambda rows: triton_many)
    single = triton_many.track
    monkeypatch.setattr(triton_many, "track", lambda request: calls.append(request) or single(request))
    return calls


def inputs_of(sizes, step=0):
    return [torch.randn(N, C, 3, device=DEVICE) * (step + 1) + step for N, C, _ in sizes]


def ghosts(sizes, **options):
    return Norms(*(lambda C=C, m=m: GhostBatchNorm1d(C, statistics_batch_size=m, **options) for _, C, m in sizes))


@pytest.mark.parametrize("kind", narrow(["kalman", "ghost", "plain variances", "cumulative"], ["kalman", "cumulative"]))
@pytest.mark.parametrize("more", [(), (MORE_GROUPS_THAN_A_TILE,)], ids=["one tile", "several tiles"])
def test_leaves_what_the_separate_operations_leave(kind, more, alone):
    sizes = [*SIZES.values(), *more]
    make = NORMS[kind]
    norms = Norms(*(lambda C=C, m=m: make(C, statistics_batch_size=m) for _, C, m in sizes))
    for step in range(3):
        norms.run(inputs_of(sizes, step))
        norms.assert_alike()
    assert not alone and len(norms.tables) == 1
    (table,) = norms.tables.values()
    assert not table.arrived.any()
    for norm, (N, _, _) in zip(norms.norms, sizes, strict=True):
        assert norm.num_batches_tracked == 3 and norm.values_tracked == 3 * N * 3


@pytest.mark.parametrize("groups", [1, 2, 17, 33, 64, 70])
def test_any_number_of_groups(groups, alone):
    sizes = [(groups, 20, 1), (2 * groups - 1, 3, 2)]
    norms = ghosts(sizes)
    norms.run(inputs_of(sizes))
    norms.assert_alike()
    assert not alone


def test_momenta_and_averages_may_differ(alone):
    """Norms that average alike go together, whatever their momenta."""
    norms = Norms(
        lambda: GhostBatchNorm1d(5, statistics_batch_size=2, momentum=0.3),
        lambda: GhostBatchNorm1d(70, statistics_batch_size=2, momentum=0.7, observation_momentum=0.5),
        lambda: GhostBatchNorm1d(6, statistics_batch_size=2, momentum=None),
        lambda: GhostBatchNorm1d(7, statistics_batch_size=3, momentum=None),
        lambda: GhostBatchNorm1d(8, statistics_batch_size=2, total_variance=False),
    )
    for step in range(4):
        norms.run([torch.randn(8, norm.num_features, 2, device=DEVICE) + step for norm in norms.norms])
        norms.assert_alike()
    assert len(norms.tables) == 2 and len(alone) == 4  # the last is the only one of its kind


@pytest.mark.parametrize("channel", narrow([0, -1], [-1]))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38], ids=["nan", "inf", "overflow"])
def test_a_bad_batch_stops_its_norm_alone(bad, channel):
    sizes = [(40, 70, 1), (40, 300, 1), (40, 5, 1)]
    norms = ghosts(sizes)
    norms.run(inputs_of(sizes))
    broken, twin = norms.norms[1], norms.twins[1]
    before = copy.deepcopy(dict(broken.named_buffers()))
    inputs = inputs_of(sizes)
    inputs[1][0, channel, 0] = bad
    with pytest.warns(RuntimeWarning, match="NaN or Inf") if DEVICE == "cpu" else nullcontext():
        norms.run(inputs)  # the twin's separate operations say so
    for name, buffer in broken.named_buffers():
        assert torch.equal(buffer, before[name] + (name == "skipped_batches")), name
    norms.assert_alike()
    norms.run(inputs_of(sizes))
    norms.assert_alike()
    assert twin.num_batches_tracked == 2 and twin.skipped_batches == 1


def test_programs_may_come_in_any_order():
    sizes = list(SIZES.values())
    norms, other = ghosts(sizes), ghosts(sizes)
    for step in range(3):
        inputs = inputs_of(sizes, step)
        norms.run(inputs)
        other.run(inputs)
        (table,) = norms.tables.values()
        table.work.copy_(table.work[torch.randperm(len(table.work), device=DEVICE)])
        assert not table.arrived.any()
    norms.assert_alike()
    for a, b in zip(norms.norms, other.norms, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.buffers(), b.buffers(), strict=True))


def test_a_count_that_was_left_is_not_for_good():
    """As when two streams moved one model's statistics at a time."""
    sizes = [SIZES["several blocks, the last not full"], SIZES["ragged"]]
    norms = ghosts(sizes)
    norms.run(inputs_of(sizes))
    for table in norms.tables.values():
        table.arrived.fill_(1)
    norms.run(inputs_of(sizes, 1))
    norms.assert_alike()


def test_the_same_bits_every_time():
    sizes = list(SIZES.values())
    one, other = ghosts(sizes), ghosts(sizes)
    for step in range(2):
        inputs = inputs_of(sizes, step)
        one.run(inputs)
        other.run(inputs)
    for a, b in zip(one.norms, other.norms, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.buffers(), b.buffers(), strict=True))


def test_tables_are_written_once_for_every_size_and_place():
    sizes = [(8, 5, 2), (8, 6, 2)]
    norms = ghosts(sizes)
    for _ in range(3):
        norms.run(inputs_of(sizes))
    assert len(norms.tables) == 1
    norms.run(inputs_of([(6, 5, 2), (6, 6, 2)]))
    assert len(norms.tables) == 2
    for layer in (norms.norms[0], norms.twins[0]):
        layer.running_mean = layer.running_mean.clone()
    norms.run(inputs_of(sizes))
    assert len(norms.tables) == 3
    norms.assert_alike()


def test_few_tables_are_kept_but_those_of_graphs(monkeypatch):
    monkeypatch.setattr(triton_many, "KEPT", 2)
    norms = ghosts([(2, 5, 2), (2, 6, 2)])
    for N in range(2, 6):
        norms.run(inputs_of([(N, 5, 2), (N, 6, 2)]))
        if N == 2:
            (captured,) = norms.tables.values()
            captured.captured = True
    assert len(norms.tables) == 3 and captured in list(norms.tables.values())
    norms.assert_alike()


def test_changes_are_seen_by_autograd():
    norms = ghosts([(8, 5, 2), (8, 6, 2)])
    leaf = torch.ones(6, device=DEVICE, requires_grad=True)
    product = leaf * norms.norms[1].running_mean
    norms.run(inputs_of([(8, 5, 2), (8, 6, 2)]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
