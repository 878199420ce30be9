"""Builds Triton kernels in a process of its own: `triton_building.py` starts this file and sends jobs to it.

The process imports Triton and the modules of kernels, not torch and not the rest of this package: that takes a few
tenths of a second. It never uses the GPU. The first line on stdout is "ready". Jobs come from stdin, pickled. Each
gets one line: "built", or why it was not built. The process ends with the input.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import types
from hashlib import sha256
from pathlib import Path
from typing import Any


def main() -> None:
    source, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    paths, cache, version, file = pickle.load(source)
    sys.path[:] = paths
    package = types.ModuleType("kalmannorm")  # its own `__init__` would import everything
    package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["kalmannorm"] = package
    import triton

    if triton.__file__ != file:
        return
    triton.knobs.cache.dir = cache
    triton.runtime.cache.triton_key = lambda: version  # a hash of all of Triton, which takes a second
    print("ready", file=answers, flush=True)
    while True:
        try:
            job = pickle.load(source)
        except EOFError:
            return
        try:
            answer = build(**job)
        except Exception as error:  # any error: the kernel is then built where it is launched
            answer = f"{type(error).__name__}: {error}".splitlines()[0]
        print(answer, file=answers, flush=True)


def build(
    module: str,
    name: str,
    signature: dict[str, Any],
    constants: dict[Any, Any],
    attributes: dict[Any, Any],
    options: dict[str, Any],
    target: Any,
    key: str,
) -> str:
    """Build a kernel and its launcher into Triton's cache, if the later launch will look for this key."""
    import triton
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import get_cache_key
    from triton.runtime.jit import get_cache_invalidating_env_vars

    kernel = getattr(importlib.import_module(module), name)
    source, backend = ASTSource(kernel, signature, constants, attributes), make_backend(target)
    parsed = backend.parse_options(dict(options, **source.parse_options()))
    found = get_cache_key(source, backend, parsed, env_vars=get_cache_invalidating_env_vars())
    if sha256(found.encode("utf-8")).hexdigest() != key:
        return "the settings of this process are not those of the launch"
    compiled = triton.compile(source, target=target, options=options)
    try:
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(compiled.src, compiled.metadata)
    except Exception:  # no C compiler, no driver: the kernel itself is built
        return "built without its launcher"
    return "built"


if __name__ == "__main__":
    main()
