"""A copy in Triton: the speed of its loads and stores without computation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def copy_kernel(source_ptr, target_ptr, size, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    tl.store(target_ptr + index, tl.load(source_ptr + index, mask=inside), mask=inside)


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    copy_kernel[(triton.cdiv(source.numel(), BLOCK),)](source, target, source.numel(), BLOCK=BLOCK, num_warps=8)
