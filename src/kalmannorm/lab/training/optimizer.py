"""Optimizer and learning rate. The rate is a function of the step alone, so a resumed run needs no saved schedule."""

from __future__ import annotations

import math

import torch
from torch import nn

from kalmannorm._model.optimization import parameter_groups
from kalmannorm.lab.recipes.recipe import Recipe

STEPS_DOWN = (0.5, 0.75)
"""Fractions of the training after which the schedule "step" divides the rate by ten."""


def optimizer_of(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The optimizer of a recipe. γ, β and the Kalman filter's parameters have no weight decay."""
    groups = parameter_groups(model, recipe.weight_decay)
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=recipe.learning_rate)
    nesterov = recipe.momentum > 0
    return torch.optim.SGD(groups, lr=recipe.learning_rate, momentum=recipe.momentum, nesterov=nesterov)


def learning_rate(recipe: Recipe, step: int, steps: int, warmup: int) -> float:
    """The learning rate at `step` (counted from 0) of `steps`: linear warm-up, then the schedule."""
    if step < warmup:
        return recipe.learning_rate * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(steps - warmup, 1)
    if recipe.schedule == "cosine":
        factor = 0.5 * (1 + math.cos(math.pi * done))
    elif recipe.schedule == "linear":
        factor = 1 - done
    elif recipe.schedule == "step":
        factor = 0.1 ** sum(done >= share for share in STEPS_DOWN)
    else:
        factor = 1.0
    return recipe.learning_rate * factor


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
