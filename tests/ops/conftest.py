"""Fixtures for the tests of operations."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("triton") is not None:
    from support.triton_compiled import compiled  # noqa: F401
