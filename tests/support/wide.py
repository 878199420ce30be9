"""Wide sweeps: cases that `make test-all` runs and `make test` leaves out. Each has a narrow case that guards the same
promise in `make test`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

wide = pytest.mark.wide


def narrow(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """All cases, for `parametrize`; those that are not kept are wide."""
    cases = list(cases)
    unknown = [case for case in kept if case not in cases]
    assert not unknown, f"no such case: {unknown}"
    return [case if case in kept else pytest.param(case, marks=wide) for case in cases]
