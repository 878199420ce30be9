"""Initializes the process group under torchrun or srun, also after torchrun has restarted the ranks.

torchrun uses one store for all starts of its ranks. The store keeps the entries of earlier starts. A new rank that
reads the address of an old rank fails to connect (pytorch issue 135712). torchrun's restart count does not identify a
start, because it may differ between nodes. So the ranks agree on a new name for this start, and use it as a prefix.
"""

from __future__ import annotations

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
from kalmannorm.lab.machine.ranks import by_slurm, ranks
from kalmannorm.lab.training.fabric import SLURMEnvironment

_PAUSE = 0.02
"""Seconds between two looks into the store."""


def meet(device_type: str) -> None:
    """Initialize the process group of all ranks for this type of device."""
    own, url = ranks(), "env://"
    if by_slurm():
        place = slurm()
        url = f"tcp://{place.main_address}:{place.main_port}?rank={own.rank}&world_size={own.world}"
    store, rank, count = next(rendezvous(url))
    cuda = device_type == "cuda"
    distributed.init_process_group(
        "nccl" if cuda else "gloo",
        store=of_this_start(store, rank, count),
        rank=rank,
        world_size=count,
        timeout=default_pg_timeout,  # longer than NCCL's default: all ranks wait while rank 0 saves
        device_id=torch.device("cuda", own.local) if cuda else None,
    )


def slurm() -> SLURMEnvironment:
    """Slurm's variables as Fabric reads them: the address is the first node, and the port follows from the job."""
    try:
        return SLURMEnvironment()
    except RuntimeError:
        raise LabError("Slurm does not say how many ranks a node has: give --ntasks-per-node to sbatch") from None


def of_this_start(store: Store, rank: int, ranks: int) -> Store:
    """A part of the store that only the ranks of this start write to.

    Rank 0 writes the name of the start. Every other rank writes a random word under that name, and rank 0 repeats the
    word. The name and the words are new in every start, so a rank cannot mistake an old entry for an answer.
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
    """If a rank has ended, communication fails on all others. Report it in one line."""
    try:
        yield
    except RuntimeError as error:
        text = (str(error).splitlines() or [""])[0]
        if not isinstance(error, DistError) and "gloo" not in text.lower():
            raise
        raise LabError(
            f"another rank has ended or does not answer ({text}): run the same command again, or let torchrun do it "
            "with --max-restarts"
        ) from error
