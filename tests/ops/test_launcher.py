"""Launches of `launcher.c`: what `cuLaunchKernelEx` gets, which is stood in for. `tests/gpu` launches real kernels."""

from __future__ import annotations

import ctypes
import gc
import struct
from types import SimpleNamespace

import pytest

triton = pytest.importorskip("triton", minversion="3.6")

from kalmannorm._ops import triton_launching  # noqa: E402
from kalmannorm._ops.triton_launching import At, direct_launch, packed  # noqa: E402


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *[(name, ctypes.c_uint) for name in ("x", "y", "z", "threads", "by", "bz", "shared")],
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(ctypes.c_int * 16)),
        ("count", ctypes.c_uint),
    ]


KERNEL = {
    "x_ptr": "*bf16", "none_ptr": "constexpr", "size": "i32", "margin": "fp32", "y_ptr": "*fp32",
    "N": "i64", "one": "constexpr", "eps": "fp32", "BLOCK": "constexpr",
}  # fmt: skip
SIZES = {"*bf16": 8, "*fp32": 8, "i32": 4, "i64": 8, "fp32": 4}


@pytest.fixture
def launched(monkeypatch):
    """What was launched: configuration, function and the bytes of all parameters. `result` is returned to C."""
    sizes = [SIZES[kind] for kind in KERNEL.values() if kind != "constexpr"] + [8, 8]
    found = SimpleNamespace(calls=[], result=0)

    def launch(config, function, parameters, extra):
        config = config.contents
        grid = config.x, config.y, config.z, config.threads, config.by, config.bz
        attributes = [config.attributes.contents[0], config.attributes.contents[2]] if config.count else []
        values = [ctypes.string_at(parameters[i], size) for i, size in enumerate(sizes)]
        found.calls.append((grid, config.shared, config.stream, attributes, function, values, extra))
        return found.result

    types = ctypes.POINTER(Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
    found.function = ctypes.CFUNCTYPE(ctypes.c_int, *types)(launch)
    address = ctypes.cast(found.function, ctypes.c_void_p).value
    real = ctypes.CDLL
    stand_in = SimpleNamespace(cuLaunchKernelEx=ctypes.c_void_p(address))
    monkeypatch.setattr(ctypes, "CDLL", lambda name, *more: stand_in if name == "libcuda.so.1" else real(name, *more))
    monkeypatch.setattr(triton_launching, "DIRECT", True)
    triton_launching._launcher.cache_clear()
    assert triton_launching._launcher() is not None, "it was not built"
    yield found
    triton_launching._launcher.cache_clear()


class Kernel:
    """A kernel that Triton compiled, as far as it is read."""

    function, packed_metadata, src = 77, (4, 1, 1024), SimpleNamespace(signature=KERNEL)

    def __init__(self, **more):
        run = {"global_scratch_size": 0, "profile_scratch_size": 0, "launch_cooperative_grid": False}
        self.run, self.by_triton = SimpleNamespace(**run | {"launch_pdl": False, "launch": None} | more), []

    def __getitem__(self, grid):
        return lambda *given, stream: self.by_triton.append((grid, given, stream))


PLACES = At(0), None, 12, 0.25, At(4)
SETTLED = 2**40, 1, 1e-5, 64


def prepared(kernel):
    return direct_launch(kernel, (3, 2, 1), SETTLED, PLACES)


def test_parameters_in_their_order(launched):
    launch = prepared(Kernel())
    assert type(launch).__name__ == "Launch"
    assert launch(5, 1 << 45, None, 12, 0.25, 4096) is None
    launch(0, 16, None, 12, 0.25, None)
    first, second = launched.calls
    assert first[:5] == ((3, 2, 1, 128, 1, 1), 1024, 5, [], 77) and first[6] is None
    number = lambda kind, value: struct.pack(kind, value)  # noqa: E731
    constants = [number("<i", 12), number("<f", 0.25)], [number("<q", 2**40), number("<f", 1e-5), bytes(8), bytes(8)]
    assert first[5] == [number("<Q", 1 << 45), *constants[0], number("<Q", 4096), *constants[1]]
    assert second[2] is None and second[5] == [number("<Q", 16), *constants[0], bytes(8), *constants[1]]


def test_dependent_launches(launched):
    prepared(Kernel(launch_pdl=True))(0, 16, None, 12, 0.25, 32)
    assert launched.calls[0][3] == [6, 1]  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, allowed


def test_hooks_see_every_launch(launched):
    kernel, hook = Kernel(), lambda metadata: None
    launch, hooks = prepared(kernel), triton.knobs.runtime.launch_exit_hook
    hooks.add(hook)
    try:
        launch(5, 16, None, 12, 0.25, 32)
    finally:
        hooks.remove(hook)
    assert not launched.calls
    assert kernel.by_triton == [((3, 2, 1), (16, None, 12, 0.25, 32, *SETTLED), 5)]
    launch(5, 16, None, 12, 0.25, 32)
    assert len(launched.calls) == 1


@pytest.mark.parametrize("replaced", [True, False], ids=["another chain", "None"])
def test_a_chain_of_hooks_may_be_replaced(replaced, launched, monkeypatch):
    """As profilers do that restore Triton's settings. A replaced chain is asked, whether it has hooks or not."""
    kernel, runtime = Kernel(), triton.knobs.runtime
    launch = prepared(kernel)
    chain = type(runtime.launch_enter_hook)() if replaced else None
    monkeypatch.setattr(runtime, "launch_enter_hook", chain)
    launch(5, 16, None, 12, 0.25, 32)
    assert not launched.calls
    assert kernel.by_triton == [((3, 2, 1), (16, None, 12, 0.25, 32, *SETTLED), 5)]
    later = prepared(Kernel())  # with the chain of now
    assert type(later).__name__ == ("Launch" if replaced else "function")


@pytest.mark.parametrize("places", [(At(0),), (At(0), At(1), At(2))])
def test_more_memory_than_a_launch_needs(places):
    """Lists of launches give all their memory to each launch."""
    assert tuple(triton_launching._resolver(places)((10, 20, 30, 40))) == (10, 20, 30)[: len(places)]
    assert tuple(triton_launching._resolver((*places, None))((10, 20, 30, 40))) == (*(10, 20, 30)[: len(places)], None)


def test_parameters_of_an_unknown_kind_are_for_triton(launched, monkeypatch):
    monkeypatch.setattr(Kernel, "src", SimpleNamespace(signature=KERNEL | {"size": "fp8"}))
    assert type(prepared(Kernel())).__name__ == "function"


def test_errors(launched):
    launch = prepared(Kernel())
    with pytest.raises(TypeError, match="5 addresses"):
        launch(0, 16)
    with pytest.raises(TypeError, match="integer"):
        launch(0, 16, None, 12, 0.25, "y")
    assert not launched.calls
    launched.result = 700
    with pytest.raises(RuntimeError, match="error 700"):
        launch(0, 16, None, 12, 0.25, 32)


def test_a_thread_without_a_context_launches_through_triton(launched):
    kernel = Kernel()
    launch = prepared(kernel)
    launched.result = 201  # CUDA_ERROR_INVALID_CONTEXT
    launch(5, 16, None, 12, 0.25, 32)
    assert kernel.by_triton == [((3, 2, 1), (16, None, 12, 0.25, 32, *SETTLED), 5)]


@pytest.mark.parametrize("more", [{"launch_cooperative_grid": True}, {"global_scratch_size": 8}])
def test_what_it_does_not_offer_is_for_triton(more, launched):
    assert type(prepared(Kernel(**more))).__name__ == "function"


@pytest.mark.parametrize("place", [(ctypes, "CDLL"), (triton.runtime.build, "compile_module_from_src")])
def test_without_a_driver_or_a_compiler(place, launched, monkeypatch):
    def missing(name, *_, **__):
        raise OSError(name)

    monkeypatch.setattr(*place, missing)
    triton_launching._launcher.cache_clear()
    assert triton_launching._launcher() is None
    assert type(prepared(Kernel())).__name__ == "function"


def test_a_launch_is_freed(launched):
    kernel = Kernel()
    launch = prepared(kernel)
    kernel.launch = launch  # a cycle through the hook's way
    gone = []
    kernel.watched = type("Watched", (), {"__del__": lambda self: gone.append(1)})()
    del kernel, launch
    gc.collect()
    assert gone == [1]


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [("i32", -1, 0xFFFFFFFF), ("i64", -1, 2**64 - 1), ("fp32", 1.0, 0x3F800000), ("fp64", 1.0, 0x3FF0000000000000)],
)
def test_packed(kind, value, expected):
    assert packed(kind, value) == expected
