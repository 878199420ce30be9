"""Ranks find each other in a store that still holds what the ranks of earlier starts wrote."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from kalmannorm.lab.errors import LabError
from kalmannorm.lab.training import meeting
from kalmannorm.lab.training.meeting import lost_ranks_told, of_this_start


def started(store, delays):
    """The part of the store that each rank gets, where the ranks come after these seconds."""

    def come(rank):
        time.sleep(delays[rank])
        return of_this_start(store, rank, len(delays))

    with ThreadPoolExecutor(len(delays)) as pool:
        return list(pool.map(come, range(len(delays))))


@pytest.mark.parametrize("delays", [(0, 0, 0), (0.1, 0, 0), (0, 0.1, 0.05)], ids=["together", "0 last", "0 first"])
def test_each_start_has_its_own_part(delays):
    store = HashStore()
    store.set("address", "of a rank that is gone")
    for start in range(3):
        parts = started(store, delays)
        for rank, part in enumerate(parts):
            assert not part.check(["address"]), f"start {start}, rank {rank}"
        parts[0].set("address", f"of start {start}")
        assert all(part.get("address") == f"of start {start}".encode() for part in parts)


def test_a_start_that_lost_a_rank_before_it_met_leaves_no_trace():
    store = HashStore()
    store.set("start", "old")
    store.set("old/here/1", "old 1")
    store.set("old/welcome/1", "old 1")  # to a rank that is gone
    parts = started(store, (0.1, 0))
    parts[0].set("address", "new")
    assert parts[1].get("address") == b"new"


def test_only_the_loss_of_a_rank_is_told_in_one_line():
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Read error: Connection reset by peer"
    with (
        pytest.raises(LabError, match=r"another rank has ended or does not answer \(.*Connection reset by peer\): run"),
        lost_ranks_told(),
    ):
        raise RuntimeError(gloo)
    with pytest.raises(RuntimeError, match="mat1 and mat2"), lost_ranks_told():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_wait_for_each_other_as_long_on_every_device(monkeypatch, device):
    given = {}
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(meeting, "rendezvous", lambda _: iter([(HashStore(), 0, 1)]))
    monkeypatch.setattr(meeting.distributed, "init_process_group", lambda *_, **options: given.update(options))
    meeting.meet(device)
    assert given["timeout"] == timedelta(minutes=30)
