"""Compares a fused model with the unfused one: outputs and gradients on the example, in training and inference.

Both run in float64, on a copy. An untrained network on two small images amplifies rounding errors, but in float64 it
still agrees to many digits, and a real difference is visible. If a copy in float64 does not run, the model itself is
used, with a larger tolerance.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from kalmannorm._support.fused_modules import FusedForward, fuse_module, unfuse
from kalmannorm._wiring.recording.trace import arguments
from kalmannorm._wiring.recording.untouched import untouched

Programs = Sequence[tuple[str, FusedForward]]
"""Modules by name, with their new programs."""

Results = dict[str, list[Tensor | None]]

_LIMITS = {torch.float64: 1e-7, torch.float32: 2e-2, torch.float16: 1e-1, torch.bfloat16: 1e-1}
"""Tolerance relative to the largest value in a tensor. A gradient may also be noise around zero, so its error is also
compared with the largest gradient of all."""


def differing(model: nn.Module, example_input: Any, programs: Programs) -> dict[str, str]:
    """The modules whose programs give other results than their own forward, with the difference. `model` is unfused."""
    if not programs:
        return {}
    subject, given, limit, own = subject_of(model, example_input)

    def difference(chosen: Programs) -> str | None:
        try:
            for name, program in chosen:
                fuse_module(subject.get_submodule(name), program)
            place = differs(subject, given, limit, own)
            if place is not None:
                return f"if fused, its {place} would differ"
        except Exception as error:  # any error: the program contains the user's code
            return f"if fused, it would not run: {next(iter(str(error).splitlines()), type(error).__name__)}"
        finally:
            unfuse(subject)
        return None

    if difference(programs) is None:
        return {}
    found = {name: difference([(name, program)]) for name, program in programs}
    kept = [(name, program) for name, program in programs if found[name] is None]
    together = difference(kept)  # each by itself agrees, so all together should agree too
    return {name: reason for name, reason in found.items() if reason} | {name: together for name, _ in kept if together}


def differs(subject: nn.Module, given: Any, limit: float, own: dict[bool, Results]) -> str | None:
    """The results that now differ from the model's own, and the mode."""
    for training, results in own.items():
        place = _difference(results, _results(subject, given, training), limit)
        if place is not None:
            return f"{place} in {'training' if training else 'inference'}"
    return None


def subject_of(model: nn.Module, example_input: Any) -> tuple[nn.Module, Any, float, dict[bool, Results]]:
    """The model to run, its arguments, the tolerance, and its own results in each mode."""
    given = arguments(example_input)
    try:
        twin = copy.deepcopy(model).double()
        precise = tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, given)
        own = _in_both_modes(twin, precise)
        if False in own:
            return twin, precise, _LIMITS[torch.float64], own
    except Exception:  # any error: not every model can be copied
        pass
    dtype = next((t.dtype for t in model.parameters() if t.is_floating_point()), torch.float32)
    return model, given, _LIMITS.get(dtype, 1e-1), _in_both_modes(model, given)


def _in_both_modes(model: nn.Module, given: Any) -> dict[bool, Results]:
    """The results in each mode in which the model runs. A batch may be too small for training."""
    found = {}
    for training in (True, False):
        with suppress(Exception):  # any error: this is the user's model
            found[training] = _results(model, given, training)
    return found


def _results(model: nn.Module, given: Any, training: bool) -> Results:
    """Outputs and gradients of one run, with the same random numbers each time. The model stays unchanged."""
    args, kwargs = tree_map_only(Tensor, lambda t: t.detach().clone(), given)
    parameters = [p for p in model.parameters() if p.requires_grad]
    with untouched(model, training=training), torch.enable_grad():
        torch.manual_seed(0)
        out = [t for t in tree_flatten(model(*args, **kwargs))[0] if isinstance(t, Tensor)]
        learns = [t for t in out if t.requires_grad]
        weights = [torch.randn(t.shape, device="cpu").to(t) for t in learns]
        grads = torch.autograd.grad(learns, parameters, weights, allow_unused=True) if learns and parameters else []
        buffers = [buffer.detach().clone() for buffer in model.buffers()]
    return {"outputs": [t.detach() for t in out], "gradients": list(grads), "buffers": list(buffers)}


def _difference(own: Results, other: Results, limit: float) -> str | None:
    """The first tensor that differs by more than the limit."""
    for place, expected in own.items():
        if len(expected) != len(other[place]):
            return place
        scale = max((_size(t) for t in expected if t is not None), default=0.0)
        for a, b in zip(expected, other[place], strict=True):
            if a is None or b is None:
                if a is not b:
                    return place
            elif a.shape != b.shape or a.dtype != b.dtype or not _close(a, b, limit, scale):
                return place
    return None


def _size(t: Tensor) -> float:
    return float(t.abs().nan_to_num(0, 0, 0).max()) if t.numel() else 0.0


def _close(a: Tensor, b: Tensor, limit: float, scale: float) -> bool:
    tolerance = limit * _size(a) + 1e-3 * limit * scale
    return torch.equal(a, b) or torch.allclose(a.double(), b.double(), rtol=0, atol=tolerance, equal_nan=True)
