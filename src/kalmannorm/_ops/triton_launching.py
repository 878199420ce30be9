"""How kernels are launched: close behind each other, and without asking Triton the same questions every time.

Close behind each other: on Hopper and later each kernel may start while the previous one runs (programmatic dependent
launch). Its first instruction, `await_previous`, waits for the results of the previous one. Kernels of other libraries
keep their order: a kernel that does not wait starts when all before it are done.

Launches made ready: what Triton asks about the arguments of every launch is asked once.

At each launch Triton looks at all arguments for what a kernel is built for: the type of each, whether it is a multiple
of 16, whether it is 1. On small tensors that takes longer than the kernel. Here the numbers are settled when a launch
is made ready, and of each tensor its dtype and its alignment lead to the kernel that Triton built for such ones. What
else Triton looks at, as its debugging options, is what it was at the first launch; launch hooks are called as ever.

That kernel is then launched as Triton's tutorials launch compiled kernels. Where nobody has tried that (in the
interpreter, on AMD's GPUs, in other versions of Triton), every launch takes Triton's own way.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from kalmannorm._ops.triton_shared import DEPENDENT_LAUNCH

ALIGNED = 16
KEPT = 4096
"""Launches that stay ready, of each kind; the last ones used."""
MOST = 64
"""Kernels that one launch keeps. Numbers that change with every batch would have it keep ever more."""


def tried(version: str) -> bool:
    """Whether compiled kernels take all parameters of their functions, constants too, and addresses for tensors."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (3, 4) <= (int(found[1]), int(found[2])) < (3, 8) and torch.version.hip is None


TRIED = tried(triton.__version__)


class Ready:
    """A launch on one device: of a kernel whose last parameters are `numbers`, and then constants among the `options`.

    What it is called with comes before those, tensors and numbers.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], numbers: tuple[float, ...], options: dict[str, Any]) -> None:
        self.kernel, self.grid, self.numbers, self.options = kernel, grid, numbers, options
        self.built: dict[tuple[Any, ...], Any] = {}
        self.settled: tuple[Any, ...] = ()

    def __call__(self, *given: Tensor | float | None) -> None:
        kinds: list[Any] = []
        passed: list[Any] = []
        for each in given:
            if isinstance(each, Tensor):
                address = each.data_ptr()
                # On another device Triton knows what to say; an address would be read from.
                kinds.append((each.dtype, address % ALIGNED == 0, each.get_device()))
                passed.append(address)
            else:
                kinds.append(each)
                passed.append(each)
        launch = self.built.get(tuple(kinds))
        if launch is not None:
            launch(*passed, *self.settled)
            return
        compiled = self.kernel[self.grid](*given, *self.numbers, **self.options)
        if TRIED and len(self.built) < MOST and isinstance(compiled, CompiledKernel):
            constants = self.kernel.arg_names[len(given) + len(self.numbers) :]
            self.settled = (*self.numbers, *(self.options[name] for name in constants))
            self.built[tuple(kinds)] = compiled[(*self.grid, 1, 1)[:3]]


@functools.lru_cache(maxsize=KEPT)
def ready(kernel: Any, grid: tuple[int, ...], device: torch.device, **options: Any) -> Ready:
    """The same one for the same kernel, grid, device and options, so long as it is used now and then."""
    return Ready(kernel, grid, (), options | launch_options(device))


@functools.cache
def launch_options(device: torch.device) -> dict[str, Any]:
    """Options of every launch."""
    if device.type != "cuda" or torch.version.hip is not None or not DEPENDENT_LAUNCH:
        return {"PDL": False}
    able = torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}
