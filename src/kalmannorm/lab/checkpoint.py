"""Checkpoints of a run: `RUN/checkpoint/step-00000120/` holds model.safetensors and resume.pt.

A checkpoint is written into a folder of another name, which is then renamed: it is there whole or not at all. The last
two are kept, so that a damaged one costs some steps, not the run. A finished run has `RUN/model.safetensors` instead.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from kalmannorm.lab.errors import LabError
from kalmannorm.lab.records import sync_folder, write_atomically

KEPT = 2


def weights(model: nn.Module) -> bytes:
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    return safetensors.torch.save(state)


def save_weights(path: Path, model: nn.Module) -> None:
    write_atomically(path, weights(model))


def load_weights(path: Path, model: nn.Module) -> None:
    try:
        state = safetensors.torch.load_file(path)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from None
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise LabError(f"{path} does not fit the model of this run: {str(error).splitlines()[-1].strip()}") from None


def save(run: Path, step: int, model: nn.Module, state: dict[str, Any]) -> None:
    """`state` is whatever `torch.load(weights_only=True)` takes: numbers, tensors, lists and dicts of them."""
    folder = run / "checkpoint" / f"step-{step:08d}"
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    try:
        save_weights(partial / "model.safetensors", model)
        write_atomically(partial / "resume.pt", buffer.getvalue())
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for old in checkpoints(run)[:-KEPT]:
        shutil.rmtree(old)


def checkpoints(run: Path) -> list[Path]:
    """The folders of the checkpoints, oldest first."""
    return sorted((run / "checkpoint").glob("step-*"))


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def load(folder: Path, model: nn.Module, names: Iterable[str]) -> dict[str, Any]:
    """Weights into the model; returns the state that was saved with them, which holds these names."""
    load_weights(folder / "model.safetensors", model)
    path = folder / "resume.pt"
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever its unpickler and zip reader raise
        raise _damaged(path, error) from None
    if not isinstance(state, dict) or not set(names) <= set(state):
        raise _damaged(path, KeyError())
    return state


def discard(run: Path) -> None:
    """Of a finished run, which needs none."""
    shutil.rmtree(run / "checkpoint", ignore_errors=True)


def _damaged(path: Path, error: Exception) -> LabError:
    others = [other for other in checkpoints(path.parents[2]) if other != path.parent] if len(path.parents) > 2 else []
    remedy = f"delete {path.parent} to go on from {others[-1].name}" if others else "delete its run and start it anew"
    reason = (str(error).splitlines() or [""])[0]
    if isinstance(error, KeyError) or " " not in reason:  # a number or a name of the unpickler's, no sentence
        reason = "it does not hold what was saved"
    return LabError(f"{path} is damaged ({reason}): {remedy}")
