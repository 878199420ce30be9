"""Runs the norms of a model as in training, observes them, and leaves the model unchanged.

Every norm normalizes a group with the group's own posterior, as in training. Dropout and similar layers are off. No
buffer is updated and there are no gradients. `kalmannorm.recalibrate` observes in the same way, but then writes
statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kalmannorm._model.recalibrate_tallies import change
from kalmannorm._model.settings import norms
from kalmannorm._norms.grouped import GroupedNorm
from kalmannorm._norms.kalman import BatchKalmanNorm
from kalmannorm.lab.errors import LabError
from kalmannorm.moments import Moments


@dataclass(frozen=True)
class Sight:
    """What one norm saw of one batch: moments (G, C). The prior is (G, C), (1, C) or None."""

    prior: Moments | None
    observation: Moments
    posterior: Moments


Look = Callable[[str, GroupedNorm, Sight], None]


def tracking_norms(model: nn.Module) -> dict[str, GroupedNorm]:
    """Every norm of ours with running statistics, by name, in the order of the model. An error if there is none."""
    found = {name: norm for name, norm in norms(model) if norm.running_mean is not None}
    if not found:
        raise LabError(
            "this model keeps no batch statistics (group, layer and instance norm have none): analyse a run of "
            "bn, brn, bkn or bkn-learned"
        )
    return found


def observe(model: nn.Module, images: Iterable[Tensor], look: Look) -> None:
    """Run the model on each batch, and call `look` for every norm in the order in which they run."""
    found = tracking_norms(model)
    like = next(iter(model.parameters()))
    with torch.no_grad(), ExitStack() as stack:
        for module in model.modules():
            change(stack, module, training=False)
        for name, norm in found.items():
            _attach(stack, name, norm, look)
        for batch in images:
            model(batch.to(like.device, like.dtype))


def _attach(stack: ExitStack, name: str, norm: GroupedNorm, look: Look) -> None:
    normalize = norm._normalize

    def normalize_and_show(
        x: Tensor, prior: Moments | None, gain: Tensor | None, *after: Any
    ) -> tuple[Tensor, Moments, Moments]:
        y, posterior, observation = normalize(x, prior, gain, *after)
        look(name, norm, Sight(prior, observation, posterior))
        return y, posterior, observation

    def leave_buffers(*_: Any) -> None:
        """Replaces the norm's own tracking."""

    change(stack, norm, training=True, frozen=False, _track=leave_buffers, _normalize=normalize_and_show)
    if norm.process_group is not None:
        change(stack, norm, process_group=None)
    if isinstance(norm, BatchKalmanNorm):
        stack.callback(norm.release)
