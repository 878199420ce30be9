"""`accumulate_statistics`: micro-batches and ranks leave the statistics that one forward on the joined batch leaves."""

from __future__ import annotations

import copy
import pickle
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from kalmannorm import (
    BatchKalmanNorm1d,
    BatchKalmanNorm2d,
    GhostBatchNorm2d,
    accumulate_statistics,
    check_statistics,
    convert,
    freeze_statistics,
    recalibrate,
    set_inference,
)
from support import two_ranks
from support.population_nets import KINDS, chain, data
from support.wide import narrow

EXACT = {"rtol": 1e-12, "atol": 1e-12}
SPLITS = [[24], [8, 8, 8], [2, 4, 18], [2] * 12]
NETS = {
    **KINDS,
    "BKN-cumulative": lambda: chain(statistics_batch_size=2, momentum=None),
    "BKN-full": lambda: chain(transition="learned", statistics_batch_size=2, covariance="full"),
    "BKN-synchronised, alone": lambda: chain(statistics_batch_size=2, process_group="world"),
}


def without_dropout(net):
    net.dropout.p = 0.0
    return net


def buffers(model):
    return {name.removeprefix("module."): value.clone() for name, value in model.named_buffers()}


def same(model, expected, **tolerance):
    for name, value in buffers(model).items():
        torch.testing.assert_close(value, expected[name], **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def accumulated(model, parts, **options):
    with accumulate_statistics(model, **options):
        for part in parts:
            model(part)


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("name", NETS)
def test_micro_batches_move_the_statistics_as_one_batch(name, split):
    whole, micro = (without_dropout(NETS[name]()) for _ in range(2))
    for _ in range(3):
        x = data(24)
        whole(x)
        accumulated(micro, x.split(split))
        same(micro, buffers(whole), **EXACT)
    assert micro.first.num_batches_tracked == 3


def test_statistics_stay_still_inside():
    """Also for Batch Renorm's correction, which must be the same for every micro-batch."""
    net = without_dropout(KINDS["BatchRenorm"]())
    accumulated(net, [data(4)])
    before, x = buffers(net), data(4)
    with accumulate_statistics(net):
        first = net(x)
        net(data(4))
        assert torch.equal(net(x), first)
        same(net, before, rtol=0, atol=0)
    assert not torch.equal(net(x), first)


def train(net, batches, parts):
    """SGD steps, each by so many micro-batches, or by one forward outside; the losses."""
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.01), []
    for x in batches:
        optimizer.zero_grad()
        with accumulate_statistics(net) if parts > 1 else nullcontext():
            micro = [(net(part).tanh() - 0.5).square().sum() / x.numel() for part in x.chunk(parts)]
            torch.autograd.backward(micro)
        optimizer.step()
        losses.append(sum(micro).detach())
    return torch.stack(losses)


@pytest.mark.parametrize("name", ["BKN-weights", "BKN-learned", "Ghost", "BatchRenorm"])
def test_twenty_steps_by_accumulation_are_twenty_steps(name):
    """Statistics feed back into training in Batch Renorm alone; gradients add up in all."""
    batches = [data(8) for _ in range(20)]
    whole, micro = (without_dropout(KINDS[name]()) for _ in range(2))
    expected = train(whole, batches, 1)
    torch.testing.assert_close(train(micro, batches, 4), expected, rtol=1e-9, atol=1e-9)
    same(micro, buffers(whole), rtol=1e-9, atol=1e-9)
    assert expected[-5:].mean() < expected[:5].mean()


def test_converted_model():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5))
    whole = convert(net.double(), torch.randn(2, 3, 6, 6).double(), statistics_batch_size=2)
    micro, x = copy.deepcopy(whole), torch.randn(8, 3, 6, 6).double()
    whole(x)
    accumulated(micro, x.split(2))
    same(micro, buffers(whole), **EXACT)


def test_float32_sums_do_not_drift():
    """A thousand micro-batches far from zero: sums run in float64."""
    x = torch.randn(4000, 3, 1) + 1000
    norm = BatchKalmanNorm1d(3, statistics_batch_size=2, momentum=None)
    accumulated(norm, x.split(4))
    torch.testing.assert_close(norm.running_var.double(), x.double().var((0, 2), correction=0), rtol=1e-5, atol=0)
    assert norm.values_tracked == 4000


def test_half_precision_and_frozen_and_eval():
    net = nn.ModuleDict({name: BatchKalmanNorm2d(3, statistics_batch_size=2) for name in ("bf16", "frozen", "judged")})
    net["bf16"].bfloat16()
    net["judged"].eval()
    freeze_statistics(net["frozen"])
    before = buffers(net)
    with accumulate_statistics(net):
        for norm in net.values():
            norm(data(4, dtype=torch.bfloat16 if norm is net["bf16"] else torch.float32))
    for name, value in buffers(net).items():
        assert torch.equal(value, before[name]) == (not name.startswith("bf16") or name.endswith("skipped_batches")), (
            name
        )


@pytest.mark.parametrize("momentum", [0.1, None])
def test_nothing_seen_moves_nothing(momentum):
    norm = BatchKalmanNorm2d(3, momentum=momentum)
    for times in range(2):
        before = buffers(norm)
        accumulated(norm, [])
        accumulated(norm, [torch.empty(0, 3, 4, 4)])
        same(norm, before, rtol=0, atol=0)
        norm(data(4, dtype=torch.float32))
        assert norm.num_batches_tracked == times + 1


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_bad_micro_batch_makes_one_skipped_batch(place):
    norm = GhostBatchNorm2d(3, statistics_batch_size=2, dtype=torch.float64)
    parts = [data(4) for _ in range(3)]
    norm(parts[0])
    parts[place][1, 1] = torch.inf
    before = buffers(norm)
    with pytest.warns(RuntimeWarning, match="NaN or Inf"):
        accumulated(norm, parts)
    same(norm, before | {"skipped_batches": torch.tensor(1)}, rtol=0, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accumulated(norm, [data(4)])
    assert norm.num_batches_tracked == 2
    assert check_statistics(norm) == {"": 1}


def test_an_error_inside_discards_what_was_seen():
    norm = BatchKalmanNorm2d(3, statistics_batch_size=2, dtype=torch.float64)
    before = buffers(norm)
    with pytest.raises(ValueError, match="x must be 4D"):
        accumulated(norm, [data(4), data(4)[0]])
    same(norm, before, rtol=0, atol=0)
    twin, x = copy.deepcopy(norm), data(4)
    twin(x)
    accumulated(norm, [x])  # and nothing of it is left for the next time
    same(norm, buffers(twin), **EXACT)


def test_one_inside_another_is_refused():
    net = chain()
    with (
        accumulate_statistics(net.second),
        pytest.raises(RuntimeError, match="'second' is already accumulating"),
        accumulate_statistics(net),
    ):
        pass
    accumulated(net, [data(4)])
    with accumulate_statistics(net.first), accumulate_statistics(net.second):
        net(data(4))
    assert net.first.num_batches_tracked == net.second.num_batches_tracked == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputing_counts_once(reentrant):
    plain, twin = (without_dropout(KINDS["BKN-weights"]()) for _ in range(2))
    x = data(8).requires_grad_()
    accumulated(plain, x.split(4))
    with accumulate_statistics(twin):
        for part in x.split(4):
            checkpoint(twin, part, use_reentrant=reentrant).square().sum().backward()
    same(twin, buffers(plain), **EXACT)


def test_a_norm_called_twice_moves_once_by_both_calls():
    norm, x = BatchKalmanNorm2d(3, statistics_batch_size=2, dtype=torch.float64), data(8)
    whole = copy.deepcopy(norm)
    whole(x)
    with accumulate_statistics(norm):
        norm(x[:2])
        norm(x[2:])
    same(norm, buffers(whole), **EXACT)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_made_inside_stands_alone(copied):
    norm = BatchKalmanNorm2d(3, statistics_batch_size=2, dtype=torch.float64)
    with accumulate_statistics(norm):
        norm(data(4))
        keys = set(norm.state_dict())
        twin = copied(norm)
        assert twin.num_batches_tracked == 0
        twin(data(4))
        assert twin.num_batches_tracked == 1
    assert norm.num_batches_tracked == 1
    assert norm.values_tracked == 4 * 16
    assert keys == set(norm.state_dict()) == set(BatchKalmanNorm2d(3).state_dict())
    assert vars(norm).keys() == vars(BatchKalmanNorm2d(3)).keys()


def test_recalibration_inside_sees_its_own_data():
    """It writes its statistics at once; what the forwards saw moves them at the end."""
    norm, twin = (BatchKalmanNorm2d(3, statistics_batch_size=2, dtype=torch.float64) for _ in range(2))
    x, other = data(4), data(8)
    with accumulate_statistics(norm):
        norm(x)
        recalibrate(norm, [other], progress=False)
    recalibrate(twin, [other], progress=False)
    twin(x)
    same(norm, buffers(twin), **EXACT)


def test_inference_inside_uses_the_statistics_as_they_are():
    norm, x = BatchKalmanNorm2d(3, statistics_batch_size=2), data(4, dtype=torch.float32)
    set_inference(norm, "example")
    expected = norm.eval()(x)
    with accumulate_statistics(norm):
        norm.train()(x)
        torch.testing.assert_close(norm.eval()(x), expected)


def test_a_model_without_our_norms_just_runs():
    model = nn.BatchNorm2d(3)
    accumulated(model, [torch.randn(4, 3, 2, 2)] * 2, process_group="world")
    assert model.num_batches_tracked == 2


def test_wrong_process_group():
    with pytest.raises(ValueError, match="process_group must be None, 'world'"):
        accumulated(chain(), [], process_group="all")


@pytest.mark.parametrize("name", narrow(["BKN-learned", "BatchRenorm"], ["BatchRenorm"]))
def test_compiled_without_a_graph_break(name):
    torch._dynamo.reset()
    net = without_dropout(KINDS[name]())
    twin = copy.deepcopy(net)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for steps in range(3):
        x = data(8)
        net(x)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        accumulated(compiled, x.split(2))
        if steps:  # neither a new use nor a new micro-batch compiles anew
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before > 0
        same(twin, buffers(net), rtol=1e-9, atol=1e-9)
    net(x)
    compiled(x)  # outside again
    same(twin, buffers(net), rtol=1e-9, atol=1e-9)


def test_recompiled_outside_then_inside():
    torch._dynamo.reset()
    norm = BatchKalmanNorm2d(3, statistics_batch_size=2, dtype=torch.float64)
    compiled, x = torch.compile(norm, fullgraph=True, backend="aot_eager"), data(4)
    compiled(x)
    accumulated(compiled, [x, x])
    compiled(x)
    assert norm.num_batches_tracked == 3
    assert norm.values_tracked == 4 * 64


RANK_SPLITS = ([4, 4], [2, 2, 8])


def rank_parts(rank, step):
    """Other numbers of forwards and of examples on each rank."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(n, 3, 4, 4, dtype=torch.float64, generator=generator) + 3 * rank for n in RANK_SPLITS[rank]]


def every_kind(rank):
    results = {}
    for name in NETS:
        net = without_dropout(NETS[name]())
        if "synchronised" in name:
            continue
        for step in range(3):
            accumulated(net, rank_parts(rank, step), process_group="world")
        results[name] = buffers(net)
    return results


def one_rank_idle(rank):
    net = without_dropout(KINDS["BKN-weights"]())
    accumulated(net, rank_parts(0, 0) if rank else [], process_group="world")
    return buffers(net)


def bad_on_one_rank(rank):
    net = chain(statistics_batch_size=2)
    before = buffers(net)
    parts = rank_parts(rank, 0)
    if rank:
        parts[1][0] = torch.nan
    with pytest.warns(RuntimeWarning, match="NaN or Inf"):
        accumulated(net, parts, process_group="world")
    return before, buffers(net)


def synchronised(rank):
    """Norms that join by themselves see all ranks' values already; they are counted once."""
    net = chain(statistics_batch_size=2, process_group="world")
    accumulated(without_dropout(net), rank_parts(0, rank), process_group="world")
    return buffers(net)


def one_message(rank):
    net, messages = chain(), []
    gather = torch.distributed.all_gather
    torch.distributed.all_gather = lambda *args, **kwargs: (messages.append(1), gather(*args, **kwargs))
    try:
        accumulated(net, rank_parts(rank, 0), process_group="world")
    finally:
        torch.distributed.all_gather = gather
    return len(messages)


def ddp(rank):
    """By the defaults of DDP, which broadcasts the buffers of rank 0 before each forward; 4 examples a rank."""
    net = DistributedDataParallel(without_dropout(KINDS["BatchRenorm"]()))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        with accumulate_statistics(net, process_group="world"):
            for x in ddp_batch(step).chunk(2)[rank].chunk(2):
                (net(x).pow(3).sum() / 4 / 64).backward()
        optimizer.step()
    return buffers(net), [p.detach().clone() for p in net.parameters()]


def ddp_batch(step):
    return torch.randn(8, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    scenarios = [every_kind, one_rank_idle, bad_on_one_rank, synchronised, one_message, ddp]
    return two_ranks.run(tmp_path_factory.mktemp("accumulation"), {part.__name__: part for part in scenarios})


@pytest.mark.parametrize("name", [name for name in NETS if "synchronised" not in name])
def test_ranks_move_as_one_process(ranks, name):
    net = without_dropout(NETS[name]())
    for step in range(3):
        net(torch.cat(rank_parts(0, step) + rank_parts(1, step)))
    for rank in ranks:
        same(net, rank["every_kind"][name], **EXACT)
        for key, value in rank["every_kind"][name].items():
            assert torch.equal(value, ranks[0]["every_kind"][name][key]), "ranks must agree to the last bit"


def test_a_rank_that_saw_nothing_takes_part(ranks):
    net = without_dropout(KINDS["BKN-weights"]())
    net(torch.cat(rank_parts(0, 0)))
    for rank in ranks:
        same(net, rank["one_rank_idle"], **EXACT)


def test_a_bad_batch_on_one_rank_is_skipped_by_all(ranks):
    for rank in ranks:
        before, after = rank["bad_on_one_rank"]
        for name, value in after.items():
            expected = torch.tensor(1) if name.endswith("skipped_batches") else before[name]
            assert torch.equal(value, expected), name


def test_norms_that_synchronise_are_counted_once(ranks):
    groups = [torch.cat(rank_parts(0, rank)).unflatten(0, (4, 2)) for rank in range(2)]
    net = chain(statistics_batch_size=4)
    without_dropout(net)(torch.stack(groups, 1).flatten(0, 2))
    for rank in ranks:
        same(net, rank["synchronised"], **EXACT)


def test_ranks_exchange_one_message(ranks):
    assert [rank["one_message"] for rank in ranks] == [1, 1]


def test_ddp_with_its_defaults(ranks):
    net = without_dropout(KINDS["BatchRenorm"]())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        (net(ddp_batch(step)).pow(3).sum() / 8 / 64).backward()
        optimizer.step()
    for rank in ranks:
        statistics, parameters = rank["ddp"]
        same(net, statistics, rtol=1e-10, atol=1e-10)
        for own, expected in zip(parameters, net.parameters(), strict=True):
            torch.testing.assert_close(own, expected.detach(), rtol=1e-10, atol=1e-10)
