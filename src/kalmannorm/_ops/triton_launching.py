"""Launch Triton kernels with less launch overhead.

Dependent launches: on Hopper and later each kernel may start while the previous one runs (programmatic dependent
launch). Its first instruction, `await_previous`, waits for the results of the previous one. The order with kernels of
other libraries stays right: a kernel that does not wait starts when all earlier kernels are done.

Prepared launches: Triton's checks of arguments are made once, not at every launch. Triton specializes a kernel for the
type of each argument, for multiples of 16, and for the value 1. It checks this at every launch, and on small tensors
the checks take longer than the kernel. Here the numbers are fixed when a launch is prepared. The dtype and the
alignment of each tensor select a kernel that Triton has built. Other settings, such as Triton's debugging options, keep
the values of the first launch. Launch hooks are still called.

The compiled kernel is launched as in Triton's tutorials. This was not tested in the interpreter, on AMD GPUs and with
other versions of Triton. There every launch uses Triton's normal path.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from kalmannorm._ops.triton_shared import DEPENDENT_LAUNCH

ALIGNED = 16
KEPT = 4096
"""Number of prepared launches that each cache keeps. The least recently used are dropped."""
MOST = 64
"""Kernels that one launch keeps. Without a limit, numbers that change with every batch would add ever more."""


def tried(version: str) -> bool:
    """Whether direct launches were tested with this version of Triton.

    Compiled kernels must take all parameters of their functions, including constants, and addresses for tensors.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (3, 4) <= (int(found[1]), int(found[2])) < (3, 8) and torch.version.hip is None


TRIED = tried(triton.__version__)
DIRECT = triton.__version__.startswith("3.6.") and torch.version.hip is None
"""Whether the arguments of the launcher's C function are known. They differ between versions of Triton."""


Direct = Callable[..., None]
"""Launches a kernel. Arguments: the stream, then the addresses of all tensors; None for a missing tensor."""


def direct_launch(compiled: Any, grid: tuple[int, ...], settled: tuple[Any, ...]) -> Direct:
    """Call the C function of Triton's launcher, if its arguments are known, and if nobody hooks launches."""
    run, runtime = compiled[grid], getattr(triton.knobs, "runtime", None) if hasattr(triton, "knobs") else None
    launcher = compiled.run
    scratch = [getattr(launcher, name, 1) for name in ("global_scratch_size", "profile_scratch_size")]

    def through_triton(stream: int, *addresses: int | None) -> None:
        run(*addresses, *settled, stream=stream)

    if not DIRECT or any(scratch) or runtime is None:
        return through_triton
    launch, function, metadata = launcher.launch, compiled.function, compiled.packed_metadata
    cooperative, dependent = launcher.launch_cooperative_grid, launcher.launch_pdl
    x, y, z = grid
    none = None, None, metadata, None, None, None  # scratch memory, metadata of the kernel, hooks

    def straight(stream: int, *addresses: int | None) -> None:
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            run(*addresses, *settled, stream=stream)
        else:
            launch(x, y, z, stream, function, cooperative, dependent, *none, *addresses, *settled)

    return straight


class Ready:
    """A prepared launch of a kernel on one device.

    The first parameters of the kernel are the arguments of the call, tensors and numbers. Then `numbers` follow, and
    then the constants among the `options`.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], numbers: tuple[float, ...], options: dict[str, Any]) -> None:
        self.kernel, self.grid, self.numbers, self.options = kernel, grid, numbers, options
        self.built: dict[tuple[Any, ...], Any] = {}
        self.compiled: dict[tuple[Any, ...], Any] = {}
        self.settled: tuple[Any, ...] = ()

    def __call__(self, *given: Tensor | float | None) -> None:
        kinds: list[Any] = []
        passed: list[Any] = []
        for each in given:
            if isinstance(each, Tensor):
                address = each.data_ptr()
                # The device is part of the key: for a wrong device Triton must raise, not read from the address.
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
            self.compiled[tuple(kinds)] = compiled

    def direct(self, *given: Tensor | float | None) -> Direct | None:
        """A launch on addresses, for tensors of the same dtypes, alignments and device as these. None: there is none.

        It exists only after a call with such tensors and the same numbers. It is faster, because nothing is checked.
        """
        kinds = tuple(
            (t.dtype, t.data_ptr() % ALIGNED == 0, t.get_device()) if isinstance(t, Tensor) else t for t in given
        )
        compiled = self.compiled.get(kinds)
        return None if compiled is None else direct_launch(compiled, (*self.grid, 1, 1)[:3], self.settled)


class At(NamedTuple):
    """A place in memory that changes from run to run: the number of the tensor, and an offset in float32 values."""

    tensor: int
    offset: int = 0


class LaunchList:
    """Launches that always follow one another, on the same tables and on memory that changes from run to run.

    The arguments of a launch are those of `Ready`, or `At` for a place in the memory.
    """

    def __init__(self) -> None:
        self.listed: list[tuple[Ready, tuple[Tensor | At | float | None, ...]]] = []
        self.direct: list[tuple[Direct, list[tuple[int, float | None]]]] = []

    def add(self, launch: Ready, *given: Tensor | At | float | None) -> None:
        self.listed.append((launch, given))

    def run(self, *memory: Tensor) -> None:
        """Make all launches on this memory. Each tensor is contiguous."""
        addresses = [0, *map(Tensor.data_ptr, memory)]
        aligned = max(address % ALIGNED for address in addresses) == 0
        if self.direct and aligned:
            stream = torch._C._cuda_getCurrentRawStream(memory[0].get_device())
            for launch, places in self.direct:
                launch(stream, *[None if start is None else addresses[base] + start for base, start in places])
            return
        flat = [tensor.view(-1) for tensor in memory]
        given = [
            [flat[each.tensor][each.offset :] if isinstance(each, At) else each for each in arguments]
            for _, arguments in self.listed
        ]
        for (launch, _), arguments in zip(self.listed, given, strict=True):
            launch(*arguments)
        found = [launch.direct(*arguments) for (launch, _), arguments in zip(self.listed, given, strict=True)]
        if aligned and None not in found:
            placed = [list(map(_place, arguments)) for _, arguments in self.listed]
            self.direct = [(launch, each) for launch, each in zip(found, placed, strict=True) if launch is not None]


def _place(given: Tensor | At | float | None) -> tuple[int, float | None]:
    """The number of a base address, 0 for none, and what is added to it."""
    if isinstance(given, At):
        return 1 + given.tensor, 4 * given.offset
    return 0, given.data_ptr() if isinstance(given, Tensor) else given


@functools.lru_cache(maxsize=KEPT)
def ready(kernel: Any, grid: tuple[int, ...], device: torch.device, **options: Any) -> Ready:
    """The prepared launch for this kernel, grid, device and options, from a cache."""
    return Ready(kernel, grid, (), options | launch_options(device))


@functools.cache
def launch_options(device: torch.device) -> dict[str, Any]:
    """Options of every launch."""
    if device.type != "cuda" or torch.version.hip is not None or not DEPENDENT_LAUNCH:
        return {"PDL": False}
    able = torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}
