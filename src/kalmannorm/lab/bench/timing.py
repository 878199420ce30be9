"""One call as it is timed: as it is, or captured once as a CUDA graph and replayed.

A sample repeats the call until it is long enough for the clock. A graph holds the call several times over where it is
short: a replay costs the GPU a few µs, which in a user's own graph are paid once per step and not once per norm.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from kalmannorm.lab.bench.turns import Seconds

WARMUP = 3
MOST = 1000
"""Calls of one sample: a first call that was timed too short asks for no more."""

Call = Callable[[], Sequence[Tensor]]
"""What is timed; gives what is checked."""


class Timed(Protocol):
    def results(self) -> Sequence[Tensor]:
        """What the call gives, as it is timed."""

    def seconds(self) -> Seconds:
        """Of one call, over one sample."""


def timed(
    call: Call, device: torch.device, *, graph: bool, sample: float, unrolled: int = 1, pool: Any = None
) -> Timed:
    """Ready to be timed, warm-up done. `sample`: seconds that one should last at least; `pool`: memory of graphs."""
    return Graphed(call, device, sample, unrolled, pool) if graph else Direct(call, device, sample)


class Direct:
    """The call as Python makes it; on a GPU, until the GPU is done."""

    def __init__(self, call: Call, device: torch.device, sample: float) -> None:
        self.call, self.device, self.repeats = call, device, 1
        for _ in range(WARMUP if sample else 0):
            call()
        if sample:
            self.repeats = _repeats(sample, self.seconds().clock)

    def results(self) -> Sequence[Tensor]:
        return self.call()

    def seconds(self) -> Seconds:
        self._wait()
        start, busy = time.perf_counter(), time.process_time()
        for _ in range(self.repeats):
            self.call()
        self._wait()
        clock, processor = time.perf_counter() - start, time.process_time() - busy
        return Seconds(clock / self.repeats, None if self.device.type == "cuda" else processor / self.repeats)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Graphed:
    """The call, `unrolled` times, as one CUDA graph."""

    def __init__(self, call: Call, device: torch.device, sample: float, unrolled: int = 1, pool: Any = None) -> None:
        self.device, self.unrolled, self.repeats = device, unrolled, 1
        self.call = call  # a graph reads what the call holds, and does not hold it itself
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARMUP):
                call()
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            for _ in range(unrolled):
                self.kept = call()
        event: Any = torch.cuda.Event
        self.begin, self.end = event(enable_timing=True), event(enable_timing=True)
        for _ in range(WARMUP):
            self.graph.replay()
        self.repeats = _repeats(sample, self.seconds().clock * unrolled)

    def results(self) -> Sequence[Tensor]:
        """Of a replay, which has to write every value: what was there is poisoned first."""
        for tensor in self.kept:
            tensor.fill_(math.nan)
        self.graph.replay()
        torch.cuda.synchronize(self.device)
        return self.kept

    def seconds(self) -> Seconds:
        self.begin.record()
        for _ in range(self.repeats):
            self.graph.replay()
        self.end.record()
        self.end.synchronize()
        return Seconds(self.begin.elapsed_time(self.end) / 1e3 / self.repeats / self.unrolled)


def _repeats(sample: float, once: float) -> int:
    return min(max(math.ceil(sample / max(once, 1e-9)), 1), MOST)


def count_kernels(call: Callable[[], object], device: torch.device) -> int | None:
    """Kernels, copies and fills that a call starts on the GPU; None without one."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        call()
        torch.cuda.synchronize(device)
    on_gpu = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    return sum(int(event.count) for event in profiler.key_averages() if event.device_type == on_gpu)
