"""Validates the training state in a checkpoint: step, averages, optimizer, log.

A file with a right digest, or without one, may still have wrong contents, if a person or another program wrote it.
torch would accept some of them silently, and fail on others only in the next step. They are refused here.
"""

from __future__ import annotations

import math
import reprlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kalmannorm.lab.errors import DamagedError, first_line
from kalmannorm.lab.files import manifest
from kalmannorm.lab.files.checkpoint import OTHER, read_state, step_of
from kalmannorm.lab.recipes.recipe import Recipe

AVERAGES = ("loss", "accuracy")
KEEPS = {"sgd": {"momentum_buffer"}, "adamw": {"step", "exp_avg", "exp_avg_sq"}}
"""State that an optimizer keeps for every parameter that had a gradient."""


def resumable(
    folder: Path, recipe: Recipe, steps: int, optimizer: torch.optim.Optimizer, precision: Any
) -> dict[str, Any]:
    """Read and validate the state in a checkpoint's folder, and load it into the optimizer and Fabric's precision.

    A log that lost events before the checkpoint counts as damage, too. Otherwise the log would have a gap. The
    checkpoint before needs less of the log.
    """
    state, path = read_state(folder), folder / "resume.pt"
    try:
        _check_numbers(state, step_of(folder), steps)
        _check_optimizer(state["optimizer"], recipe, optimizer)
        optimizer.load_state_dict(state["optimizer"])
        precision.load_state_dict(state["precision"])
    except KeyError as error:
        raise DamagedError(path, f"it holds no {error.args[0]!r}", OTHER) from None
    except (ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise DamagedError(path, first_line(error), OTHER) from None
    log = folder.parent.parent / "log.jsonl"
    try:
        difference = manifest.differs(log.read_bytes()[: state["log"]["bytes"]], state["log"])
    except OSError as error:
        raise DamagedError(log, error.strerror or str(error), OTHER) from error
    if difference:
        raise DamagedError(log, f"{difference} before {folder.name}", OTHER)
    return state


def _check_numbers(state: dict[str, Any], step: int, steps: int) -> None:
    if type(state["step"]) is not int or state["step"] != step or not 0 < step <= steps:
        raise ValueError(f"its step cannot be {reprlib.repr(state['step'])}: it is number {step} of {steps}")
    seconds, logged, speeds, log = (state[name] for name in ("seconds", "logged", "speeds", "log"))
    if not _number(seconds):
        raise ValueError(f"its seconds cannot be {reprlib.repr(seconds)}")
    if not isinstance(logged, list) or len(logged) != 2 or not all(map(_number, logged)) or logged[0] > step:
        raise ValueError(f"its last event cannot be at {reprlib.repr(logged)}")
    if not isinstance(speeds, list) or not all(map(_number, speeds)):
        raise ValueError("its speeds are not a list of numbers")
    if type(log["bytes"]) is not int or log["bytes"] < 0 or not isinstance(log["sha256"], (str, type(None))):
        raise ValueError(f"its log cannot be {reprlib.repr(log)}")
    for name in AVERAGES:
        sums = state["averages"][name]
        if (
            not isinstance(sums, Tensor) or sums.dim() not in (1, 2) or sums.shape[-1] != 2
        ):  # (2,) for all ranks together, (R, 2) for each
            raise ValueError(f"its average {name} is not a sum and a count")
    if not isinstance(state["precision"], dict):
        raise ValueError(f"its precision cannot be {reprlib.repr(state['precision'])}")


def _number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _check_optimizer(saved: Any, recipe: Recipe, optimizer: torch.optim.Optimizer) -> None:
    """torch itself checks only the numbers of groups and parameters."""
    groups, kept = saved["param_groups"], saved["state"]
    parameters: dict[int, Tensor] = {}
    for old, own in zip(groups, optimizer.param_groups, strict=True):
        parameters |= dict(zip(old["params"], own["params"], strict=True))
        for name in old.keys() & own.keys() - {"params"}:
            same = _number(old[name]) if name == "lr" else old[name] == own[name]
            if not same:
                raise ValueError(f"its optimizer's {name} cannot be {reprlib.repr(old[name])}")
    names = KEEPS[recipe.optimizer] if recipe.optimizer == "adamw" or recipe.momentum else set()
    if names and not kept:
        raise ValueError("its optimizer's state is missing")
    for index, values in kept.items():
        shape = parameters[index].shape
        for name in names:
            value = values[name]
            if name != "step" and isinstance(value, Tensor) and value.dim() == 0 and shape == (1,):
                value = values[name] = value.reshape(1)  # of a gain of version 100 of the norms, which was a number
            if not isinstance(value, Tensor) or value.shape != (torch.Size() if name == "step" else shape):
                raise ValueError(f"its optimizer's {name} does not fit a parameter of shape {tuple(shape)}")
