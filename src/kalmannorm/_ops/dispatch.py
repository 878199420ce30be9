"""Choose the kernels: Triton kernels on CUDA devices, C kernels on CPUs, PyTorch operations everywhere else."""

from __future__ import annotations

import functools
import warnings
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from kalmannorm._groups import group_count, group_size
from kalmannorm._ops.moving import aten_moving
from kalmannorm._ops.normalize import aten, aten_settled, native, native_settled
from kalmannorm._ops.normalize.aten_learned import AtenLearned
from kalmannorm._ops.normalize.aten_rows import AtenRows
from kalmannorm._ops.normalize.aten_settled_rows import AtenSettledAlone, AtenSettledRows
from kalmannorm._ops.normalize.native_learned import NativeLearned
from kalmannorm._ops.normalize.native_rows import NativeRows
from kalmannorm._ops.normalize.native_settled import NativeSettledAlone, NativeSettledRows
from kalmannorm._ops.plain import PLAIN
from kalmannorm._ops.track import aten_many
from kalmannorm.moments import closed

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_CHANNELS = 2**20
"""A tile has at most 2048 positions. With 2^20 channels its last one is 2^31 values behind the first."""


def transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is active. Neither works with a custom op."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def kernels_for(x: Tensor, statistics_batch_size: int) -> ModuleType:
    """A module with the functions `forward` and `backward` of `aten`."""
    if native.fits(x):
        return native
    if x.device.type != "cuda" or x.dtype not in DTYPES or x.numel() == 0 or PLAIN.active:
        return aten
    # Offsets inside a group and inside a tile have 32 bits. Offsets of groups and tiles have 64.
    examples = min(group_size(x.shape[0], statistics_batch_size), x.shape[0])
    group = examples * (x.numel() // (x.shape[0] * x.shape[1]))
    fits = group < 2**31 - 2**13 and x.shape[1] < MOST_CHANNELS  # a tile may extend beyond the end
    return (triton_for(x.device.index) if fits else None) or aten


def settled_kernels_for(x: Tensor, statistics_batch_size: int) -> ModuleType:
    """A module with the functions `forward` and `backward` of `aten_settled`."""
    kernels = kernels_for(x, statistics_batch_size)
    if kernels is native:
        return native_settled
    if kernels is aten:
        return aten_settled
    from kalmannorm._ops.normalize import triton_settled_run

    return triton_settled_run


def moving_kernels_for(x: Tensor, statistics_batch_size: int, *buffers: Tensor) -> ModuleType:
    """A module with the functions of `aten_moving`. Its kernels read these buffers. They are no registered ops."""
    plain = type(x) is not Tensor or x.device.type != "cuda" or not _read_by_kernels(*buffers)
    if plain or buffers[0].device != x.device or kernels_for(x, statistics_batch_size) is aten:
        return aten_moving
    from kalmannorm._ops.moving import triton_moving_run

    return triton_moving_run


def row_kernels_for(x: Tensor, statistics_batch_size: int) -> type | None:
    """The class that prepares a norm on x for the short way, or None."""
    kernels = kernels_for(x, statistics_batch_size)
    if kernels is native:
        return NativeRows
    if kernels is aten:
        return AtenRows if x.device.type == "cpu" else None
    from kalmannorm._ops.normalize.triton_rows import TritonRows

    return TritonRows


def settled_row_kernels_for(x: Tensor, statistics_batch_size: int) -> type | None:
    """As `row_kernels_for`, for a settled norm."""
    kernels = kernels_for(x, statistics_batch_size)
    if kernels is native:
        return NativeSettledRows
    if kernels is aten:
        return AtenSettledRows if x.device.type == "cpu" else None
    from kalmannorm._ops.normalize.triton_settled_rows import TritonSettledRows

    return TritonSettledRows


def settled_alone_kernels_for(x: Tensor, statistics_batch_size: int) -> type | None:
    """As `row_kernels_for`, for a settled norm without a prior."""
    kernels = kernels_for(x, statistics_batch_size)
    if kernels is native:
        return NativeSettledAlone
    if kernels is aten:
        return AtenSettledAlone if x.device.type == "cpu" else None
    from kalmannorm._ops.normalize.triton_settled_alone import TritonSettledAlone

    return TritonSettledAlone


def learned_kernels_for(x: Tensor, statistics_batch_size: int, inputs: int) -> type | None:
    """As `row_kernels_for`, for a norm with a learned transition from `inputs` channels."""
    kernels = kernels_for(x, statistics_batch_size)
    if kernels is native:
        return NativeLearned
    if kernels is aten:
        return AtenLearned if x.device.type == "cpu" else None
    from kalmannorm._ops.normalize.triton_learned import TritonLearned

    groups = group_count(x.shape[0], group_size(x.shape[0], statistics_batch_size))
    return TritonLearned if _predictable(groups * inputs, x.shape[1]) else None


def _predictable(moments: int, outputs: int) -> bool:
    """Whether `triton_predict` can do it. Its offsets of partial gradients have 32 bits."""
    return 2 * moments * outputs < 2**31


def tracking_together_for(moments: Tensor) -> ModuleType | None:
    """A module with `Together`, which updates the statistics of many norms from one tensor of moments, or None."""
    if _read_by_kernels(moments):
        return _tracking()
    return aten_many if moments.device.type == "cpu" else None


def tracking_for(rows: Tensor) -> ModuleType | None:
    """A module with `track` and `track_many`, or None if it cannot read these rows or a tracer is active.

    Its functions are not registered ops, so tracers would not see them.
    """
    return _tracking() if _read_by_kernels(rows) else None


@functools.cache
def _tracking() -> ModuleType:
    from kalmannorm._ops.track import triton_many

    return triton_many


def predicting_for(*tensors: Tensor) -> ModuleType | None:
    """`triton_predict`, or None if it cannot read all these tensors. It is not a registered op."""
    mean, _, matrix, noise, _ = tensors
    # The kernels support only one noise for all channels.
    if not _read_by_kernels(*tensors) or noise.numel() > 1 or not _predictable(mean.numel(), matrix.shape[0]):
        return None
    from kalmannorm._ops.predict import triton_predict

    return triton_predict


def expecting_for(*tensors: Tensor) -> ModuleType | None:
    """`triton_expect`, or None if it cannot read these tensors or a gradient is needed. It is not a registered op."""
    if not _read_by_kernels(*tensors) or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return None
    from kalmannorm._ops.expect import triton_expect

    return triton_expect if tensors[0].shape[0] < 2**16 else None


def filters_for(*weights: Tensor) -> ModuleType | None:
    """`triton_together`, or None if no kernels can read weights of this device and dtype. It is no registered op."""
    first = weights[0]
    # Nothing that watches calls of torch sees a launch.
    watched = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or not closed.applicable()
    if watched or functions_watched() or first.dtype not in DTYPES or not has_kernels(first.device):
        return None
    for weight in weights:
        if type(weight) not in (Tensor, torch.nn.Parameter):
            return None
    from kalmannorm._ops.filters import triton_together

    return triton_together


def functions_watched() -> bool:
    """Whether a mode sees the calls of torch functions. That of `torch.set_default_device` changes only new tensors."""
    if torch._C._len_torch_function_stack() == 0:
        return False
    modes: list[object] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(type(mode) is not DeviceContext for mode in modes)


def _read_by_kernels(*tensors: Tensor) -> bool:
    """Whether Triton kernels can read all these tensors: float32, on one CUDA device, and no tracer is active."""
    device = tensors[0].device
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    for t in tensors:
        if type(t) not in (Tensor, torch.nn.Parameter) or t.dtype != torch.float32 or t.device != device:
            return False
    return has_kernels(device)


def has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and not PLAIN.active and triton_for(device.index) is not None


def on_current_device(x: Tensor) -> bool:
    """Whether kernels for x can be launched as things are: Triton launches on the current device."""
    return not x.is_cuda or x.get_device() == torch._C._cuda_getDevice()


_HERE = nullcontext()


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """A context with the device of x as current device, because Triton launches on the current device."""
    if on_current_device(x):
        return _HERE
    guard: AbstractContextManager[object] = torch.cuda.device(x.device)
    return guard


@functools.cache
def triton_for(device: int) -> ModuleType | None:
    """The module of Triton kernels. None if Triton is missing or cannot build kernels for this device."""
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (7, 0):
        return None
    try:
        from kalmannorm._ops.normalize import triton_run
    except ImportError:
        return None
    try:
        with torch.cuda.device(device):
            triton_run.try_out(torch.device("cuda", device))
    except Exception as error:  # a missing C compiler, an old driver: the op must still run
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        warnings.warn(
            f"kalmannorm: Triton is installed but cannot build kernels ({reason}); PyTorch operations run instead, "
            "which are slower.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return triton_run
