"""Two or more processes that talk over loopback: run functions on all ranks and hand back what each returned."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing


def run(folder: Path, scenarios: dict[str, Callable[[int], Any]], ranks: int = 2) -> list[dict[str, Any]]:
    """Results of each rank, by scenario. The functions must be importable: top level, each called with its rank."""
    multiprocessing.spawn(_process, (folder, scenarios, ranks), nprocs=ranks)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _process(rank: int, folder: Path, scenarios: dict[str, Callable[[int], Any]], ranks: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    file, limit = f"file://{folder}/meeting", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=ranks, timeout=limit)
    results = {}
    for name, scenario in scenarios.items():
        torch.manual_seed(0)
        results[name] = scenario(rank)
        dist.barrier()  # whoever still waits in a collective is found here, by name
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()
