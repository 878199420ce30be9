"""Checkpoints of a run: `RUN/checkpoint/step-00000120/` holds model.safetensors, resume.pt and their manifest.json.

A checkpoint is written to a temporary folder, which is then renamed. So a checkpoint is complete or absent. The last
two are kept. If the last one is damaged, the run resumes from the one before it and prints a line about it. A finished
run has `RUN/model.safetensors` instead.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from torch import nn

from kalmannorm.lab.errors import DamagedError, LabError, first_line, tell
from kalmannorm.lab.files import manifest
from kalmannorm.lab.files.formats import FORMAT, upgraded
from kalmannorm.lab.files.records import sync_folder, write_protected

KEPT = 2
OTHER = "delete its folder, to use the checkpoint before it"

Found = TypeVar("Found")


def weights(model: nn.Module) -> bytes:
    """The weights as a safetensors file. Its metadata holds the format and the versions of the modules."""
    state = model.state_dict()
    about = {"format": FORMAT, "modules": getattr(state, "_metadata", {})}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    return safetensors.torch.save(tensors, {"format": "pt", "kalmannorm": json.dumps(about)})


def load_weights(path: Path, model: nn.Module, remedy: str = OTHER) -> None:
    """Load weights into the model. An error about damage ends with `remedy`."""
    content = manifest.verified(path.parent, path.name, remedy)
    try:
        state = OrderedDict(safetensors.torch.load(content))
        about = dict(json.loads(_metadata(content).get("kalmannorm", "{}")))
    except Exception as error:  # safetensors and torch raise many kinds
        raise DamagedError(path, first_line(error), remedy) from None
    state._metadata = upgraded(about, path, (_weights_from_format_0,))["modules"]  # type: ignore[attr-defined]
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise DamagedError(path, f"it does not fit the model of this run: {reason}", remedy) from None


def _metadata(content: bytes) -> dict[str, str]:
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    found: dict[str, str] = header.get("__metadata__", {})
    return found


def _weights_from_format_0(about: dict[str, Any]) -> dict[str, Any]:
    return {**about, "modules": {}}


def save(run: Path, step: int, model: nn.Module, state: dict[str, Any]) -> None:
    """Write a checkpoint. `torch.load(weights_only=True)` must be able to read `state`."""
    folder = run / "checkpoint" / f"step-{step:08d}"
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)
    try:
        write_protected(partial, {"model.safetensors": weights(model), "resume.pt": buffer.getvalue()})
        shutil.rmtree(folder, ignore_errors=True)
        folder.unlink(missing_ok=True)  # a stray file of that name
        os.replace(partial, folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    # Checkpoints ahead of this step are damaged: otherwise the run would have resumed from them.
    ahead = [other for other in checkpoints(run) if step_of(other) > step]
    for old in ahead + [other for other in checkpoints(run) if other not in ahead][:-KEPT]:
        shutil.rmtree(old)


def checkpoints(run: Path) -> list[Path]:
    """The folders of the checkpoints, oldest first. Other files and folders are ignored."""
    found = (run / "checkpoint").glob("step-*")
    return sorted((path for path in found if re.fullmatch(r"step-\d{8,}", path.name) and path.is_dir()), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def newest(run: Path, load: Callable[[Path], Found]) -> Found | None:
    """The result of `load` for the newest checkpoint that is not damaged; None if the run has no checkpoint.

    `load` raises a `DamagedError` for a damaged checkpoint. If all are damaged, this function raises.
    """
    problems: list[str] = []
    for folder in reversed(checkpoints(run)):
        try:
            found = load(folder)
        except DamagedError as error:
            problems.append(error.problem)
            continue
        for problem in problems:
            tell(f"{problem}: using {folder.name} instead")
        return found
    if problems:
        raise LabError(
            f"{'; '.join(problems)}; no checkpoint is left: delete {run / 'checkpoint'} to train from the start with: "
            f"kalmannorm train --resume {run}"
        )
    return None


def read_state(folder: Path) -> dict[str, Any]:
    """The training state that was saved with the weights, in the current format."""
    path = folder / "resume.pt"
    content = manifest.verified(folder, path.name, OTHER)
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception:  # torch raises many kinds, with hints that do not apply here
        raise DamagedError(path, "it is not a file of numbers and tensors", OTHER) from None
    if not isinstance(state, dict):
        raise DamagedError(path, f"it holds a {type(state).__name__} instead of the state of a run", OTHER)
    return upgraded(state, path, (_state_from_format_0,))


def _state_from_format_0(state: dict[str, Any]) -> dict[str, Any]:
    """Format 0 recorded only the size of the log."""
    return {**state, "log": {"bytes": state.get("log_offset"), "sha256": None}}


def discard(run: Path) -> None:
    """Delete the checkpoints of a finished run."""
    shutil.rmtree(run / "checkpoint", ignore_errors=True)
