"""Settled norms on the short way equal those on the long way. Here they run in PyTorch's operations on a CPU."""

from __future__ import annotations

from support.settled_way_cases import *  # noqa: F403
