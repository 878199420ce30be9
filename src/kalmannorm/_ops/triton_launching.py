"""Launch Triton kernels with less launch overhead.

Dependent launches: on Hopper and later each kernel may start while the previous one runs (programmatic dependent
launch). Its first instruction, `await_previous`, waits for the results of the previous one. The order with kernels of
other libraries stays right: a kernel that does not wait starts when all earlier kernels are done.

Prepared launches: Triton's checks of arguments are made once, not at every launch. Triton specializes a kernel for the
type of each argument, for multiples of 16, and for the value 1. It checks this at every launch, and on small tensors
the checks take longer than the kernel. Here the numbers are fixed when a launch is prepared. The dtype and the
alignment of each tensor select a kernel that Triton has built. Other settings, such as Triton's debugging options, keep
the values of the first launch. Launch hooks are still called.

The compiled kernel is launched as in Triton's tutorials, with Triton 3.4 to 3.7. With other versions, in the
interpreter and on AMD GPUs every launch uses Triton's normal path. With Triton 3.6 a launch on addresses goes through
`launcher.c`, if it can be built.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
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


class At(NamedTuple):
    """A place in memory that changes from run to run: the number of the memory, and an offset in float32 values."""

    memory: int
    offset: int = 0


Place = Tensor | At | float | None
"""What an argument of a launch is: a tensor that stays where it is, a place in other memory, or a number."""
Direct = Callable[..., None]
"""Launches a kernel. Arguments: the stream, then the addresses of the memory that changes; None for a missing one."""
Resolve = Callable[[Sequence[int | None]], Sequence[float | None]]


def direct_launch(compiled: Any, grid: tuple[int, ...], settled: tuple[Any, ...], places: Sequence[Place]) -> Direct:
    """Launch without Triton's checks, if nobody hooks launches: through `launcher.c`, or Triton's own C function.

    The first arguments of the kernel are `places`. `settled` are the others.
    """
    run, runtime = compiled[grid], getattr(triton.knobs, "runtime", None) if hasattr(triton, "knobs") else None
    launcher, resolved = compiled.run, _resolver(places)
    scratch = [getattr(launcher, name, 1) for name in ("global_scratch_size", "profile_scratch_size")]

    def through_triton(stream: int, *addresses: int | None) -> None:
        run(*resolved(addresses), *settled, stream=stream)

    if not DIRECT or any(scratch) or runtime is None:
        return through_triton
    prepared = _prepared(compiled, grid, settled, places, through_triton)
    if prepared is not None:
        return prepared
    launch, function, metadata = launcher.launch, compiled.function, compiled.packed_metadata
    cooperative, dependent = launcher.launch_cooperative_grid, launcher.launch_pdl
    x, y, z = grid
    none = None, None, metadata, None, None, None  # scratch memory, metadata of the kernel, hooks

    def straight(stream: int, *addresses: int | None) -> None:
        if _hooked(runtime):
            through_triton(stream, *addresses)
        else:
            launch(x, y, z, stream, function, cooperative, dependent, *none, *resolved(addresses), *settled)

    return straight


def _hooked(runtime: Any) -> bool:
    """Whether somebody watches launches. A chain of hooks may be replaced, also by None."""
    return any(getattr(hook, "calls", hook) for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook))


def _resolver(places: Sequence[Place]) -> Resolve:
    """From the addresses of a call to the arguments of the kernel."""
    count = len(places)
    if all(isinstance(place, At) and place == At(i) for i, place in enumerate(places)):
        return lambda addresses: addresses[:count]  # a launch may get more memory than it needs
    found = [_slot(place) for place in places]

    def resolved(addresses: Sequence[int | None]) -> list[float | None]:
        listed = (None, *addresses)
        return [
            value if slot == 0 else None if (address := listed[slot]) is None else address + value
            for slot, value in found
        ]

    return resolved


def _slot(place: Place) -> tuple[int, Any]:
    """Which address of a call it is counted from, 0 for none, and how far from there; or a constant."""
    if isinstance(place, At):
        return 1 + place.memory, 4 * place.offset
    return 0, place.data_ptr() if isinstance(place, Tensor) else place


def _prepared(
    compiled: Any, grid: tuple[int, ...], settled: tuple[Any, ...], places: Sequence[Place], otherwise: Direct
) -> Direct | None:
    """A launch of `launcher.c`. None if it cannot be built, or if the kernel needs what it does not offer."""
    built = _launcher()
    if built is None or compiled.run.launch_cooperative_grid:
        return None
    warps, blocks, shared = compiled.packed_metadata
    kinds = [kind for kind in compiled.src.signature.values() if kind != "constexpr"]
    known = all(kind.startswith("*") or kind in _FORMATS for kind in kinds)
    runtime = triton.knobs.runtime
    lists = all(hasattr(hook, "calls") for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook))
    if blocks != 1 or 0 in grid or not known or not lists:
        return None
    slots, values = list[int](), list[int]()
    for kind, place in zip(compiled.src.signature.values(), (*places, *settled), strict=True):
        if kind != "constexpr":
            slot, value = _slot(place)
            slots.append(slot - 1)
            values.append(value or 0 if kind.startswith("*") else packed(kind, value))
    nothing = [0, 0]  # scratch memory of Triton, which these kernels do not use
    module, address = built
    launch: Direct = module.prepare(
        address, compiled.function, grid, 32 * warps, shared, bool(compiled.run.launch_pdl),
        [*slots, -1, -1], values + nothing, runtime, otherwise,
    )  # fmt: skip
    return launch


_FORMATS = {"i1": "<?", "u1": "<?", "i32": "<i", "i64": "<q", "u32": "<I", "u64": "<Q", "fp32": "<f", "fp64": "<d"}


def packed(kind: str, value: float) -> int:
    """A number as a kernel reads it, in the first bytes of an integer of 8 bytes."""
    return int.from_bytes(struct.pack(_FORMATS[kind], value).ljust(8, b"\0"), "little")


@functools.cache
def _launcher() -> tuple[Any, int] | None:
    """`launcher.c` as a module, and the address of `cuLaunchKernelEx`. None: Triton's launcher is used."""
    try:
        from triton.backends.nvidia import driver
        from triton.runtime.build import compile_module_from_src

        address = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx, ctypes.c_void_p).value
        source = Path(__file__).with_name("launcher.c").read_text(encoding="utf-8")
        module = compile_module_from_src(source, "kalmannorm_launcher", include_dirs=driver.include_dirs)
    except Exception:  # the faster way is missing, and nothing else
        return None
    return None if address is None else (module, address)


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

    def direct(self, given: Sequence[Tensor | float | None], places: Sequence[Place] | None = None) -> Direct | None:
        """A launch on addresses, for tensors of the same dtypes, alignments and device as these. None: there is none.

        It exists only after a call with such tensors and the same numbers. It is faster, because nothing is checked.
        Without `places` it is called with the address of each tensor, and with each number, which is not read.
        """
        kinds = tuple(
            (t.dtype, t.data_ptr() % ALIGNED == 0, t.get_device()) if isinstance(t, Tensor) else t for t in given
        )
        compiled = self.compiled.get(kinds)
        if compiled is None:
            return None
        if places is None:
            places = [At(i) if isinstance(each, Tensor) else each for i, each in enumerate(given)]
        return direct_launch(compiled, (*self.grid, 1, 1)[:3], self.settled, places)


class LaunchList:
    """Launches that always follow one another, on the same tables and on memory that changes from run to run."""

    def __init__(self) -> None:
        self.listed: list[tuple[Ready, tuple[Place, ...]]] = []
        self.direct: list[Direct] = []

    def add(self, launch: Ready, *places: Place) -> None:
        self.listed.append((launch, places))

    def run(self, *memory: Tensor) -> None:
        """Make all launches on this memory. Each tensor is contiguous."""
        addresses = [*map(Tensor.data_ptr, memory)]
        aligned = max(address % ALIGNED for address in addresses) == 0
        if self.direct and aligned:
            stream = torch._C._cuda_getCurrentRawStream(memory[0].get_device())
            for launch in self.direct:
                launch(stream, *addresses)
            return
        flat = [tensor.view(-1) for tensor in memory]
        given = [
            [flat[each.memory][each.offset :] if isinstance(each, At) else each for each in places]
            for _, places in self.listed
        ]
        for (launch, _), arguments in zip(self.listed, given, strict=True):
            launch(*arguments)
        if aligned:
            found = [
                launch.direct(arguments, places) for (launch, places), arguments in zip(self.listed, given, strict=True)
            ]
            self.direct = [launch for launch in found if launch is not None] if None not in found else []


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
