"""Versions of kalmannorm and torch, read from their files. An import of either would take seconds."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path


def versions() -> str:
    """Such as "kalmannorm 0.1.0, torch 2.10.0+cpu"."""
    return f"kalmannorm {_written('kalmannorm', '__init__.py')}, torch {_written('torch', 'version.py')}"


def _written(package: str, file: str) -> str:
    """The `__version__` that a file of this package assigns."""
    spec = importlib.util.find_spec(package)  # does not import a top-level package
    if spec is None or not spec.submodule_search_locations:
        return "missing"
    text = (Path(spec.submodule_search_locations[0]) / file).read_text(encoding="utf-8")
    found = re.search(r"""^__version__ = ["'](.+?)["']""", text, re.MULTILINE)
    return found[1] if found else "unknown"
