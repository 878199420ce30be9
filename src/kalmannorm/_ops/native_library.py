"""The C kernels for CPUs: built at first use by the C compiler of the machine, and kept for later processes.

They know no torch, only addresses and numbers. So one build serves all versions of torch. Without a compiler there are
no C kernels, and PyTorch operations run instead. They use torch's own threads: the OpenMP library that torch has loaded
is made visible to them. If it is not found, they run in one thread.

    KALMANNORM_NATIVE=0        never build or use C kernels
    KALMANNORM_NATIVE_CACHE    the folder for builds. Otherwise it is `kalmannorm` in the user's folder for caches.
                               If others can write into it, every process builds in a folder of its own
    CC                         the compiler, with arguments if it needs some
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from kalmannorm._ops.plain import PLAIN

DTYPES = {torch.float32: "float", torch.float64: "double"}
SOURCES = ("normalize/native.c", "propagate/native.c")
HEADERS = ("native.h",)
FUNCTIONS = {
    "observe": 3,
    "forward": 2,
    "again": 2,
    "backward": 2,
    "settle_backward": 2,
    "layer_forward": 7,
    "layer_backward": 10,
    "bundle_forward": 5,
    "bundle_backward": 7,
}
"""How many addresses each function takes. Then follows the number of threads."""
COMPILERS = ("cc", "gcc", "clang")
COMMON = ("-std=c11", "-O2", "-ftree-vectorize", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
SECONDS = 120
SMALL = 2**14
"""Values. With fewer than this, starting a second thread takes longer than the work."""
_HERE = Path(__file__).parent
_building = threading.Lock()


def usable(x: Tensor) -> bool:
    """Whether C kernels can read a tensor, if it has no gaps: a plain float32 or float64 tensor on a CPU.

    Not under a dispatch mode outside of a registered op: a tracer would not see what they write, and fake tensors have
    no memory.
    """
    if x.device.type != "cpu" or x.dtype not in DTYPES or PLAIN.active or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return library(x.dtype) is not None


def threads_for(values: int) -> int:
    """The number of threads for so many values."""
    return torch.get_num_threads() if values >= SMALL else 1


def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The C kernels for a dtype. None if they cannot be built."""
    try:
        return _LOADED[dtype]
    except KeyError:
        with _building:
            if dtype not in _LOADED:
                _LOADED[dtype] = _load(dtype)
        return _LOADED[dtype]


_LOADED: dict[torch.dtype, ctypes.CDLL | None] = {}


def _load(dtype: torch.dtype) -> ctypes.CDLL | None:
    if dtype not in DTYPES or sys.platform != "linux" or os.environ.get("KALMANNORM_NATIVE") == "0":
        return None
    try:
        compiler = _compiler()
        if compiler is None:
            return None
        # Without threads if the compiler has no OpenMP, or calls another one than that of torch, as clang does.
        found = _opened(compiler, dtype, True) if _openmp() else None
        return found or _opened(compiler, dtype, False)
    except (OSError, ValueError):  # CC cannot be read, a folder cannot be written
        return None


def _opened(compiler: list[str], dtype: torch.dtype, openmp: bool) -> ctypes.CDLL | None:
    for _ in range(2):
        try:
            path = _built(compiler, dtype, openmp)
        except subprocess.SubprocessError:
            return None
        try:
            found = ctypes.CDLL(str(path))
            for name, places in FUNCTIONS.items():
                getattr(found, name).argtypes = [*[ctypes.c_void_p] * places, ctypes.c_long]
        except (OSError, AttributeError):  # a damaged file: build it anew
            path.unlink(missing_ok=True)
        else:
            return found
    return None


def _compiler() -> list[str] | None:
    """The command of the compiler. CC may have arguments, as in "ccache gcc"."""
    commands = [shlex.split(os.environ["CC"])] if os.environ.get("CC", "").strip() else [[name] for name in COMPILERS]
    return next(([path, *rest] for name, *rest in commands if (path := shutil.which(name)) is not None), None)


@functools.cache
def _openmp() -> bool:
    """Make the OpenMP library of torch visible to libraries that are loaded later. False if there is none."""
    with open("/proc/self/maps", "rb") as maps:
        loaded = _openmp_in(maps.read())
    if loaded:
        ctypes.CDLL(loaded[0], mode=ctypes.RTLD_GLOBAL)
    return bool(loaded)


def _openmp_in(maps: bytes) -> list[str]:
    """The OpenMP libraries of a process, that of torch first: threads of another one would compete with torch's."""
    found = re.findall(rb"^(?:\S+ +){5}(/.*/lib(?:gomp|iomp5|omp)[^/\s]*\.so[^/\s]*)$", maps, re.MULTILINE)
    home = str(Path(torch.__file__).resolve().parent)
    return sorted(map(os.fsdecode, found), key=lambda path: not path.startswith((f"{home}/", f"{home}.libs/")))


def _built(compiler: list[str], dtype: torch.dtype, openmp: bool) -> Path:
    """The library file. It is built if there is none for these sources, this compiler and this kind of processor."""
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    flags = [*COMMON, native, f"-DREAL={DTYPES[dtype]}", "-fopenmp" if openmp else "-fopenmp-simd"]
    content = b"".join((_HERE / name).read_bytes() for name in (*HEADERS, *SOURCES))
    key = hashlib.sha256(content + repr((compiler, flags, _processor())).encode()).hexdigest()[:24]
    folder = _folder()
    path = folder / f"native-{DTYPES[dtype]}-{key}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            objects = [f"{scratch}/{number}.o" for number in range(len(SOURCES))]
            commands = [
                [*compiler, *flags, "-c", str(_HERE / name), "-o", made]
                for name, made in zip(SOURCES, objects, strict=True)
            ]
            with ThreadPoolExecutor(len(commands)) as pool:
                list(pool.map(_run, commands))
            # Linked without -fopenmp, which would add a second OpenMP library with threads of its own.
            _run([*compiler, "-shared", *objects, "-lm", "-o", f"{scratch}/native.so"])
            os.replace(f"{scratch}/native.so", path)  # another process may do the same at the same time
    return path


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)


def _folder() -> Path:
    """The folder for builds. It is private: code in it is loaded into processes of its user."""
    try:
        given = os.environ.get("KALMANNORM_NATIVE_CACHE")
        folder = Path(given or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kalmannorm"))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _private(folder) and os.access(folder, os.W_OK | os.X_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        pass
    return _own_folder()


def _private(folder: Path) -> bool:
    """Whether nobody but its user can write into a folder. Others could put their code there."""
    state = folder.stat()
    return state.st_uid == os.getuid() and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@functools.cache
def _own_folder() -> Path:
    """A folder for this process alone, where no other can be written."""
    kept = tempfile.TemporaryDirectory(prefix="kalmannorm-")
    _KEPT.append(kept)
    return Path(kept.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def _processor() -> str:
    """The kind of processor: builds use all its instructions, and a folder may be shared by different machines."""
    try:
        with open("/proc/cpuinfo", errors="replace") as file:
            text = file.read()
    except OSError:
        return platform.processor()
    return "".join(sorted(set(re.findall(r"^(?:flags|Features|model name|CPU part)\s*:.*$", text, re.MULTILINE))))
