"""Which kernels run: Triton's on CUDA devices that can, PyTorch's own operations everywhere else."""

from __future__ import annotations

import functools
import warnings
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kalmannorm._groups import group_size
from kalmannorm._ops.normalize import aten

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_CHANNELS = 2**20
"""Of a tile's 2048 positions, at most, the last begins 2^31 values behind the first."""


def transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is at work, neither of which sees through a custom op."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def kernels_for(x: Tensor, statistics_batch_size: int) -> ModuleType:
    """A module with `forward` and `backward` as `aten` has them."""
    if x.device.type != "cuda" or x.dtype not in DTYPES or x.numel() == 0:
        return aten
    # Inside a group and inside a tile the kernels count in 32 bits; where those begin, in 64.
    examples = min(group_size(x.shape[0], statistics_batch_size), x.shape[0])
    group = examples * (x.numel() // (x.shape[0] * x.shape[1]))
    fits = group < 2**31 - 2**13 and x.shape[1] < MOST_CHANNELS  # a tile may reach beyond the end
    return (triton_for(x.device.index) if fits else None) or aten


def tracking_for(rows: Tensor) -> ModuleType | None:
    """A module with `track` and `track_together`, where it can read such rows: no op, so no tracer may watch."""
    return _tracking() if _read_by_kernels(rows) else None


@functools.cache
def _tracking() -> ModuleType:
    from kalmannorm._ops.track import triton_many

    return triton_many


def predicting_for(*tensors: Tensor) -> ModuleType | None:
    """`triton_predict`, where it can read all of these; it is no op either."""
    mean, _, matrix, noise, _ = tensors
    # They know one noise for all channels, and count shares of gradients in 32 bits.
    if not _read_by_kernels(*tensors) or noise.numel() > 1 or 2 * mean.numel() * matrix.shape[0] >= 2**31:
        return None
    from kalmannorm._ops.predict import triton_predict

    return triton_predict


def expecting_for(*tensors: Tensor) -> ModuleType | None:
    """`triton_expect`, where it can read all of these and nothing is to be differentiated; no op either."""
    if not _read_by_kernels(*tensors) or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return None
    from kalmannorm._ops.expect import triton_expect

    return triton_expect if tensors[0].shape[0] < 2**16 else None


def _read_by_kernels(*tensors: Tensor) -> bool:
    """Whether Triton's kernels can read all of these, float32 on one device, and no tracer watches."""
    device = tensors[0].device
    if torch.compiler.is_compiling() or device.type != "cuda" or torch._C._len_torch_dispatch_stack() > 0:
        return False
    for t in tensors:
        if type(t) not in (Tensor, torch.nn.Parameter) or t.dtype != torch.float32 or t.device != device:
            return False
    return triton_for(device.index) is not None


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of x."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return nullcontext()
    guard: AbstractContextManager[object] = torch.cuda.device(x.device)
    return guard


@functools.cache
def triton_for(device: int) -> ModuleType | None:
    """The module of Triton kernels, if there is one and it builds for this device."""
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (7, 0):
        return None
    try:
        from kalmannorm._ops.normalize import triton_run
    except ImportError:
        return None
    try:
        with torch.cuda.device(device):
            triton_run.try_out(torch.device("cuda", device))
    except Exception as error:  # a missing C compiler, a driver that is too old: whatever it is, the op still runs
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        warnings.warn(
            f"kalmannorm: Triton is installed but builds no kernels here ({reason}); running on PyTorch's own "
            "operations, which are slower.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return triton_run
