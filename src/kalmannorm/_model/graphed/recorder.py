"""How work on the device is recorded and replayed: as CUDA graphs.

All other files of this room use a recorder through the methods of `Recorder`, so that tests can replace it by one that
runs the same work again, on any device.
"""

from __future__ import annotations

import gc
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

Work = Callable[[], list[Tensor]]


class RefusedError(Exception):
    """A graph cannot serve the model. The text says why."""


class Recording(Protocol):
    """Recorded work. `results` are the tensors that every replay writes again."""

    results: list[Tensor]

    def replay(self) -> None: ...


class Recorder(Protocol):
    def serves(self, device: torch.device) -> bool:
        """Whether work on this device can be recorded now."""

    def pool(self) -> Any:
        """Memory that recordings may share, if only one of them is in use at a time."""

    def aside(self, device: torch.device) -> Any:
        """A context in which work is warmed up and recorded."""

    def without_waiting(self) -> Any:
        """A context that raises `RefusedError` at its end if the host waited for the device."""

    def record(self, work: Work, pool: Any) -> Recording: ...

    def stream(self) -> Any:
        """The current stream."""

    def join(self, stream: Any) -> None:
        """Make the current stream wait for another one."""

    def random_state(self, device: torch.device) -> Tensor:
        """The state of the generator that work on the device draws from."""

    def set_random_state(self, state: Tensor, device: torch.device) -> None: ...

    def host_random(self) -> HostRandom:
        """The states of all other generators."""


class HostRandom:
    """States of the generators of the host. Numbers from them would become constants of a graph."""

    def __init__(self, *, torch_too: bool) -> None:
        self.python = random.getstate()
        self.torch = torch.get_rng_state() if torch_too else None
        numpy = sys.modules.get("numpy")
        self.numpy = None if numpy is None else numpy.random.get_state()

    def restore(self) -> None:
        random.setstate(self.python)
        if self.torch is not None:
            torch.set_rng_state(self.torch)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)

    def same(self, other: HostRandom) -> bool:
        def listed(state: HostRandom) -> list[Any]:
            numbers = [] if state.numpy is None else [state.numpy[1].tolist(), *state.numpy[2:]]
            return [state.python, None if state.torch is None else state.torch.tolist(), *numbers]

        return listed(self) == listed(other)


class _Graph:
    def __init__(self, graph: torch.cuda.CUDAGraph, results: list[Tensor]) -> None:
        self.graph, self.results = graph, results

    def replay(self) -> None:
        self.graph.replay()


class CudaRecorder:
    """Records work as CUDA graphs."""

    def __init__(self) -> None:
        self.streams: dict[torch.device, torch.cuda.Stream] = {}

    def serves(self, device: torch.device) -> bool:
        current = device.type == "cuda" and device.index == torch.cuda.current_device()
        return current and not torch.cuda.is_current_stream_capturing()

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    @contextmanager
    def aside(self, device: torch.device) -> Iterator[None]:
        """One stream for warm-up and all captures of a device: the memory of a pool is reused within a stream only."""
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        here, side = torch.cuda.current_stream(device), self.streams[device]
        side.wait_stream(here)
        try:
            with torch.cuda.stream(side):
                yield
        finally:
            here.wait_stream(side)

    @contextmanager
    def without_waiting(self) -> Iterator[None]:
        """Warnings, not errors: another thread of the user may wait for the device at the same time."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                torch.cuda.set_sync_debug_mode("warn")
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)
        waited = [each for each in seen if "synchronizing CUDA operation" in str(each.message)]
        for each in seen:
            if each not in waited and "Synchronization debug mode" not in str(each.message):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        if waited:
            raise RefusedError("the host waits for the device, as `.item()` and `.cpu()` do")

    def record(self, work: Work, pool: Any) -> Recording:
        gc.collect()  # an old graph that the collector deletes during a capture would end the capture
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()
        try:
            # thread_local: other threads, such as one that pins memory, go on meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                results = work()
            except BaseException:
                _end(graph, pool)
                raise
            _end(graph, pool)
        finally:
            if collects:
                gc.enable()
        return _Graph(graph, results)

    def stream(self) -> Any:
        return torch.cuda.current_stream()

    def join(self, stream: Any) -> None:
        here = torch.cuda.current_stream()
        if here != stream:
            here.wait_stream(stream)

    def random_state(self, device: torch.device) -> Tensor:
        return torch.cuda.get_rng_state(device)

    def set_random_state(self, state: Tensor, device: torch.device) -> None:
        torch.cuda.set_rng_state(state, device)

    def host_random(self) -> HostRandom:
        return HostRandom(torch_too=True)


def _end(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End a capture, also an invalid one. torch then leaves its allocator and its generator in the state of a capture.

    A capture that succeeds puts the generator right.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        device = torch.cuda.current_device()
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        torch.cuda.synchronize()
        other = torch.cuda.CUDAGraph()
        other.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device="cuda")
        other.capture_end()
        raise
