"""Where a run computes: devices, ranks and precision, from Lightning Fabric.

Fabric rather than Accelerate because it keeps no state of the process: a comparison builds one per run, each with its
own precision. It gives ranks and DDP under `torchrun`, autocast, and the scaler that float16 needs; nothing more of it
is used, so the loop in `train.py` reads as plain PyTorch.
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

from kalmannorm.lab.recipes.fitting import checked
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.training.fabric import DDPStrategy, Fabric
from kalmannorm.lab.training.meeting import meet

# float64 is plain here: the model and the data are float64, and Fabric's own double precision would round the logits.
_PRECISION = {"float32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed", "float64": "32-true"}


def launched(recipe: Recipe, execution: Execution) -> Fabric:
    """Fabric on this process's device; under `torchrun`, one of its ranks."""
    device, ranks = checked(recipe, execution)
    precision: Any = _PRECISION[recipe.precision]
    if ranks > 1:
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        # Statistics are joined by `accumulate_statistics`, so rank 0 need not send its buffers before each forward.
        strategy = DDPStrategy(broadcast_buffers=False)
        if not distributed.is_initialized():  # a group that is already there is its maker's to part
            atexit.register(_part)
            meet(device.type)
        fabric = Fabric(
            accelerator=device.type, strategy=strategy, devices=here, num_nodes=ranks // here, precision=precision
        )
    else:
        devices = 1 if device.index is None else [device.index]
        fabric = Fabric(accelerator=device.type, devices=devices, precision=precision)
    fabric.launch()
    return fabric


def _part() -> None:
    """The end of the ranks' group, while Python is still there.

    A thread of gloo's that lets go of its last tensor after the interpreter has ended aborts the process, and torchrun
    calls the whole run failed.
    """
    if distributed.is_initialized():
        gc.collect()  # a model under DDP, which lies in cycles, holds the group as well
        distributed.destroy_process_group()


@contextmanager
def determinism(wanted: bool) -> Iterator[None]:
    """Only deterministic kernels, while this lasts; an operation that has none raises."""
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
