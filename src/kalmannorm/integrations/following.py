"""What the callbacks of all trainers do: convert in time, lead through the closing phase, recalibrate before an
evaluation, and collect figures to log.

Conversion adds parameters, so it must come before the optimizer is built. It is done in place, because the trainer
holds the model already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from kalmannorm._model.closing import ClosingPhase, check_shares
from kalmannorm._model.convert import convert, rewire
from kalmannorm._model.norm_layer import KalmanNorm
from kalmannorm._model.optimization import gains
from kalmannorm._model.recalibrate import Forward, recalibrate, to_device
from kalmannorm._norms.grouped import GroupedNorm
from kalmannorm._support.checks import positive_int
from kalmannorm.integrations.variance_gaps import VarianceGaps

Data = Iterable[Any] | Callable[[], Iterable[Any]]
Closing = tuple[float, float] | Mapping[str, float]
"""The shares of training at which the closing phase begins and reaches its full strength, or options of
`ClosingPhase`."""
OPTIONS = "start", "end", "top", "momentum", "fade_prior", "present"


def _options_of(closing: Closing) -> dict[str, Any]:
    """The options of the phase. Other mistakes in them are found when it begins."""
    if isinstance(closing, Mapping):
        unknown = [name for name in closing if name not in OPTIONS]
        if unknown:
            raise ValueError(f"closing has no option {unknown[0]!r}; it takes {', '.join(OPTIONS)}")
        check_shares(**{name: closing[name] for name in ("start", "end") if name in closing})
        return dict(closing)
    if len(closing) != 2 or not 0 <= closing[0] <= closing[1] <= 1:
        raise ValueError(f"closing must be two shares of the training, such as (0.3, 0.6), got {closing!r}")
    return {"start": closing[0], "end": closing[1]}


class Following:
    """The settings and the state of one callback."""

    def __init__(
        self,
        example_input: Any,
        recalibrate_on: Data | None,
        recalibrate_batches: int | None,
        forward: Forward | None,
        per_layer: bool,
        closing: Closing | None,
        options: dict[str, Any],
    ) -> None:
        if "inplace" in options:
            raise TypeError("inplace: the callback always converts in place, because the trainer holds the model")
        if recalibrate_batches is not None:
            recalibrate_batches = positive_int("recalibrate_batches", recalibrate_batches)
        self.example_input, self.options = example_input, options
        self.data, self.batches, self.forward = recalibrate_on, recalibrate_batches, forward
        self.per_layer, self.gaps = per_layer, VarianceGaps()
        self.closing = None if closing is None else _options_of(closing)
        self.phase: ClosingPhase | None = None

    def prepare(self, model: nn.Module, example_input: Any) -> None:
        """Convert a model with batch norms, or wire one that was built with `norm_layer`. Others stay as they are."""
        norms = [module for module in model.modules() if isinstance(module, GroupedNorm)]
        waiting = any(isinstance(norm, KalmanNorm) for norm in norms)
        if norms and not waiting:
            return
        tensor = next(model.parameters(), torch.empty(0))
        example_input = to_device(example_input, tensor.device)
        if waiting:
            rewire(model, example_input)
        else:
            convert(model, example_input, inplace=True, **self.options)

    def begin(self, model: nn.Module, steps: float, done: int, scaler: Any = None) -> None:
        """Before training: `steps` optimizer steps in all, of which `done` are behind a checkpoint."""
        if self.closing is None:
            return
        if not math.isfinite(steps):
            raise ValueError("KalmanCallback: closing needs a training with a known number of steps, got none")
        self.phase = ClosingPhase(model, int(steps), scaler=scaler, **self.closing)
        self.phase.load_state_dict({"done": done})

    def stepped(self, done: int) -> None:
        """After a batch: the optimizer has made `done` steps in all."""
        if self.phase is not None and done > self.phase.done:
            self.phase.step()

    def finish(self) -> None:
        """After training: the model needs no state of the closing phase any more."""
        if self.phase is not None and self.phase.done >= self.phase.steps:
            self.phase.remove()

    def recalibrate(self, model: nn.Module) -> None:
        """Recalibrate on the data that were given. The random numbers of training stay the same."""
        if self.data is None:
            return
        devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
        with torch.random.fork_rng(devices):
            data = self.data() if callable(self.data) else self.data
            recalibrate(model, data, max_batches=self.batches, forward=self.forward, progress=False)

    def figures(self, model: nn.Module) -> dict[str, float]:
        """Averages over all norms, then the figures of each norm where they were asked for."""
        kinds = {"gain": gains(model), "variance_gap": self.gaps.last()}
        means = {f"kalman/{kind}": sum(found.values()) / len(found) for kind, found in kinds.items() if found}
        if not self.per_layer:
            return means
        return means | {f"kalman/{kind}/{name}": n for kind, found in kinds.items() for name, n in found.items()}
