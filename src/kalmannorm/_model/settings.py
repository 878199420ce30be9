"""Settings of a whole model: the way of inference, frozen statistics, and whether a batch was skipped."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from kalmannorm._model.statistics_batch import StatisticsBatch, check_statistics_batch, statistics_batches
from kalmannorm._norms.grouped import GroupedNorm, Inference


def norms(model: nn.Module) -> Iterator[tuple[str, GroupedNorm]]:
    """Every norm of this library in the model, by name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, GroupedNorm))


def require_norms(model: nn.Module, caller: str) -> list[tuple[str, GroupedNorm]]:
    found = list(norms(model))
    if not found:
        raise ValueError(
            f"{caller}: {type(model).__name__} contains no norm of kalmannorm; convert it first, kalmannorm.convert("
            "model, example_input)"
        )
    return found


def named(layers: list[str]) -> str:
    """The first few names, for a message."""
    return ", ".join(layers[:5]) + (", …" if len(layers) > 5 else "")


def set_inference(model: nn.Module, mode: Inference, *, statistics_batch_size: StatisticsBatch = None) -> None:
    """Choose what every norm of the model uses in `eval()`. If one norm cannot use the mode, none is changed.

    "population": the running averages. Equals a BatchNorm and can be folded.
    "batch": the posterior of groups of m test examples.
    "example": the posterior of a virtual group of this example and m - 1 average examples. Independent of the batch.

    `statistics_batch_size` is m for "example". Use it if the model has no statistics batch because it was trained on
    small batches as they are: after training in batches of 2, give 2. It may be a dict, as in `convert`. m counts rows
    of each norm's input. The norms keep m until another m is given. Copies and pickles contain it, but state dicts do
    not. Training and "batch" do not use it. None: m that was given before, or else the statistics batch of training.
    """
    found = require_norms(model, "set_inference")
    check_statistics_batch(statistics_batch_size)
    sizes = statistics_batches(model, dict(found), statistics_batch_size)
    for name, norm in found:
        try:
            norm.check_inference(mode, sizes[name])
        except ValueError as error:
            raise ValueError(f"set_inference: layer {name or '(the model itself)'!r}: {error}") from None
    for name, norm in found:
        norm.set_inference(mode, statistics_batch_size=sizes[name])
    settled = [name for name, norm in found if norm.closes and norm.closing.settled]
    if mode != "population" and settled:
        warnings.warn(
            f"set_inference: {len(settled)} norms are at the end of a closing phase, which trained them for their "
            f"running statistics; use 'population': {named(settled)}",
            UserWarning,
            stacklevel=2,
        )


def freeze_statistics(model: nn.Module, frozen: bool = True) -> None:
    """Make every norm run in training as it does in `eval()`: no buffer is updated, and `.train()` does not undo this.

    γ and β are still trained. `frozen=False` makes the statistics update again. torch's own BatchNorm layers cannot be
    frozen in this way, and a warning names them.
    """
    found = require_norms(model, "freeze_statistics")
    for _, norm in found:
        norm.frozen = frozen
    ours = {id(norm) for _, norm in found}
    others = [n for n, module in model.named_modules() if isinstance(module, _BatchNorm) and id(module) not in ours]
    if frozen and others:
        warnings.warn(
            f"freeze_statistics: {len(others)} torch BatchNorm layers are not frozen and are still updated in "
            f"training: {named(others)}",
            UserWarning,
            stacklevel=2,
        )


def check_statistics(model: nn.Module) -> dict[str, int]:
    """Layers that had batches with NaN or Inf statistics, and how many. Such batches leave all buffers unchanged.

    The call waits for the device, so use it between epochs, not between steps.
    """
    counts = {name: norm.skipped() for name, norm in require_norms(model, "check_statistics")}
    return {name: count for name, count in counts.items() if count}
