"""Settled norms on the short way with Triton's kernels: on a GPU, or in the interpreter."""

from __future__ import annotations

import pytest

from support.settled_way_cases import *  # noqa: F403
from support.short_way import use_kernels_on_the_cpu

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # Triton's interpreter


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    use_kernels_on_the_cpu(monkeypatch)
