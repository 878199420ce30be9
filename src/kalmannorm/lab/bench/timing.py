"""One timed call: direct, or captured once as a CUDA graph and replayed.

A sample repeats the call until it is long enough for the clock. If the call is short, a graph contains it several
times. A replay costs the GPU a few µs. In a user's own graph that cost occurs once per step, not once per norm.
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
"""The most calls of one sample, in case the first call was timed too short."""

Call = Callable[[], Sequence[Tensor]]
"""The call to time. It returns the tensors to check."""


class Timed(Protocol):
    def results(self) -> Sequence[Tensor]:
        """The results of the call, in the form in which it is timed."""

    def seconds(self) -> Seconds:
        """Seconds of one call, averaged over one sample."""


def timed(
    call: Call,
    device: torch.device,
    *,
    graph: bool,
    sample: float,
    unrolled: int = 1,
    pool: Any = None,
    after: Callable[[], None] = lambda: None,
) -> Timed:
    """Prepare the call and warm up.

    `sample`: the least seconds of a sample. `pool`: memory of graphs. `after`: what belongs to a call and is not in its
    graph.
    """
    return Graphed(call, device, sample, unrolled, pool, after) if graph else Direct(call, device, sample)


class Direct:
    """The call from Python. On a GPU it includes waiting for the GPU."""

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
    """The call, repeated `unrolled` times, as one CUDA graph."""

    def __init__(
        self,
        call: Call,
        device: torch.device,
        sample: float,
        unrolled: int = 1,
        pool: Any = None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self.device, self.unrolled, self.repeats, self.after = device, unrolled, 1, after
        self.call = call  # the graph reads tensors of the call, but does not keep them alive
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARMUP):
                call()
                after()
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            for _ in range(unrolled):
                self.kept = call()
        event: Any = torch.cuda.Event
        self.begin, self.end = event(enable_timing=True), event(enable_timing=True)
        for _ in range(WARMUP):
            self._replay()
        self.repeats = _repeats(sample, self.seconds().clock * unrolled)

    def results(self) -> Sequence[Tensor]:
        """The results of a replay. The old values are poisoned first, so that the replay must write every value."""
        for tensor in self.kept:
            tensor.fill_(math.nan)
        self._replay()
        torch.cuda.synchronize(self.device)
        return self.kept

    def seconds(self) -> Seconds:
        self.begin.record()
        for _ in range(self.repeats):
            self._replay()
        self.end.record()
        self.end.synchronize()
        return Seconds(self.begin.elapsed_time(self.end) / 1e3 / self.repeats / self.unrolled)

    def _replay(self) -> None:
        self.graph.replay()
        self.after()


def _repeats(sample: float, once: float) -> int:
    return min(max(math.ceil(sample / max(once, 1e-9)), 1), MOST)


def count_kernels(call: Callable[[], object], device: torch.device) -> int | None:
    """Number of kernels, copies and fills that a call starts on the GPU. None without a GPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        call()
        torch.cuda.synchronize(device)
    on_gpu = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    return sum(int(event.count) for event in profiler.key_averages() if event.device_type == on_gpu)
