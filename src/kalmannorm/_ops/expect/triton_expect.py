"""The moments that an example is combined with, in one launch.

This is `virtual_group.expected_of_example` without gradients.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmannorm._ops.grid import blocks_of
from kalmannorm._ops.triton_launching import ready
from kalmannorm._ops.triton_shared import await_previous, mix, settle_keys
from kalmannorm.moments import Moments

BLOCK = 128


@triton.jit
def expect_kernel(
    prior_mean_ptr, prior_var_ptr, gain_ptr, mean_ptr, var_ptr, expected_mean_ptr, expected_var_ptr, trust_ptr,
    C, mean_row, var_row, gain_step, share, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of one row of the prior. The programs of the first row also store the trust."""
    await_previous(PDL)
    channel, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    there = channel < C
    prior_mean = tl.load(prior_mean_ptr + row * mean_row + channel, mask=there, other=0.0)
    prior_var = tl.load(prior_var_ptr + row * var_row + channel, mask=there, other=0.0)
    gain = tl.load(gain_ptr + channel * gain_step, mask=there, other=0.5)
    mean = tl.load(mean_ptr + channel, mask=there, other=0.0)
    var = tl.load(var_ptr + channel, mask=there, other=0.0)
    trust = gain * share
    mean, var = mix(mean, var, prior_mean, prior_var, (gain - trust) / (1.0 - trust), (1.0 - gain) / (1.0 - trust))
    tl.store(expected_mean_ptr + row * C + channel, mean, mask=there)
    tl.store(expected_var_ptr + row * C + channel, var, mask=there)
    tl.store(trust_ptr + channel * gain_step, trust, mask=there & (row == 0) & (channel * gain_step == channel))


def expect(prior: Moments, gain: Tensor, average: Moments, size: int) -> tuple[Moments, Tensor]:
    """Prior and average examples combined, (1, C) or (N, C), and the trust in the example, with the shape of `gain`."""
    mean, var = (t if t.stride(1) == 1 else t.contiguous() for t in (prior.mean, prior.var))
    gain = gain.contiguous()
    rows, C = mean.shape
    expected = Moments(*(torch.empty((rows, C), device=mean.device, dtype=torch.float32) for _ in range(2)))
    trust = torch.empty_like(gain)
    ready(expect_kernel, (blocks_of(C, BLOCK), rows), mean.device, BLOCK=BLOCK)(
        mean, var, gain, average.mean, average.var, expected.mean, expected.var, trust,
        C, mean.stride(0), var.stride(0), int(gain.numel() > 1), 1 / size,
    )  # fmt: skip
    return expected, trust


settle_keys(globals())
