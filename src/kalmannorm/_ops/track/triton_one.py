"""Update the running statistics of a norm in one launch. `TrackedNorm._track` would need about 25 operations."""

from __future__ import annotations

import torch

from kalmannorm._ops.grid import blocks_of, power
from kalmannorm._ops.track.request import TrackingRequest
from kalmannorm._ops.track.triton_kernels import KINDS, track_kernel
from kalmannorm._ops.triton_launching import ready


def track(request: TrackingRequest) -> None:
    """Update the buffers of one norm, in one launch."""
    none = (None, None)
    rows = [part.contiguous() for part in request.rows()]
    averages = *request.running, *(request.observed or none)
    G, C = rows[0].shape
    BG = min(power(G), 64)
    BC = power(C) if BG * power(C) <= 4096 else max(2048 // BG, 16)
    programs = blocks_of(C, BC)
    scratch = None if programs == 1 else torch.empty((4, C), device=rows[0].device, dtype=torch.float32)
    cumulative = request.momentum is None
    launch = ready(
        track_kernel, (programs,), rows[0].device,
        BG=BG, BC=BC, WIDE=min(power(C), 1024), ONE_TILE=G <= BG, ALONE=programs == 1,
        KIND=KINDS[request.kind].value, CUMULATIVE=cumulative, OBSERVES=request.observed is not None,
        num_warps=8 if BG * BC > 2048 else 4,
    )  # fmt: skip
    launch(
        *rows, *(() if request.observed else none), *averages, *request.counts, scratch, request.arrived,
        request.examples, G, C, min(request.size, request.examples), request.values,
        0.0 if cumulative else request.momentum, request.observation_momentum, request.eps,
    )  # fmt: skip
    torch.autograd.graph.increment_version(request.buffers())
