"""Checks whether a recipe can run on this machine. Not in `training.device`, because that imports Lightning Fabric."""

from __future__ import annotations

import torch

from kalmannorm.lab.errors import LabError
from kalmannorm.lab.machine.devices import resolve
from kalmannorm.lab.machine.ranks import ranks as launched_ranks
from kalmannorm.lab.recipes.recipe import Execution, Recipe


def checked(recipe: Recipe, execution: Execution) -> tuple[torch.device, int]:
    """Return the device and the number of ranks, or raise if this recipe cannot run on them."""
    ranks = launched_ranks().world
    if recipe.gradient_batch % ranks or (recipe.gradient_batch // ranks) % recipe.statistics_batch:
        raise LabError(
            f"setting {recipe.setting} does not split over {ranks} ranks: each needs whole groups of "
            f"{recipe.statistics_batch}; start fewer ranks"
        )
    device = resolve(execution.device)
    if recipe.precision == "fp16" and device.type == "cpu":
        raise LabError("--precision fp16 needs a GPU: give --precision bf16 on a CPU")
    if execution.cuda_graph and (ranks > 1 or device.type != "cuda" or recipe.precision == "fp16"):
        raise LabError("--cuda-graph needs one GPU, one rank and a precision other than fp16")
    if execution.micro_batch is not None and execution.micro_batch % recipe.statistics_batch:
        raise LabError(
            f"--micro-batch {execution.micro_batch} must be a multiple of the statistics batch "
            f"{recipe.statistics_batch}"
        )
    return device, ranks
