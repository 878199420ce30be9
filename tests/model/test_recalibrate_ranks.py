"""Precise statistics over ranks with unequal numbers of batches (research #12; fvcore#152, detectron2#5398)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from support import two_ranks
from support.population_nets import KINDS, chain, quiet, same, statistics


def rank_data(rank):
    """Rank 0 has three batches, rank 1 one, and all are of other sizes."""
    generator = torch.Generator().manual_seed(rank)
    sizes = ([4, 6, 2], [8])[rank]
    return [torch.randn(n, 3, 4, 4, dtype=torch.float64, generator=generator) * (rank + 1) + rank for n in sizes]


def all_norms():
    # The last two would wait for the other rank at each batch.
    joined = {"joined": chain(statistics_batch_size=2, process_group="world"), "SyncBatchNorm": nn.SyncBatchNorm(3)}
    return nn.ModuleDict({**{name: build() for name, build in KINDS.items()}, "BatchNorm": nn.BatchNorm2d(3), **joined})


def run_all(models, x):
    for model in models.values():
        model(x)


def every_norm(rank):
    model = all_norms().double()
    result = quiet(model, rank_data(rank), forward=run_all)
    return result, dict(model.state_dict())


def ddp(rank):
    """Where rank 1 would wait for rank 0, which has no batch, to broadcast its buffers."""
    model = nn.parallel.DistributedDataParallel(chain(statistics_batch_size=2))
    assert quiet(model, rank_data(1) if rank else []).batches == 1
    assert model.will_sync_module_buffers()
    return statistics(model.module)


def failures(rank):
    """All ranks hear that one failed, instead of waiting for it, and nobody's statistics change."""
    net = chain(statistics_batch_size=2).eval()
    before = statistics(net)
    with pytest.raises(ValueError, match="loader yielded no batch"):
        quiet(net, [])
    kind, text = (TypeError, "got a object") if rank else (RuntimeError, "rank 1 failed.*TypeError")
    with pytest.raises(kind, match=text):
        quiet(net, [object()] if rank else rank_data(0))
    with pytest.raises(RuntimeError, match=f"rank {1 - rank} has other norms than rank {rank}"):
        quiet(net.first if rank else net, rank_data(0), forward=lambda part, x: net(x))
    same(statistics(net), before, rtol=0, atol=0)


def test_ranks_with_unequal_numbers_of_batches_get_the_statistics_of_all_data(tmp_path):
    first, second = two_ranks.run(tmp_path, {"every norm": every_norm, "ddp": ddp, "failures": failures})
    (result, state), (other_result, other) = first["every norm"], second["every norm"]
    assert result == other_result
    assert result.batches == 4
    assert set(result.values.values()) == {20 * 16}
    same(state, other, rtol=0, atol=0)
    model = all_norms().double()
    quiet(model, rank_data(0) + rank_data(1), forward=run_all)
    same(state, dict(model.state_dict()), rtol=1e-10, atol=1e-10)
    alone = chain(statistics_batch_size=2)
    quiet(alone, rank_data(1))
    for rank in (first, second):
        same(rank["ddp"], statistics(alone), rtol=1e-10, atol=1e-10)
