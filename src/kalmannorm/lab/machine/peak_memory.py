"""Peak memory of one training step, in bytes that torch allocated. Equal runs give the same number of bytes.

The resident size of the process would also count libraries, the interpreter and memory that malloc keeps. It varies
more between equal runs than between methods. So on the CPU we sum the events of torch's allocator, including
temporaries inside operations. On a GPU torch keeps this count itself.
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
    """Bytes of the tensors in `held`, plus the peak of further bytes during `step`. Gradients must be None before."""
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
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it warns on stderr if there is no GPU
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    allocations = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    now = most = 0
    for event in allocations:
        now += event["args"]["Bytes"]  # negative if memory is freed
        most = max(most, now)
    return most
