"""Fixtures for all tests: one thread per worker, a fixed seed, and the device the machine has."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from lab_runs import among_few_objects

torch.set_num_threads(1)

LABS = ("test_lab_", "test_formats", "test_freeing")
"""Modules of tests that build most models inside themselves."""


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _quick_labs(request: pytest.FixtureRequest) -> Iterator[None]:
    with among_few_objects() if request.module.__name__.startswith(LABS) else nullcontext():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("inductor") and compiler is None:
            item.add_marker(pytest.mark.skip(reason="no C++ compiler for inductor"))
