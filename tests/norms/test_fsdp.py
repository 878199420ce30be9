"""Fully sharded models on two ranks: one unit is one process, and what cannot work is refused in one line."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from kalmannorm import ClosingPhase, convert
from kalmannorm._running.short_way import ShortForward
from support import two_ranks
from support.short_way import count_short

fsdp = pytest.importorskip("torch.distributed.fsdp")
FullyShardedDataParallel = fsdp.FullyShardedDataParallel


def make(**options):
    torch.manual_seed(0)
    parts = [(3, 6), (6, 4)]
    blocks = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in parts]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(4 * 36, 3))
    groups = {} if options.get("to") == "group" else {"statistics_batch_size": 2}
    return convert(model, torch.randn(4, 3, 6, 6), **groups, **options).double()


def batch(step):
    return torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def trained(model, shares, twice=False):
    """Parameters after three steps. A gradient is the mean over the shares of a batch.

    `twice`: each step begins with a forward without gradients.
    """
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        parts = [batch(step)[share] for share in shares]
        if twice:
            with torch.no_grad():
                model(parts[0])
        sum(model(part).square().mean() / len(parts) for part in parts).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def on_one_rank(rank, blockwise=False, twice=False, **options):
    """`twice`: as in `trained`. The blocks stay gathered after the first forward."""
    model = make(**options)
    mesh = init_device_mesh("cpu", (2,))
    if blockwise:
        for block in model[:2]:
            fsdp.fully_shard(block, mesh=mesh, reshard_after_forward=not twice)
    fsdp.fully_shard(model, mesh=mesh, reshard_after_forward=not twice)
    share = slice(4 * rank, 4 * rank + 4)
    try:
        return [p.full_tensor() for p in trained(model, [share], twice)]
    except RuntimeError as error:
        return str(error)


def settled_units(rank, short):
    """Gradients of a net whose priors have faded. Its units are gathered one after the other, gains of channels too.

    `short`: whether norms may take the short way.
    """
    torch.manual_seed(0)
    parts = [(3, 4), (4, 6), (6, 8)]
    blocks = [nn.Sequential(nn.Conv2d(a, b, 1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in parts]
    model = convert(nn.Sequential(*blocks), torch.randn(4, 3, 6, 6), per_channel_gain=True)
    ClosingPhase(model, 100, start=0, end=0, fade_prior=True, process_group=None)
    units = FullyShardedDataParallel(
        model,
        auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or type(module) is nn.Sequential,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    with pytest.MonkeyPatch.context() as patch:
        if not short:
            patch.setattr(ShortForward, "normalize", lambda *_: None)
        taken = count_short(patch)
        units(batch(rank).float()).square().mean().backward()
    assert bool(taken) == short
    return {name: p.grad for name, p in units.named_parameters() if p.grad is not None}


COMPUTED = {"to": "group", "num_groups": 2, "weight_standardization": True}
UNITS = {
    "weights": {"transition": "weights"},
    "learned": {"transition": "learned"},
    "ghost": {"to": "ghost"},
    "computed filters": COMPUTED,
}
SCENARIOS = {
    **{name: partial(on_one_rank, **options) for name, options in UNITS.items()},
    "blocks": partial(on_one_rank, blockwise=True, transition="weights"),
    "ghost blocks": partial(on_one_rank, blockwise=True, to="ghost"),
    "ghost blocks twice": partial(on_one_rank, blockwise=True, twice=True, to="ghost"),
    "computed blocks": partial(on_one_rank, blockwise=True, **COMPUTED),
    "settled units": partial(settled_units, short=True),
    "settled units on the long way": partial(settled_units, short=False),
    "computed blocks twice": partial(on_one_rank, blockwise=True, twice=True, **COMPUTED),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return two_ranks.run(tmp_path_factory.mktemp("ranks"), SCENARIOS)


@pytest.mark.parametrize("kind", UNITS)
def test_one_unit_equals_one_process(ranks, kind):
    """Each rank has half of each batch, as in one process with two forwards."""
    assert_same(ranks, kind, trained(make(**UNITS[kind]), [slice(0, 4), slice(4, 8)]))


def assert_same(ranks, scenario, expected):
    for found in ranks:
        for a, b in zip(found[scenario], expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_ghost_norms_block_by_block(ranks):
    """They have no priors. No node of the graph belongs to several units, also while all of them are gathered."""
    expected = trained(make(to="ghost"), [slice(0, 4), slice(4, 8)])
    assert_same(ranks, "ghost blocks", expected)
    assert_same(ranks, "ghost blocks twice", expected)


def test_computed_filters_block_by_block(ranks):
    """Each convolution computes its own filter, while its unit is gathered."""
    expected = trained(make(**COMPUTED), [slice(0, 4), slice(4, 8)])
    assert_same(ranks, "computed blocks", expected)
    assert_same(ranks, "computed blocks twice", expected)


def test_units_of_norms_whose_priors_have_faded(ranks):
    assert any("gain" in name for found in ranks for name in found["settled units"])  # a rank has a part of them
    for found in ranks:
        short, long = found["settled units"], found["settled units on the long way"]
        assert short.keys() == long.keys()
        for name, grad in short.items():
            torch.testing.assert_close(grad, long[name])


def test_block_by_block_is_refused(ranks):
    """A prior would need the weights of another unit."""
    for found in ranks:
        assert "shard the model as one unit" in found["blocks"] and "\n" not in found["blocks"]
