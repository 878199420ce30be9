"""Fixtures for all tests: one thread per worker, a fixed seed, and the device the machine has."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from support.lab_runs import among_few_objects

torch.set_num_threads(1)

HERE = Path(__file__).parent
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


@pytest.fixture(autouse=True, scope="module")
def _quick_labs(request: pytest.FixtureRequest) -> Iterator[None]:
    place = request.path.relative_to(HERE)
    builds_models_inside = place.parts[0] in ("lab", "cli") or place.name == "test_freeing.py"
    with among_few_objects() if builds_models_inside else nullcontext():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("inductor") and compiler is None:
            item.add_marker(pytest.mark.skip(reason="no C++ compiler for inductor"))
