"""Times training steps of several norms in turn, so that other load on the machine affects all of them.

One round is one step of each arm, and ratios are taken within a round. Figures are averages over rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from kalmannorm.lab import models
from kalmannorm.lab.experiments.planning import Cell, Plan
from kalmannorm.lab.experiments.results import averaged
from kalmannorm.lab.experiments.tables import PAPER, PAPERS_BKN, on_what
from kalmannorm.lab.files.records import Record
from kalmannorm.lab.machine.devices import resolve
from kalmannorm.lab.recipes.methods import normalized
from kalmannorm.lab.recipes.presets import FOLDER
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.training.loading import fused
from kalmannorm.lab.training.optimizer import optimizer_of

ROUNDS, WARMUP = 30, 3
IMAGES: dict[str, tuple[int, tuple[int, int, int]]] = {
    "digits": (10, (1, 8, 8)),
    "cifar10": (10, (3, 32, 32)),
    "cifar100": (100, (3, 32, 32)),
    "tiny-imagenet": (200, (3, 64, 64)),
    "imagenet": (1000, (3, 224, 224)),
}
"""Classes and shape. The images are noise, because a step takes the same time on them."""

Watch = Callable[[int, int], None]


def time_steps(plan: Plan, execution: Execution, watch: Watch | None = None) -> dict[str, list[float]]:
    """Seconds of every step, by the arm's key. `watch` gets the number of finished rounds and of all rounds."""
    device = resolve(execution.device)
    cells = list({cell.arm.key: cell for cell in plan.cells}.values())
    steps = {cell.arm.key: _step(cell, execution, device) for cell in cells}
    rounds = max(round(ROUNDS * plan.budget), 3)
    seconds: dict[str, list[float]] = {key: [] for key in steps}
    for number in range(WARMUP + rounds):
        # The arms take turns to be first, because the first one after a pause runs on a cooler machine.
        turned = list(steps)[number % len(steps) :] + list(steps)[: number % len(steps)]
        for key in turned:
            elapsed = _timed(steps[key], device)
            if number >= WARMUP:
                seconds[key].append(elapsed)
        if watch is not None:
            watch(number + 1, WARMUP + rounds)
    return seconds


def _timed(step: Callable[[], None], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    step()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _step(cell: Cell, execution: Execution, device: torch.device) -> Callable[[], None]:
    """One training step: forward, loss, backward, optimizer."""
    recipe = cell.recipe
    classes, shape = IMAGES["imagenet" if recipe.dataset.startswith(FOLDER) else recipe.dataset]
    if recipe.image_size is not None:
        shape = (shape[0], recipe.image_size, recipe.image_size)
    torch.manual_seed(recipe.seed)
    images = torch.randn(recipe.gradient_batch, *shape, device=device)
    labels = torch.randint(classes, (recipe.gradient_batch,), device=device)
    model = models.build(recipe.model, classes=classes, shape=shape, width=recipe.width).to(device)
    if recipe.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        images = images.contiguous(memory_format=torch.channels_last)
    # Batch norm over the whole batch is torch's own layer, which a user would use.
    if recipe.method != "bn" or recipe.statistics_batch != recipe.gradient_batch:
        model = normalized(model, recipe.method, images[:2], statistics_batch=recipe.statistics_batch, steps=1000)
        model = fused(model, recipe, shape) if execution.fuse else model
    optimizer = optimizer_of(model, recipe)
    run: nn.Module = torch.compile(model) if execution.compile else model  # type: ignore[assignment]
    run.train()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with _precision(recipe, device):
            loss = F.cross_entropy(run(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _precision(recipe: Recipe, device: torch.device) -> Any:
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast(device.type, kinds.get(recipe.precision), enabled=recipe.precision in kinds)


def speed_table(plan: Plan, seconds: dict[str, list[float]]) -> Record:
    """Images per second, and the speed relative to the first arm, round by round."""
    experiment = plan.experiment
    dataset = plan.datasets[0]
    first = seconds[plan.arms[0].key]
    rows = []
    for arm in plan.arms:
        taken = seconds[arm.key]
        row: list[Any] = [arm.name, arm.place]
        row += [averaged([arm.setting.gradient_batch / each for each in taken])]
        row += [experiment.paper(arm.key, "images/s", "inception", dataset)]
        row += [averaged([theirs / ours for theirs, ours in zip(first, taken, strict=True)])]
        row += [experiment.paper(arm.key, "relative", "inception", dataset)]
        rows.append(row)
    return {
        "title": f"Training steps: {on_what(plan, dataset)}",
        "columns": [
            "method",
            "setting",
            "images/s",
            PAPER,
            f"speed relative to {plan.arms[0].name}",
            PAPER,
        ],
        "rows": rows,
        "note": f"Mean and standard deviation over {len(first)} rounds of one step each, in turn; {PAPERS_BKN}.",
    }
