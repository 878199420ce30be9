"""Updates of running statistics that wait for the end of a forward, so that many norms need few launches.

A waiting update consists of the rows that a norm observed and the buffers to change. If a norm runs again in the same
forward, as in a loop, its first update is made before. In all other cases the delay has no effect inside the forward:
only a norm in a closing phase reads its own statistics in training, and it has its waiting update made first.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmannorm._ops.dispatch import on_device_of
from kalmannorm._ops.track.request import TrackingRequest

MOST = 32
"""Updates that are made together. Their rows, four times (G, C), are concatenated."""


class _Waiting(NamedTuple):
    request: TrackingRequest
    stream: torch.cuda.Stream | None  # the stream that writes its rows


class PostponedTracking:
    """The waiting updates of one thread. `tables` belong to the kernels and are kept between forwards."""

    def __init__(self) -> None:
        self.waiting: dict[tuple[ModuleType, torch.device], dict[int, _Waiting]] = {}
        self.streams: dict[tuple[int | None, int], torch.cuda.Stream] = {}

    def add(self, request: TrackingRequest, kernels: ModuleType, tables: dict[Any, Any]) -> None:
        device, buffer = request.posterior.mean.device, request.running[0].data_ptr()
        waiting = self.waiting.setdefault((kernels, device), {})
        if buffer in waiting or len(waiting) == MOST:
            self.run(tables)
            waiting = self.waiting.setdefault((kernels, device), {})
        waiting[buffer] = _Waiting(request, self._stream(device))

    def run_before_reading(self, buffer: Tensor | None, tables: dict[Any, Any]) -> None:
        """If an update of this buffer waits, make the updates."""
        if buffer is not None and any(buffer.data_ptr() in waiting for waiting in self.waiting.values()):
            self.run(tables)

    def run(self, tables: dict[Any, Any]) -> None:
        """Make all waiting updates."""
        everything, self.waiting = self.waiting, {}
        for (kernels, device), waiting in everything.items():
            requests = [each.request for each in waiting.values()]
            with torch.no_grad(), on_device_of(requests[0].posterior.mean):
                here = self._stream(device)
                for each in waiting.values():
                    if each.stream is not here:
                        _join(each, here)
                kernels.track_many(requests, tables)

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """The current stream. Equal streams are one object, so that no object is created per norm."""
        if device.type != "cuda":
            return None
        key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
        if key not in self.streams:
            self.streams[key] = torch.cuda.current_stream(device)
        return self.streams[key]


def _join(waiting: _Waiting, here: torch.cuda.Stream | None) -> None:
    """Branches of a model may run on other streams.

    Make this stream wait for them, and keep the memory until it has read.
    """
    if waiting.stream is not None and here is not None:
        here.wait_stream(waiting.stream)
        for rows in waiting.request.rows():
            rows.record_stream(here)
