"""The ranks of a run: processes that torchrun or Slurm's srun has started, on one machine or on several."""

from __future__ import annotations

import os
from typing import NamedTuple


class Ranks(NamedTuple):
    """This process is number `rank` of `world`, and number `local` of the `here` processes on its machine."""

    rank: int = 0
    world: int = 1
    local: int = 0
    here: int = 1


def ranks() -> Ranks:
    """The place of this process. A process without a launcher is the only rank."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return Ranks(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))
    if by_slurm():
        rank, count, local, nodes = (
            int(os.environ[f"SLURM_{name}"]) for name in ("PROCID", "NTASKS", "LOCALID", "NNODES")
        )
        return Ranks(rank, count, local, count // nodes)
    return Ranks()


def by_slurm() -> bool:
    """Whether srun has started this process as one of several.

    A batch script has the same variables, except for the step. A command that it starts without srun is alone.
    """
    step = "SLURM_STEP_ID" in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1
    return step and "TORCHELASTIC_RUN_ID" not in os.environ


def be_alone() -> None:
    """Forget the launcher of this process, because what it runs is not one of several ranks."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_"))]:
        del os.environ[name]
