"""Device, ranks and precision of a run, from Lightning Fabric.

Fabric provides ranks and DDP under torchrun and srun, autocast, and the gradient scaler for float16. We use nothing
else of it, so the loop in `train.py` reads like plain PyTorch. Accelerate keeps global state per process. Fabric does
not, so a comparison can build one Fabric per run, each with its own precision.
"""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

from kalmannorm.lab.machine.ranks import by_slurm, ranks
from kalmannorm.lab.recipes.fitting import checked
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.training.fabric import DDPStrategy, Fabric, LightningEnvironment
from kalmannorm.lab.training.meeting import meet, slurm

# For float64 the model and the data are float64. Fabric's own double precision would round the logits.
_PRECISION = {"float32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed", "float64": "32-true"}


def launched(recipe: Recipe, execution: Execution) -> Fabric:
    """Fabric on the device of this process, which may be one of several ranks."""
    device, count = checked(recipe, execution)
    precision: Any = _PRECISION[recipe.precision]
    if count > 1:
        here = ranks().here
        # `accumulate_statistics` keeps buffers equal on all ranks, so DDP need not broadcast them before each forward.
        strategy = DDPStrategy(broadcast_buffers=False)
        if not distributed.is_initialized():  # a group that exists already is destroyed by its creator
            atexit.register(_leave_group)
            meet(device.type)
        fabric = Fabric(
            accelerator=device.type,
            strategy=strategy,
            devices=here,
            num_nodes=count // here,
            precision=precision,
            plugins=slurm() if by_slurm() else None,
        )
    else:
        devices = 1 if device.index is None else [device.index]
        # Alone, also in a Slurm job: its variables may describe tasks that were not started.
        fabric = Fabric(accelerator=device.type, devices=devices, precision=precision, plugins=LightningEnvironment())
    fabric.launch()
    return fabric


def _leave_group() -> None:
    """Destroy the process group before the interpreter ends.

    If a gloo thread frees its last tensor after that, the process aborts, and torchrun reports the run as failed.
    """
    if distributed.is_initialized():
        gc.collect()  # a DDP model is in reference cycles and also holds the group
        distributed.destroy_process_group()


@contextmanager
def determinism(wanted: bool) -> Iterator[None]:
    """Allow only deterministic kernels inside the context, if wanted. An operation without one raises."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
