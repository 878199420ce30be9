"""The short way of ghost norms with Triton's kernels: on a GPU, or in the interpreter.

What does not depend on the kernels is tested in `test_ghost_way.py`.
"""

from __future__ import annotations

import pytest

from support import short_way_cases
from support.short_way import use_kernels_on_the_cpu
from support.short_way_cases import (  # noqa: F401
    test_batches_with_as_many_values_but_other_groups,
    test_equals_the_long_way,
    test_residual_and_relu,
    test_several_steps,
    test_what_was_prepared_expires,
)

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # Triton's interpreter


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    use_kernels_on_the_cpu(monkeypatch)
    monkeypatch.setattr(short_way_cases, "OPTIONS", {"to": "ghost"})
