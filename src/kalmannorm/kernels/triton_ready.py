"""Launches made ready: what Triton asks about the arguments of every launch is asked once.

At each launch Triton looks at all arguments for what a kernel is built for: the type of each, whether it is a multiple
of 16, whether it is 1. On small tensors that takes longer than the kernel. Here the numbers are settled when a launch
is made ready, and of each tensor its dtype and its alignment lead to the kernel that Triton built for such ones.

That kernel is then launched as Triton's tutorials launch compiled kernels. Where nobody has tried that (in the
interpreter, on AMD's GPUs, in other versions of Triton), every launch takes Triton's own way.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

ALIGNED = 16
TRIED = (3, 4) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 8) and torch.version.hip is None
"""Whether compiled kernels take all parameters of their functions, constants too, and addresses for tensors."""


class Ready:
    """A launch on one device, of a kernel that takes tensors, then `numbers`, then constants among the `options`."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], numbers: tuple[float, ...], options: dict[str, Any]) -> None:
        self.kernel, self.grid, self.numbers, self.options = kernel, grid, numbers, options
        self.built: dict[tuple[Any, ...], Any] = {}
        self.settled: tuple[Any, ...] = ()

    def __call__(self, *tensors: Tensor | None) -> None:
        kinds: list[Any] = []
        addresses: list[int | None] = []
        for tensor in tensors:
            if tensor is None:
                kinds.append(None)
                addresses.append(None)
            else:
                address = tensor.data_ptr()
                kinds.append((tensor.dtype, address % ALIGNED))
                addresses.append(address)
        launch = self.built.get(tuple(kinds))
        if launch is not None:
            launch(*addresses, *self.settled)
            return
        compiled = self.kernel[self.grid](*tensors, *self.numbers, **self.options)
        if TRIED and isinstance(compiled, CompiledKernel):
            constants = self.kernel.arg_names[len(tensors) + len(self.numbers) :]
            self.settled = (*self.numbers, *(self.options[name] for name in constants))
            self.built[tuple(kinds)] = compiled[(*self.grid, 1, 1)[:3]]
