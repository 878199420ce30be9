"""Peak memory of one training step, in bytes that torch allocated: the same to the byte in every run.

The resident size of a process, which the system reports, also counts what malloc keeps for later, libraries and the
interpreter; between equal runs it differs by more than the methods do. So on the CPU the allocator's own events are
added up, every temporary inside an operation included; on a GPU torch keeps that count itself.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


def peak_bytes(step: Callable[[], object], held: Iterable[Tensor], device: torch.device) -> int:
    """What `held` occupies, and the most that `step` holds beside it; gradients of an earlier step are to be None."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    return sum(storages.values()) + (_on_gpu(step, device) if device.type == "cuda" else _on_cpu(step))


def _on_gpu(step: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _on_cpu(step: Callable[[], object]) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it complains, on stderr, where there is no GPU to profile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    allocations = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    now = most = 0
    for event in allocations:
        now += event["args"]["Bytes"]  # negative where memory is given back
        most = max(most, now)
    return most
