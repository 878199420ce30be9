"""Settled norms on the short way equal those on the long way. Here they run in PyTorch's operations on a CPU."""

from __future__ import annotations

import pytest

from support import short_way_cases
from support.settled_way_cases import *  # noqa: F403


@pytest.fixture(autouse=True, params=["kalman", "ghost"])
def _kind(request, monkeypatch):
    monkeypatch.setattr(short_way_cases, "OPTIONS", {} if request.param == "kalman" else {"to": "ghost"})
