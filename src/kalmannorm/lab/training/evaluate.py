"""Test accuracy and loss in each inference mode, and with recalibrated population statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from kalmannorm._model.recalibrate import recalibrate
from kalmannorm._model.settings import norms
from kalmannorm.lab.data.protocol import Data
from kalmannorm.lab.errors import LabError
from kalmannorm.lab.recipes.methods import method
from kalmannorm.lab.recipes.recipe import Recipe
from kalmannorm.lab.recipes.setting import MOST_EXAMPLES

Scores = dict[str, dict[str, float]]


def evaluation_batch(recipe: Recipe, limit: int | None = None) -> int:
    """Test examples per batch: a multiple of the statistics batch, about as many as in training."""
    m = recipe.statistics_batch
    most = min(max(recipe.gradient_batch, 256), limit or 1024)
    return max(most // m, 1) * m


def evaluate(
    model: nn.Module,
    data: Data,
    recipe: Recipe,
    *,
    modes: Sequence[str] | None = None,
    batch: int | None = None,
    rank: int = 0,
    ranks: int = 1,
    wrapped: Callable[[Tensor], Tensor] | None = None,
) -> Scores:
    """{mode: {"accuracy": %, "loss": …, "top5": % if there are more than 20 classes}} over all ranks.

    Afterwards the model has the training flag and the inference modes that it had before. `wrapped` replaces the call
    of the model, for example by DDP. Without it the model runs in the precision of the recipe. `batch` inference has
    groups of m test examples and skips the last test_size % m examples.
    """
    if batch is not None and (not 1 <= batch <= MOST_EXAMPLES or batch % recipe.statistics_batch):
        raise LabError(
            f"--batch {batch} must be a positive multiple of the statistics batch {recipe.statistics_batch}, "
            f"at most {MOST_EXAMPLES:,}"
        )
    forward = wrapped or in_precision(model, recipe)
    chosen = list(modes or method(recipe.method).modes)
    unknown = [mode for mode in chosen if mode not in method(recipe.method).modes]
    if unknown:
        raise LabError(
            f"{method(recipe.method).title} has no {unknown[0]} inference; it has "
            f"{', '.join(method(recipe.method).modes)}"
        )
    training, before = model.training, [(norm, norm.inference) for _, norm in norms(model)]
    model.eval()
    try:
        return {mode: _scores(model, forward, mode, data, recipe, batch, rank, ranks) for mode in chosen}
    finally:
        model.train(training)
        for norm, mode in before:
            norm.set_inference(mode)


@torch.no_grad()
def _scores(
    model: nn.Module,
    forward: Callable[[Tensor], Tensor],
    mode: str,
    data: Data,
    recipe: Recipe,
    batch: int | None,
    rank: int,
    ranks: int,
) -> dict[str, float]:
    for _, norm in norms(model):  # without the warning of `set_inference`: every mode is scored
        norm.set_inference(mode)  # type: ignore[arg-type]
    first = next(model.parameters())
    options: dict[str, Any] = {"num_classes": data.classes, "average": "micro", "validate_args": False}
    metrics: dict[str, Metric] = {"accuracy": MulticlassAccuracy(**options)}
    if data.classes > 20:
        metrics["top5"] = MulticlassAccuracy(top_k=5, **options)
    total, count = SumMetric("disable"), SumMetric("disable")  # keeps a NaN
    for metric in (*metrics.values(), total, count):
        metric.to(first.device)
    for images, labels in data.test_batches(batch or evaluation_batch(recipe), rank=rank, ranks=ranks):
        ragged = len(images) % recipe.statistics_batch
        if mode == "batch" and ragged and data.test_size > recipe.statistics_batch:
            images, labels = images[:-ragged], labels[:-ragged]  # an incomplete group
            if not len(images):
                continue
        logits = forward(prepared(images, recipe))
        total.update(F.cross_entropy(logits, labels, reduction="sum"))
        count.update(len(labels))
        for metric in metrics.values():
            metric.update(logits.float(), labels)
    found = {name: round(100 * float(metric.compute()), 4) for name, metric in metrics.items()}
    return {"accuracy": found.pop("accuracy"), "loss": float(total.compute() / count.compute()), **found}


def prepared(images: Tensor, recipe: Recipe) -> Tensor:
    """The images in the dtype and memory format of the recipe."""
    if recipe.precision == "float64":
        images = images.double()
    return images.contiguous(memory_format=torch.channels_last) if recipe.channels_last else images


def in_precision(model: nn.Module, recipe: Recipe) -> Callable[[Tensor], Tensor]:
    """The model, under autocast if the recipe has mixed precision."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(recipe.precision)

    def forward(images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, dtype, enabled=dtype is not None):
            found: Tensor = model(images)
        return found.float() if dtype is not None else found

    return forward


def recalibrated(model: nn.Module, data: Data, recipe: Recipe, *, max_batches: int | None = None) -> nn.Module:
    """A copy of the model with population statistics of the whole training set, without augmentation."""
    if not any(True for _ in norms(model)):
        raise LabError(f"{method(recipe.method).title} has no population statistics to recalibrate")
    model = copy.deepcopy(model)
    loader = (prepared(images, recipe) for images, _ in data.plain_batches(evaluation_batch(recipe)))
    recalibrate(model, loader, max_batches=max_batches, progress=False)
    return model
