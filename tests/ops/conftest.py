"""Fixtures for the tests of operations."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext

import pytest

from kalmannorm._ops.plain import without_kernels

if importlib.util.find_spec("triton") is not None:
    from support.triton_compiled import compiled  # noqa: F401


@pytest.fixture(params=["native", "aten"])
def each_kernels(request):
    """The test runs with C kernels, if there is a compiler, and with PyTorch operations."""
    with without_kernels() if request.param == "aten" else nullcontext():
        yield request.param
