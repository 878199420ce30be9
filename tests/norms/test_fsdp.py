"""Fully sharded models on two ranks: one unit is one process, and what cannot work is refused in one line."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from kalmannorm import convert
from support import two_ranks

fsdp = pytest.importorskip("torch.distributed.fsdp")


def make(transition="weights"):
    torch.manual_seed(0)
    parts = [(3, 6), (6, 4)]
    blocks = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in parts]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(4 * 36, 3))
    return convert(model, torch.randn(4, 3, 6, 6), transition=transition, statistics_batch_size=2).double()


def batch(step):
    return torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def trained(model, shares):
    """Parameters after three steps. A gradient is the mean over the shares of a batch."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        parts = [batch(step)[share] for share in shares]
        sum(model(part).square().mean() / len(parts) for part in parts).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def on_one_rank(rank, transition, blockwise):
    model = make(transition)
    mesh = init_device_mesh("cpu", (2,))
    if blockwise:
        for block in model[:2]:
            fsdp.fully_shard(block, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    share = slice(4 * rank, 4 * rank + 4)
    try:
        return [p.full_tensor() for p in trained(model, [share])]
    except RuntimeError as error:
        return str(error)


SCENARIOS = {
    "weights": partial(on_one_rank, transition="weights", blockwise=False),
    "learned": partial(on_one_rank, transition="learned", blockwise=False),
    "blocks": partial(on_one_rank, transition="weights", blockwise=True),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return two_ranks.run(tmp_path_factory.mktemp("ranks"), SCENARIOS)


@pytest.mark.parametrize("transition", ["weights", "learned"])
def test_one_unit_equals_one_process(ranks, transition):
    """Each rank has half of each batch, as in one process with two forwards."""
    expected = trained(make(transition), [slice(0, 4), slice(4, 8)])
    for found in ranks:
        for a, b in zip(found[transition], expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_block_by_block_is_refused(ranks):
    """A prior would need the weights of another unit."""
    for found in ranks:
        assert "shard the model as one unit" in found["blocks"] and "\n" not in found["blocks"]
