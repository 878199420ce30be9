"""What a whole model normalizes with: ways of inference, frozen statistics, and whether any batch was skipped."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from kalmannorm._norms.grouped import GroupedNorm, Inference


def norms(model: nn.Module) -> Iterator[tuple[str, GroupedNorm]]:
    """Every norm of this library in the model, by name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, GroupedNorm))


def require_norms(model: nn.Module, caller: str) -> list[tuple[str, GroupedNorm]]:
    found = list(norms(model))
    if not found:
        raise ValueError(
            f"{caller}: {type(model).__name__} holds no norm of kalmannorm; convert it first, kalmannorm.convert("
            "model, example_input)"
        )
    return found


def named(layers: list[str]) -> str:
    """The first few, for a message."""
    return ", ".join(layers[:5]) + (", …" if len(layers) > 5 else "")


def set_inference(model: nn.Module, mode: Inference) -> None:
    """Choose what every norm of the model uses in `eval()`; all are set, or none where one cannot.

    "population": the moving averages; exactly a BatchNorm, and it folds.
    "batch": the posterior of groups of m test examples.
    "example": the posterior of a virtual group, this example among m - 1 average ones; independent of its neighbours.
    """
    found = require_norms(model, "set_inference")
    for name, norm in found:
        try:
            norm.check_inference(mode)
        except ValueError as error:
            raise ValueError(f"set_inference: layer {name or '(the model itself)'!r}: {error}") from None
    for _, norm in found:
        norm.set_inference(mode)


def freeze_statistics(model: nn.Module, frozen: bool = True) -> None:
    """Make every norm run in training as it does in `eval()`: no buffer moves, and `.train()` does not undo it.

    γ and β still learn. `frozen=False` lets the statistics move again. torch's own BatchNorm layers cannot be frozen
    so that `.train()` keeps it; a warning names them.
    """
    found = require_norms(model, "freeze_statistics")
    for _, norm in found:
        norm.frozen = frozen
    others = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if frozen and others:
        warnings.warn(
            f"freeze_statistics: {len(others)} torch BatchNorm layers are not frozen, their statistics still move in "
            f"training: {named(others)}",
            UserWarning,
            stacklevel=2,
        )


def check_statistics(model: nn.Module) -> dict[str, int]:
    """Layers that met batches with NaN or Inf statistics, and how many; such batches leave all buffers unchanged.

    Waits for the device, so ask between epochs rather than between steps.
    """
    counts = {name: norm.skipped() for name, norm in require_norms(model, "check_statistics")}
    return {name: count for name, count in counts.items() if count}
