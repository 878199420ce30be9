"""`process_group`: two ranks that join their observations are one process on the joined batch."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from kalmannorm import (
    BatchKalmanNorm1d,
    BatchKalmanNorm2d,
    BatchRenorm1d,
    BatchRenorm2d,
    GhostBatchNorm1d,
    GhostBatchNorm2d,
    GroupedNorm,
    Moments,
    accumulate_statistics,
    batch_kalman_norm,
    convert,
)
from kalmannorm._norms import distributed
from support import two_ranks

F64 = torch.float64
C, P = 3, 4


class Case(NamedTuple):
    """Shapes of both ranks. One process sees the same groups of twice the size, or else (`by_group`) one by one."""

    shapes: tuple
    m: int | None = None
    kind: type[GroupedNorm] = BatchKalmanNorm2d
    options: dict = {}  # noqa: RUF012 - read only
    by_group: bool = False


SMALL, FILTER = (4, C, 2, 3), {"prior_features": P}
# By single groups the running statistics agree where all values count alike.
CUMULATIVE = {**FILTER, "momentum": None}
CASES = {
    "equal": Case((SMALL, SMALL), options=FILTER),
    "other N": Case(((5, C, 2, 3), (2, C, 2, 3)), options={**FILTER, "per_channel_gain": True, "rank": 2}),
    "other maps": Case(((3, C, 2, 3), (2, C, 4, 4)), options=CUMULATIVE, by_group=True),
    "ragged": Case(((5, C, 2, 3), (6, C, 2, 3)), 2, options=FILTER),
    "fewer groups": Case(((3, C, 2, 3), (7, C, 3, 3)), 2, options=CUMULATIVE, by_group=True),
    "no prior": Case(((7, C, 3, 3), (3, C, 2, 3)), 2, options={"momentum": None}, by_group=True),
    "plain average": Case((SMALL, SMALL), 2, options={**FILTER, "total_variance": False}),
    "plain average, no prior": Case((SMALL, SMALL), 2, options={"total_variance": False}),
    "one value per rank": Case(((1, C), (1, C)), kind=BatchKalmanNorm1d),
    "one value per rank and group": Case(((2, C), (2, C)), 1, kind=BatchKalmanNorm1d),
    "untracked": Case((SMALL, SMALL), 2, options={**FILTER, "track_running_stats": False}),
    "ghost": Case(((5, C, 2, 3), (6, C, 2, 3)), 2, GhostBatchNorm2d),
    "renorm": Case(((5, C, 2, 3), (6, C, 2, 3)), 2, BatchRenorm2d, {"warmup_steps": 0, "r_steps": 4, "d_steps": 4}),
}


def make(case, kind, m, process_group):
    torch.manual_seed(3)
    layer = kind(C, statistics_batch_size=m, dtype=F64, process_group=process_group, **case.options)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, 0.2, 1.2)
    return layer


def group_counts(case):
    """Groups of each rank."""
    return [-(-shape[0] // (case.m or shape[0])) for shape in case.shapes]


def widened(case, rows):
    """(2, rows, ·) with rows of zeros for the groups of the other rank."""
    return nn.functional.pad(rows, (0, 0, 0, max(group_counts(case)) - rows.shape[1]))


def random(seed, *shape):
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def inputs(case, step):
    """x and a cotangent of y for both ranks, the `previous` they share, and cotangents of all posteriors."""
    G = max(group_counts(case))
    x = [random(10 * step + rank, *shape) * (1 + rank) + 2 * rank for rank, shape in enumerate(case.shapes)]
    at_y = [random(100 + 10 * step + rank, *shape) for rank, shape in enumerate(case.shapes)]
    previous = Moments(random(200 + step, G, P), random(300 + step, G, P).exp())
    at_posterior = random(400 + step, 2, 2, G, C)  # rank, mean or var
    return x, at_y, previous, at_posterior


def leaf(t):
    return t.detach().clone().requires_grad_()


def train(layer, x, previous, at_y, at_posterior):
    """One forward and backward, with gradients into y and into the posterior where there is one."""
    if not isinstance(layer, BatchKalmanNorm1d | BatchKalmanNorm2d):
        y = layer(x)
        (y * at_y).sum().backward()
        return y, None
    y, posterior = layer(x, previous if layer.prior_features else None, return_posterior=True)
    ((y * at_y).sum() + (torch.stack(posterior[:2]) * at_posterior).sum()).backward()
    return y, torch.stack(posterior[:2])


def joined_run(rank, case):
    """Two steps on this rank; of the second everything that can be compared."""
    layer = make(case, case.kind, case.m, "world")
    for step in range(2):
        layer.zero_grad()
        x, at_y, previous, at_posterior = inputs(case, step)
        rows = group_counts(case)[rank]
        own, before = leaf(x[rank]), Moments(leaf(previous.mean[:rows]), leaf(previous.var[:rows]))
        y, posterior = train(layer, own, before, at_y[rank], at_posterior[rank][:, :rows])
    return {
        "y": y.detach(),
        "posterior": None if posterior is None else posterior.detach(),
        "x": own.grad,
        "previous": None if before.mean.grad is None else torch.stack([before.mean.grad, before.var.grad]),
        "parameters": {name: p.grad for name, p in layer.named_parameters()},
        "buffers": dict(layer.named_buffers()),
    }


def calls(case, tensors):
    """What one process is given: all groups in one batch, or each group as one example with all its values."""
    groups = [
        [part for part in parts if part is not None]
        for parts in zip_longest(*(t.split(case.m or t.shape[0]) for t in tensors))
    ]
    if not case.by_group:
        return [torch.cat([part for parts in groups for part in parts])]
    return [torch.cat([part.movedim(1, 0).flatten(1) for part in parts], 1).unsqueeze(0) for parts in groups]


def single_run(case):
    kind = BatchKalmanNorm1d if case.by_group else case.kind
    layer = make(case, kind, None if case.by_group or case.m is None else 2 * case.m, None)
    for step in range(2):
        layer.zero_grad()
        x, at_y, previous, at_posterior = inputs(case, step)
        x, previous = [leaf(t) for t in x], Moments(*map(leaf, previous[:2]))
        at_posterior = sum(widened(case, at_posterior[r][:, :G]) for r, G in enumerate(group_counts(case)))
        outputs = []
        for g, (part, at) in enumerate(zip(calls(case, x), calls(case, at_y), strict=True)):
            of = slice(g, g + 1) if case.by_group else slice(None)
            before = Moments(previous.mean[of], previous.var[of])
            outputs.append(train(layer, part, before, at, at_posterior[:, of]))
    return layer, x, previous, outputs


def same(actual, expected, name=""):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10, msg=lambda text: f"{name}: {text}")


def one_sided_nan(rank, prior):
    """Rank 1 meets a NaN, in x or in its prior: both skip the batch."""
    layer = BatchKalmanNorm2d(C, C, transition="identity", process_group="world")
    previous = Moments(torch.zeros(1, C), torch.ones(1, C))
    layer(torch.randn(2, C, 2, 2), previous)
    x = torch.randn(2, C, 2, 2)
    if rank == 1:
        (previous.mean if prior else x)[0, 0] = float("nan")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        layer(x, previous)
    return layer.skipped_batches, layer.running_var, [str(w.message) for w in seen]


def large_mean(rank):
    layer = BatchKalmanNorm2d(C, momentum=None, process_group="world")
    x = (random(rank, 4, C, 6, 6) + 1e4 + 3 * rank).float()
    return x, layer(x), layer.running_mean, layer.running_var


def overflowing(rank):
    layer = BatchKalmanNorm2d(C, C, transition="identity", process_group="world")
    x = (1e20 * random(rank, 2, C, 2, 2)).float().requires_grad_()
    with pytest.warns(RuntimeWarning, match="NaN or Inf"):
        y = layer(x, Moments(torch.zeros(1, C), torch.ones(1, C)))
    y.sum().backward()
    return y, x.grad, layer.skipped_batches


def without_company(rank):
    """Only rank 0 runs: nothing here may wait for the other."""
    if rank == 1:
        return None
    x, own = torch.randn(4, C, 2, 2), BatchKalmanNorm2d(C, statistics_batch_size=2, process_group="world").eval()
    results = {}
    for mode in ("population", "batch", "example"):
        own.set_inference(mode)
        results[mode] = own(x)
    own.frozen = True
    own.train()(x)
    return x, results


def lonely_value(rank):
    """Group 1 holds one value, on rank 0 alone: both ranks must hear of it, or one would wait for ever."""
    layer = BatchKalmanNorm1d(C, statistics_batch_size=1, process_group="world")
    with pytest.raises(ValueError, match=r"number 1, with one value per channel over all 2 ranks.*Use 2 or more"):
        layer(torch.randn(2 - rank, C))


LONE = {"rank 0 has more": (5, 3), "rank 1 has more": (4, 5), "one group": (3, 1)}


def lone_last(rank, kind, sizes):
    """The last group holds one value, on one rank alone. It joins the group before it."""
    layer = kind(C, statistics_batch_size=2, process_group="world", dtype=F64, momentum=None)
    x = leaf(random(rank, sizes[rank], C))
    y = layer(x)
    (y * random(10 + rank, sizes[rank], C)).sum().backward()
    return y.detach(), x.grad, dict(layer.named_buffers())


def small_net(m, group):
    net = nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C), nn.Linear(C, C), nn.BatchNorm1d(C), nn.BatchNorm1d(C))
    return convert(net, torch.randn(4, C), statistics_batch_size=m, process_group=group)


def hasty(seconds):
    """A group whose ranks do not wait for long."""
    return dist.new_group(timeout=timedelta(seconds=seconds))


def failing(run, kind=RuntimeError):
    """What the error says."""
    with pytest.raises(kind) as caught:
        run()
    return str(caught.value)


def skipped_forward(rank, m):
    net = small_net(m, hasty(0.3))
    return failing(lambda: net(torch.randn(4, C))) if rank == 0 else None


def skipped_backward(rank):
    net = small_net(None, hasty(2))
    loss = net(torch.randn(4, C)).sum()
    return failing(loss.backward) if rank == 0 else None


def skipped_end(rank):
    """Rank 1 fails inside, and rank 0 waits at the end."""
    net, group = small_net(2, None), hasty(0.3)

    def run():
        with accumulate_statistics(net, group):
            net(torch.randn(4, C if rank == 0 else C + 1))

    return failing(run)


def other_path(rank, m, by_hand):
    net = small_net(m, hasty(10))
    if by_hand:
        net = [None, BatchKalmanNorm1d(C, process_group="world"), None, GhostBatchNorm1d(C, process_group="world")]
    return failing(lambda: net[1 if rank == 0 else 3](torch.randn(4, C)))


def one_sided_empty(rank, m, shape):
    layer = BatchKalmanNorm2d(C, statistics_batch_size=m, process_group="world")
    return failing(lambda: layer(torch.randn((2, C, 2, 2) if rank == 0 else shape)), ValueError)


class Block(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.first = BatchKalmanNorm2d(C, dtype=F64, **options)
        self.second = BatchKalmanNorm2d(C, C, dtype=F64, **options)
        nn.init.constant_(self.second.transition.matrix, 0.3)

    def forward(self, x):
        y, posterior = self.first(x, return_posterior=True)
        return self.second(y.pow(3), posterior)


def checkpointed(rank, reentrant):
    results = []
    for again in (False, True):
        block, x = Block(statistics_batch_size=2, process_group="world"), leaf(random(rank, 3 + rank, C, 2, 2))
        y = checkpoint(block, x, use_reentrant=reentrant) if again else block(x)
        y.pow(3).sum().backward()
        results.append([x.grad, *(p.grad for p in block.parameters()), *block.buffers()])
    return results


def penalty(layer, x):
    """A loss of gradients, as in a gradient penalty; its own gradients."""
    (first,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
    first.square().sum().backward()
    return [x.grad, *(p.grad for p in layer.parameters())]


def joined_penalty(rank):
    return penalty(Block(process_group="world"), leaf(random(rank, 2, C, 2, 2)))


def groups_and_copies(rank):
    """A ProcessGroup of both, and one of rank 0 alone; copies and pickles of what holds them."""
    both, alone = dist.new_group([0, 1]), dist.new_group([0])
    layers = [BatchKalmanNorm2d(C, process_group=group) for group in (both, alone)]
    x = random(rank, 2, C, 2, 2).float()
    twin, thawed = copy.deepcopy(layers[0]), pickle.loads(pickle.dumps(layers[0]))
    buffer = io.BytesIO()
    torch.save(nn.Sequential(layers[0]), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)[0]
    assert twin.process_group is both
    assert thawed.process_group == loaded.process_group == "world"
    assert copy.deepcopy(thawed).process_group == "world"
    assert "process_group=ProcessGroup" in repr(twin) and "process_group='world'" in repr(thawed)
    return [layer(x) for layer in (layers[0], twin, thawed, loaded)], layers[1](x)


SCENARIOS = {
    **{name: partial(joined_run, case=case) for name, case in CASES.items()},
    "nan": partial(one_sided_nan, prior=False),
    "nan prior": partial(one_sided_nan, prior=True),
    "large mean": large_mean,
    "overflow": overflowing,
    "alone": without_company,
    "lonely value": lonely_value,
    **{f"lone last, {name}": partial(lone_last, kind=BatchKalmanNorm1d, sizes=sizes) for name, sizes in LONE.items()},
    **{f"renorm, {name}": partial(lone_last, kind=BatchRenorm1d, sizes=sizes) for name, sizes in LONE.items()},
    "non-reentrant": partial(checkpointed, reentrant=False),
    "reentrant": partial(checkpointed, reentrant=True),
    "penalty": joined_penalty,
    "groups": groups_and_copies,
    "skipped forward": partial(skipped_forward, m=None),
    "skipped forward of groups": partial(skipped_forward, m=2),
    "skipped backward": skipped_backward,
    "skipped end": skipped_end,
    "other path": partial(other_path, m=None, by_hand=False),
    "other path of groups": partial(other_path, m=2, by_hand=False),
    "other path by hand": partial(other_path, m=None, by_hand=True),
    "empty": partial(one_sided_empty, m=None, shape=(0, C, 2, 2)),
    "empty of groups": partial(one_sided_empty, m=2, shape=(0, C, 2, 2)),
    "empty map": partial(one_sided_empty, m=None, shape=(2, C, 0, 2)),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return two_ranks.run(tmp_path_factory.mktemp("ranks"), SCENARIOS)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_are_one_process_on_the_joined_batch(ranks, name):
    case = CASES[name]
    actual = [rank[name] for rank in ranks]
    layer, x, previous, outputs = single_run(case)
    for part, (y, _) in zip(calls(case, [a["y"] for a in actual]), outputs, strict=True):
        same(part, y.detach(), "y")
    for rank in range(2):
        same(actual[rank]["x"], x[rank].grad, "gradient of x")
        if actual[rank]["posterior"] is not None:
            joined = torch.cat([posterior.detach() for _, posterior in outputs], 1)
            same(actual[rank]["posterior"], joined[:, : actual[rank]["posterior"].shape[1]], "posterior")
    for parameter, p in layer.named_parameters():
        same(sum(a["parameters"][parameter] for a in actual), p.grad, parameter)
    if previous.mean.grad is not None:
        total = sum(widened(case, a["previous"]) for a in actual)
        same(total, torch.stack([previous.mean.grad, previous.var.grad]), "gradient of previous")
    for buffer, expected in layer.named_buffers():
        values = [a["buffers"][buffer] for a in actual]
        assert torch.equal(*values), f"{buffer} differs between ranks"
        if buffer != "num_batches_tracked" or not case.by_group:
            same(values[0], expected, buffer)


@pytest.mark.parametrize("kind", ["lone last", "renorm"])  # Batch Renorm starts as batch norm
@pytest.mark.parametrize(("name", "sizes"), LONE.items(), ids=LONE.keys())
def test_a_last_group_of_one_value_over_all_ranks_joins_the_group_before_it(ranks, name, sizes, kind):
    actual = [rank[f"{kind}, {name}"] for rank in ranks]
    x = [leaf(random(rank, size, C)) for rank, size in enumerate(sizes)]
    last = max(sizes) // 2 - 1  # the number of the last group, after joining
    loss = 0
    for g in range(last + 1):
        of = slice(2 * g, None if g == last else 2 * g + 2)
        group = torch.cat([part[of] for part in x])
        y = nn.functional.batch_norm(group, None, None, training=True)
        same(torch.cat([part[of] for part, *_ in actual]), y.detach(), f"group {g}")
        loss = loss + (y * torch.cat([random(10 + r, size, C)[of] for r, size in enumerate(sizes)])).sum()
    loss.backward()
    for rank in range(2):
        same(actual[rank][1], x[rank].grad, "gradient of x")
    if kind == "lone last":
        values = torch.cat(x).detach()
        same(actual[0][2]["running_mean"], values.mean(0))
        same(actual[0][2]["running_var"], values.var(0, correction=0))
    assert all(torch.equal(actual[0][2][name], buffer) for name, buffer in actual[1][2].items())


@pytest.mark.parametrize("where", ["nan", "nan prior"])
def test_a_nan_on_one_rank_is_skipped_by_both(ranks, where):
    (count, var, warned), (other_count, other_var, _) = (rank[where] for rank in ranks)
    assert count == other_count == 1
    assert torch.equal(var, other_var) and torch.isfinite(var).all()
    assert "NaN or Inf" in warned[0]


def test_large_means_keep_their_digits(ranks):
    results = [rank["large mean"] for rank in ranks]
    x = torch.cat([x for x, *_ in results]).double()
    y, _ = batch_kalman_norm(x, None, None, None, None)
    torch.testing.assert_close(torch.cat([y for _, y, *_ in results]).double(), y, rtol=0, atol=1e-3)
    _, _, mean, var = results[0]
    torch.testing.assert_close(mean.double(), x.mean((0, 2, 3)), rtol=2e-7, atol=0)
    torch.testing.assert_close(var.double(), x.var((0, 2, 3), correction=0), rtol=1e-3, atol=0)


def test_a_variance_that_overflows_is_no_nan(ranks):
    """One process divides by infinity, and skips the batch; so do two."""
    for rank in ranks:
        y, gradient, skipped = rank["overflow"]
        assert (y == 0).all() and (gradient == 0).all()
        assert skipped == 1


def test_inference_and_frozen_layers_need_no_company(ranks):
    x, outputs = ranks[0]["alone"]
    own = BatchKalmanNorm2d(C, statistics_batch_size=2).eval()
    for mode, y in outputs.items():
        own.set_inference(mode)
        assert torch.equal(own(x), y), mode


@pytest.mark.parametrize("kind", ["non-reentrant", "reentrant"])
def test_checkpointing_moves_statistics_once(ranks, kind):
    for rank in ranks:
        plain, again = rank[kind]
        for expected, actual in zip(plain, again, strict=True):
            same(actual, expected)


def test_gradients_of_gradients(ranks):
    actual = [rank["penalty"] for rank in ranks]
    expected = penalty(Block(), leaf(torch.cat([random(rank, 2, C, 2, 2) for rank in range(2)])))
    same(torch.cat([a[0] for a in actual]), expected[0])
    for i in range(1, len(expected)):
        same(actual[0][i] + actual[1][i], expected[i])


def test_process_groups_copies_and_pickles(ranks):
    x = torch.cat([random(rank, 2, C, 2, 2).float() for rank in range(2)])
    joined, own = BatchKalmanNorm2d(C), BatchKalmanNorm2d(C)
    y = joined(x).split(2)
    for rank in range(2):
        synchronised, alone = ranks[rank]["groups"]
        for output in synchronised:
            torch.testing.assert_close(output, y[rank])
        torch.testing.assert_close(alone, own(x.split(2)[rank]))


SKIPPED = {
    "skipped forward": "layer '1'",
    "skipped forward of groups": "layer '1'",
    "skipped backward": "layer '4'",
    "skipped end": "accumulate_statistics",
}


@pytest.mark.parametrize(("name", "place"), SKIPPED.items())
def test_a_rank_that_does_not_come_is_named(ranks, name, place):
    said = ranks[0][name]
    assert said.startswith(
        f"{place}: rank 0 of process_group waited here for all ranks, but rank 1 did not take part. "
    )
    assert "skipped this forward or took another path" in said and "Timed out" in said


@pytest.mark.parametrize("name", ["other path", "other path of groups"])
def test_ranks_at_different_layers_say_so(ranks, name):
    for rank, place in enumerate(("layer '1'", "layer '3'")):
        expected = f"{place}: rank {rank} of process_group is here, but rank {1 - rank} at another layer. "
        assert ranks[rank][name].startswith(expected)


def test_layers_without_a_name_are_described(ranks):
    assert ranks[0]["other path by hand"].startswith("a BatchKalmanNorm1d(3): rank 0 of process_group is here")
    assert ranks[1]["other path by hand"].startswith("a GhostBatchNorm1d(3): rank 1 of process_group is here")


@pytest.mark.parametrize("name", ["empty", "empty of groups", "empty map"])
def test_an_empty_batch_is_named_on_all_ranks(ranks, name):
    said, also = (rank[name] for rank in ranks)
    assert said == also
    assert said.startswith("a BatchKalmanNorm2d(3): ") and "got an empty batch on rank 1; give every rank" in said


def test_ranks_that_wait_elsewhere_are_told_from_those_that_are_missing(monkeypatch):
    monkeypatch.setattr(distributed, "GRACE", 0.1)

    class Group:
        store = dist.HashStore()

        def get_group_store(self):
            return self.store

    Group.store.set("kalmannorm/2/1", "layer 'a'")
    Group.store.set("kalmannorm/3/1", "layer 'b'")
    found = distributed.whereabouts(Group(), 0, [1, 2, 3], "layer 'a'")
    assert found == {1: None, 2: "layer 'a'", 3: "layer 'b'"}
    assert Group.store.get("kalmannorm/0/1") == b"layer 'a'"
    Group.store.set("kalmannorm/3/2", "layer 'c'")
    found = distributed.whereabouts(Group(), 0, [2, 3], "layer 'c'")
    assert found == {2: None, 3: "layer 'c'"}, "rank 2 waited in the failure before"
    assert distributed.whereabouts(object(), 0, [1], "layer 'a'") == {1: None}
    assert distributed.whereabouts(object(), 0, [1, 2], "layer 'a'") == {}, "one of them, but which?"


@pytest.mark.parametrize("kind", [BatchKalmanNorm2d, GhostBatchNorm2d, BatchRenorm2d])
def test_without_torch_distributed_it_runs_by_itself(kind):
    own, other = kind(C, statistics_batch_size=2), kind(C, statistics_batch_size=2, process_group="world")
    x = torch.randn(5, C, 2, 2)
    assert torch.equal(own(x), other(x))
    assert all(torch.equal(a, b) for a, b in zip(own.buffers(), other.buffers(), strict=True))
    other.process_group = None
    assert other.process_group is None


def test_what_cannot_be_joined_is_refused():
    with pytest.raises(ValueError, match=r"process_group must be None, 'world' or .*, got 'all'"):
        BatchKalmanNorm2d(C, process_group="all")
    with pytest.raises(TypeError, match=r"process_group .* got a int"):
        GhostBatchNorm2d(C, process_group=2)
    with pytest.raises(ValueError, match="process_group must be None with covariance='full'"):
        BatchKalmanNorm2d(C, covariance="full", process_group="world")
    layer = BatchKalmanNorm2d(C, covariance="full")
    with pytest.raises(ValueError, match="process_group must be None with covariance='full'"):
        layer.process_group = "world"
