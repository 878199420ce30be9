"""Checkpoints of a run: `RUN/checkpoint/step-00000120/` holds model.safetensors, resume.pt and their manifest.json.

A checkpoint is written into a folder of another name, which is then renamed: it is there whole or not at all. The last
two are kept: where one is damaged the run goes on from the one before it, and says so. A finished run has
`RUN/model.safetensors` instead.
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
OTHER = "delete its folder, so that the checkpoint before it is used"

Found = TypeVar("Found")


def weights(model: nn.Module) -> bytes:
    """Of safetensors, which would lose the versions of the modules: they are kept beside the format."""
    state = model.state_dict()
    about = {"format": FORMAT, "modules": getattr(state, "_metadata", {})}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    return safetensors.torch.save(tensors, {"format": "pt", "kalmannorm": json.dumps(about)})


def load_weights(path: Path, model: nn.Module, remedy: str = OTHER) -> None:
    """`remedy` is what to do where they are damaged."""
    content = manifest.verified(path.parent, path.name, remedy)
    try:
        state = OrderedDict(safetensors.torch.load(content))
        about = dict(json.loads(_metadata(content).get("kalmannorm", "{}")))
    except Exception as error:  # of safetensors, or of torch where it makes tensors of what was read
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
    """`state` is whatever `torch.load(weights_only=True)` takes: numbers, tensors, lists and dicts of them."""
    folder = run / "checkpoint" / f"step-{step:08d}"
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)
    try:
        write_protected(partial, {"model.safetensors": weights(model), "resume.pt": buffer.getvalue()})
        shutil.rmtree(folder, ignore_errors=True)
        folder.unlink(missing_ok=True)  # a file of that name, which nobody here wrote
        os.replace(partial, folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    # Those ahead of this step were damaged, or this run would have gone on from them.
    ahead = [other for other in checkpoints(run) if step_of(other) > step]
    for old in ahead + [other for other in checkpoints(run) if other not in ahead][:-KEPT]:
        shutil.rmtree(old)


def checkpoints(run: Path) -> list[Path]:
    """The folders of the checkpoints, oldest first; whatever else lies there is not ours."""
    found = (run / "checkpoint").glob("step-*")
    return sorted((path for path in found if re.fullmatch(r"step-\d{8,}", path.name) and path.is_dir()), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def newest(run: Path, load: Callable[[Path], Found]) -> Found | None:
    """What `load` makes of the newest checkpoint that is not damaged; None where a run has no checkpoint.

    `load` raises a `DamagedError` for one that is. Where all are damaged there is nothing to go on from.
    """
    problems: list[str] = []
    for folder in reversed(checkpoints(run)):
        try:
            found = load(folder)
        except DamagedError as error:
            problems.append(error.problem)
            continue
        for problem in problems:
            tell(f"{problem}: going on from {folder.name}")
        return found
    if problems:
        raise LabError(
            f"{'; '.join(problems)}; no checkpoint is left: delete {run / 'checkpoint'} to train from the start with: "
            f"kalmannorm train --resume {run}"
        )
    return None


def read_state(folder: Path) -> dict[str, Any]:
    """What was saved beside the weights, in the present format."""
    path = folder / "resume.pt"
    content = manifest.verified(folder, path.name, OTHER)
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception:  # torch raises whatever its unpickler and zip reader raise, with hints that are not for here
        raise DamagedError(path, "it is no file of numbers and tensors", OTHER) from None
    if not isinstance(state, dict):
        raise DamagedError(path, f"it holds a {type(state).__name__}, and no state of a run", OTHER)
    return upgraded(state, path, (_state_from_format_0,))


def _state_from_format_0(state: dict[str, Any]) -> dict[str, Any]:
    """The log was known by its size alone."""
    return {**state, "log": {"bytes": state.get("log_offset"), "sha256": None}}


def discard(run: Path) -> None:
    """Of a finished run, which needs none."""
    shutil.rmtree(run / "checkpoint", ignore_errors=True)
