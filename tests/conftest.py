"""Fixtures for all tests: one thread per worker, a fixed seed, and the device the machine has."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from kalmannorm._ops.plain import without_kernels

torch.set_num_threads(1)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton reads this variable once, when it is imported. Inductor must not see it: only kernel tests run with it."""
TRITON = importlib.util.find_spec("triton") is not None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Kernel tests, `test_*_kernel*.py`, run on a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter."""
    name = collection_path.name
    if not (name.startswith("test_") and name.endswith(".py")):
        return None
    if name.removesuffix(".py").endswith(("_kernel", "_kernels")):
        return None if TRITON and (INTERPRETED or torch.cuda.is_available()) else True
    return True if INTERPRETED else None


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the test before may have set another number: sums differ, and `train` prints a hint


@pytest.fixture(autouse=True, scope="module")
def _few_objects() -> None:
    """`convert` looks at every object of the process. Half a million are there before the first test, and compilers
    leave more: they are put out of its sight, and it takes a fifth of the time. Objects of a test are seen as ever."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("inductor") and compiler is None:
            item.add_marker(pytest.mark.skip(reason="no C++ compiler for inductor"))


@pytest.fixture(params=["native", "aten"])
def each_kernels(request):
    """The test runs with C kernels, if there is a compiler, and with PyTorch operations."""
    with without_kernels() if request.param == "aten" else nullcontext():
        yield request.param
