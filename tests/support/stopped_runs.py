"""Runs that crash on the way, as a run does whose process is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.training.train import train


class CrashError(Exception):
    """What ends the run; nothing in the lab handles it."""


def train_until(step: int, recipe: Recipe, folder: Path, execution: Execution, *, resume: bool = False) -> Path:
    """Train until the log reaches this step, and crash there. The log must have an event at it."""

    def crash(event):
        if event.get("step") == step:
            raise CrashError

    with pytest.raises(CrashError):
        train(recipe, folder, execution, resume=resume, watch=crash)
    return folder
