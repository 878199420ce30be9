"""Updates the running statistics of many norms from one tensor of moments."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmannorm._groups import group_size
from kalmannorm._ops.dispatch import tracking_together_for
from kalmannorm._ops.track.averages import groups_of
from kalmannorm._ops.track.request import TrackingRequest
from kalmannorm._support.changes import Changes
from kalmannorm._wiring.weak_modules import WeakModule
from kalmannorm.moments import Moments

KEPT = 256
"""Tables that are kept, the most recently written. Tables that a CUDA graph reads are always kept."""


class Update(NamedTuple):
    """The update of one norm. Its moments begin at `start`, in four times (groups, channels)."""

    norm: WeakModule
    start: int
    groups: int
    channels: int
    values: int  # per channel of its x
    examples: int  # of its x


def track_together(
    moments: Tensor,
    norms: Sequence[WeakModule],
    key: Hashable,
    updates: Callable[[], list[Update]],
    tables: dict[Any, Any],
) -> None:
    """Update the statistics of these norms. Equal keys mean equal updates; `tables` has what was prepared for them."""
    kernels = tracking_together_for(moments)
    if kernels is None:
        with torch.no_grad():
            _track_alone(moments, updates())
        return
    key = key, Changes.count
    together = tables.get(key)
    if together is None or not together.applies([norm.module()._buffers for norm in norms]):  # type: ignore[union-attr]
        listed = updates()
        requests, starts = [_request(moments, each) for each in listed], [each.start for each in listed]
        buffers = [id(buffer) for request in requests for buffer in request.buffers()]
        if len(set(buffers)) < len(buffers):  # norms share buffers: one update follows the other
            with torch.no_grad():
                for request, start in zip(requests, starts, strict=True):
                    kernels.Together.of([request], [start]).track(moments)
            return
        together = kernels.Together.of(requests, starts)
        if together is None:  # in a capture nothing can be uploaded
            with torch.no_grad():
                for request in requests:
                    kernels.track(request)
            return
        unused = [other for other, old in tables.items() if not old.captured()]
        outdated = [other for other in unused if other[1] != Changes.count]
        for other in [*outdated, *unused[: max(len(unused) + 1 - KEPT, 0)]]:
            tables.pop(other, None)
        tables[key] = together
    with torch.no_grad():
        skipped = together.track(moments)
    for number in skipped:
        norm: Any = norms[number].module()
        norm._warn_skipped()


def _parts(moments: Tensor, update: Update) -> tuple[Moments, Moments]:
    """Posterior and observation."""
    _, start, groups, channels, *_ = update
    own = moments[start : start + 4 * groups * channels].view(4, groups, channels).detach()
    mean, var, observed_mean, observed_var = own.unbind(0)
    return Moments(mean, var), Moments(observed_mean, observed_var)


def _request(moments: Tensor, update: Update) -> TrackingRequest:
    norm: Any = update.norm.module()
    size = group_size(update.examples, norm.statistics_batch_size)
    request: TrackingRequest = norm._tracking_request(*_parts(moments, update), update.examples, size, update.values)
    return request


def _track_alone(moments: Tensor, updates: Sequence[Update]) -> None:
    """One norm after the other, in PyTorch operations, on any device."""
    for update in updates:
        norm: Any = update.norm.module()
        size = group_size(update.examples, norm.statistics_batch_size)
        posterior, observation = (groups_of(part, update.examples, size) for part in _parts(moments, update))
        norm._track(posterior, observation, update.values)
