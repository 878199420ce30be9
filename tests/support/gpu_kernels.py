"""Which kernels a call launches on a GPU."""

from __future__ import annotations

import torch


def kernels_in(work) -> list[str]:
    work()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        work()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
