"""Max pooling and group norm, compiled by inductor for a GPU.

PyTorch's max pooling is slow in channels_last, which trials use: its kernels took 0.8 of the 3.1 ms of a step of CIFAR
Inception on an H200. PyTorch's group norm copies such inputs to another order. The compiled functions have the same
results up to rounding. How much faster they are was not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def compile_slow_parts(model: nn.Module) -> None:
    """Let the model's max pooling and group norm run in compiled kernels.

    In training alone: they are compiled for each shape.
    """
    for module in model.modules():
        if isinstance(module, (nn.MaxPool2d, nn.GroupNorm)):
            module.forward = _Compiled(module)  # type: ignore[assignment]


class _Compiled:
    def __init__(self, module: nn.MaxPool2d | nn.GroupNorm) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:
        module = self.module
        if not module.training or x.dim() != 4:
            return type(module).forward(module, x)  # type: ignore[arg-type]
        if isinstance(module, nn.GroupNorm):
            return _group_norm(x, module.weight, module.bias, module.num_groups, module.eps)
        return _max_pool(x, module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)


def _each_shape(function: Callable[..., Tensor]) -> Any:
    """Compiled for every shape: a limit would let some run slowly."""
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(function, dynamic=False, fullgraph=True)


@_each_shape
def _max_pool(x: Tensor, size: int, stride: int, padding: int, dilation: int, ceil: bool) -> Tensor:
    return F.max_pool2d(x, size, stride, padding, dilation, ceil)


@_each_shape
def _group_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    """In float32, as under autocast, but in the memory order of x."""
    n, c, h, w = x.shape
    values = x.float().permute(0, 2, 3, 1).reshape(n, h * w, groups, c // groups)
    var, mean = torch.var_mean(values, (1, 3), correction=0, keepdim=True)
    normalized = ((values - mean) * (var + eps).rsqrt()).reshape(n, h, w, c)
    return (normalized * weight + bias).permute(0, 3, 1, 2)
