"""How the ranks of a torchrun job find each other, also when torchrun has started them again.

torchrun keeps one store for all starts of its ranks, and the store keeps what the ranks of earlier starts wrote. A new
rank that reads the address of an old one fails to connect (pytorch issue 135712). torchrun's restart count does not
tell starts apart: it may differ between nodes. So the ranks agree on a name for this start, and meet under it.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed
from torch.distributed import DistError
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from kalmannorm.lab.errors import LabError

_PAUSE = 0.02
"""Seconds between two looks into the store."""


def meet(device_type: str) -> None:
    """Join the group of all ranks, on this kind of device."""
    store, rank, ranks = next(rendezvous("env://"))
    cuda = device_type == "cuda"
    distributed.init_process_group(
        "nccl" if cuda else "gloo",
        store=of_this_start(store, rank, ranks),
        rank=rank,
        world_size=ranks,
        timeout=default_pg_timeout,  # NCCL's own is a third of it, and the first rank saves alone
        device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else None,
    )


def of_this_start(store: Store, rank: int, ranks: int) -> Store:
    """A part of the store that holds nothing but what the ranks of this start write.

    Rank 0 names the start. Every other rank announces itself under that name, and rank 0 repeats what it announced.
    The name and all announcements are new, so an old entry is never taken for an answer.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        store.set("start", own)
        for other in range(1, ranks):
            store.set(f"{own}/welcome/{other}", store.get(f"{own}/here/{other}").decode())  # waits for it
        return PrefixStore(own, store)
    while True:
        start = store.get("start").decode()
        store.set(f"{start}/here/{rank}", own)
        while store.get("start").decode() == start:
            welcome = f"{start}/welcome/{rank}"
            if store.check([welcome]) and store.get(welcome).decode() == own:
                return PrefixStore(start, store)
            time.sleep(_PAUSE)


@contextmanager
def lost_ranks_told() -> Iterator[None]:
    """By one line: where a rank has ended, all others fail, each in the exchange it is at."""
    try:
        yield
    except RuntimeError as error:
        text = (str(error).splitlines() or [""])[0]
        if not isinstance(error, DistError) and "gloo" not in text.lower():
            raise
        raise LabError(
            f"another rank has ended or does not answer ({text}): give the same command again, or let torchrun do so "
            "by --max-restarts"
        ) from error
