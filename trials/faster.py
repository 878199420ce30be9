"""Parts of a training step on a GPU that are slow in PyTorch, replaced by kernels with the same results.

A step of CIFAR Inception with 128 images takes 2.38 ms on an H200 with BKN, and took 2.66 ms when only max pooling was
compiled by inductor (`records/steps-h200.csv`). Later changes, to max pooling and to the mean over positions, were not
timed. Under autocast PyTorch's group norm returns float32. Here its result has the dtype of its input, as that of the
other norms.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kalmannorm.lab.models.cifar_inception import Block, CifarInception
from kalmannorm.lab.models.parts import Unit

TRITON = importlib.util.find_spec("triton") is not None
WITH_TRITON = nn.MaxPool2d, Block, CifarInception
LARGEST = 11
"""The largest window whose places have numbers of 8 bits."""


def speed_up(model: nn.Module) -> None:
    """Let max pools, group norms and parts of CIFAR Inception run in faster kernels, in training alone.

    The model has to be converted before, because these parts cannot be traced.
    """
    for module in model.modules():
        if isinstance(module, nn.GroupNorm) or (TRITON and isinstance(module, WITH_TRITON)):
            module.forward = _Faster(module)  # type: ignore[assignment]


class _Faster:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:
        module = self.module
        if not module.training or x.dim() != 4:
            return type(module).forward(module, x)  # type: ignore[no-any-return]
        if isinstance(module, nn.GroupNorm):
            return _group_norm(x, module.weight, module.bias, module.num_groups, module.eps)  # type: ignore[no-any-return]
        if isinstance(module, CifarInception):
            return _inception(module, x)
        return _block(module, x) if isinstance(module, Block) else _max_pool(module, x)


def _max_pool(module: Any, x: Tensor) -> Tensor:
    from trials.triton_parts import MaxPool

    sides = [(each, each) if isinstance(each, int) else tuple(each) for each in _window(module)]
    square = all(first == second for first, second in sides)
    size, stride, padding, dilation = (first for first, _ in sides)
    if not square or dilation != 1 or size > LARGEST or module.ceil_mode or module.return_indices:
        return nn.MaxPool2d.forward(module, x)  # type: ignore[arg-type, no-any-return]
    return MaxPool.apply(x, size, stride, padding)  # type: ignore[no-any-return, no-untyped-call]


def _window(module: Any) -> tuple[Any, ...]:
    return module.kernel_size, module.stride, module.padding, module.dilation


def _block(block: Block, x: Tensor) -> Tensor:
    """`Block.forward`. The ReLUs of its four results are part of their concatenation."""
    from trials.triton_parts import JoinedReLUs, Shared

    one, three, five, pooled = Shared.apply(x, 4)  # type: ignore[no-untyped-call]
    parts = [
        _without_relu(block.one, one),
        _without_relu(block.three[1], block.three[0](three)),
        _without_relu(block.five[1], block.five[0](five)),
        _without_relu(block.pooled[1], block.pooled[0](pooled)),
    ]
    if len({part.dtype for part in parts}) > 1:
        return torch.cat([F.relu(part) for part in parts], 1)
    return JoinedReLUs.apply(*parts)  # type: ignore[no-any-return, no-untyped-call]


def _inception(net: CifarInception, x: Tensor) -> Tensor:
    """`CifarInception.forward`."""
    from trials.triton_parts import Mean

    pooled = Mean.apply(net.blocks(net.stem(x)))  # type: ignore[no-untyped-call]
    return net.classifier(F.relu(net.hidden(pooled)))  # type: ignore[no-any-return]


def _without_relu(unit: Any, x: Tensor) -> Tensor:
    assert isinstance(unit, Unit)
    return unit.norm(unit.convolution(x))  # type: ignore[no-any-return]


def _compiled(function: Any) -> Any:
    """Compiled for every shape: a limit would let some run slowly."""
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(function, dynamic=False, fullgraph=True)


@_compiled
def _group_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    """In float32, as under autocast, but in the memory order of x."""
    n, c, h, w = x.shape
    values = x.float().permute(0, 2, 3, 1).reshape(n, h * w, groups, c // groups)
    var, mean = torch.var_mean(values, (1, 3), correction=0, keepdim=True)
    normalized = ((values - mean) * (var + eps).rsqrt()).reshape(n, h, w, c)
    return (normalized * weight + bias).permute(0, 3, 1, 2).to(x.dtype)
