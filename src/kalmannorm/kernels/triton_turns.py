"""Kernels that follow each other closely: on Hopper and later, one is already there when the one before it ends.

A launch is let begin as soon as the one before has begun (programmatic dependent launch); the first thing it does is to
wait until that one is done and what it wrote can be read. Whatever comes in between, of other libraries too, keeps its
order: a kernel that does not wait begins when all before it is done.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # Triton before 3.4
    gdc_launch_dependents = gdc_wait = None


@triton.jit
def in_turn(PDL: tl.constexpr):
    """The first statement of a kernel."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@functools.cache
def turns(device: torch.device) -> dict[str, Any]:
    """Options of every launch."""
    if device.type != "cuda" or torch.version.hip is not None or gdc_wait is None:
        return {"PDL": False}
    able = torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}
