"""The normalizers that the lab compares. Each converts a plain BatchNorm model with `kalmannorm.convert`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from kalmannorm._model.convert import convert
from kalmannorm._norms.grouped import INFERENCE_MODES
from kalmannorm.lab.errors import one_of


@dataclass(frozen=True)
class Method:
    """A normalizer. `to` and `options` are arguments of `kalmannorm.convert`; `modes` are its inference modes."""

    title: str
    words: str
    """A description in one sentence."""
    to: str
    options: Mapping[str, Any] = field(default_factory=dict)
    modes: tuple[str, ...] = INFERENCE_MODES
    groups: bool = True
    """Whether it normalizes groups, so that the statistics batch matters."""

    def takes(self, name: str) -> bool:
        """Whether this recipe field has an effect on it."""
        closes = self.to in ("kalman", "ghost")
        taken = {"gain": self.to == "kalman", "finish_epochs": self.groups, "fade_prior": self.to == "kalman"}
        taken["statistics_momentum"] = self.to in ("kalman", "ghost", "renorm")
        return (taken | dict.fromkeys(("closing_start", "closing_end", "closing_present"), closes)).get(name, True)


METHODS: dict[str, Method] = {
    "bn": Method("BN", "Batch norm: each group is normalized by its own statistics.", "ghost"),
    "bn-ws": Method(
        "BN + WS",
        "Batch norm, and convolutions with standardized weights.",
        "ghost",
        {"weight_standardization": True},
    ),
    "brn": Method(
        "BRN",
        "Batch Renorm: batch norm, corrected towards its moving averages.",
        "renorm",
        modes=("population", "batch"),
    ),
    "mabn": Method(
        "MABN",
        "Moving Average Batch Norm: statistics are averages over the last groups, in both directions; centred weights.",
        "moving-average",
        modes=("population",),
    ),
    "on": Method(
        "ON",
        "Online Normalization: each image by the images before it, with error feedback in the backward.",
        "online",
        modes=("population",),
        groups=False,
    ),
    "gn": Method(
        "GN", "Group norm: each image by itself, in groups of channels.", "group", modes=("population",), groups=False
    ),
    "gn-ws": Method(
        "GN + WS",
        "Group norm, and convolutions with standardized weights.",
        "group",
        {"weight_standardization": True},
        modes=("population",),
        groups=False,
    ),
    "ln": Method(
        "LN", "Layer norm: each image by itself, all channels together.", "layer", modes=("population",), groups=False
    ),
    "in": Method(
        "IN", "Instance norm: each channel of each image by itself.", "instance", modes=("population",), groups=False
    ),
    "bkn": Method(
        "BKN",
        "Batch Kalman norm: statistics are predicted from the layer before, through the weights between, and corrected "
        "by the group's own.",
        "kalman",
        {"transition": "weights"},
    ),
    "bkn-ws": Method(
        "BKN + WS",
        "Batch Kalman norm, and convolutions with standardized weights.",
        "kalman",
        {"transition": "weights", "weight_standardization": True},
    ),
    "bkn-learned": Method(
        "BKN learned",
        "The paper's Batch Kalman norm: how one layer predicts the next is learned.",
        "kalman",
        {"transition": "learned"},
    ),
}


def method(name: str) -> Method:
    return METHODS[one_of("method", name, METHODS)]


def normalized(
    model: nn.Module,
    name: str,
    example: Tensor,
    *,
    statistics_batch: int,
    steps: int,
    gain: float | None = None,
    momentum: float | None = None,
) -> nn.Module:
    """Convert a model in place, for a training of `steps` steps.

    `gain` is the initial q, `momentum` that of the running statistics. None: the method's default.

    Batch Renorm uses the schedule of its paper, scaled from 160,000 steps to `steps`.
    """
    chosen = method(name)
    options = dict(chosen.options)
    if chosen.groups:
        options["statistics_batch_size"] = statistics_batch
    if chosen.takes("gain") and gain is not None:
        options["gain"] = gain
    if chosen.takes("statistics_momentum") and momentum is not None:
        options["momentum"] = momentum
    if chosen.to == "renorm":
        options.update(warmup_steps=steps // 32, r_steps=steps // 4, d_steps=5 * steps // 32)
    return convert(model, example, to=chosen.to, inplace=True, **options)  # type: ignore[arg-type]
