"""Where a figure comes from: hardware, versions, commit and command, for every row of a record."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

import kalmannorm


def commit() -> str:
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def origin(*packages: str) -> dict[str, str]:
    """`packages` are further distributions whose versions matter."""
    hardware = f"{platform.machine()}, {os.cpu_count()} CPU cores, {torch.backends.cpu.get_cpu_capability()}"
    if torch.cuda.is_available():
        hardware += f", {torch.cuda.get_device_name()}"
    return {
        "hardware": hardware,
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        **{package: importlib.metadata.version(package) for package in packages},
        "python": platform.python_version(),
        "kalmannorm": kalmannorm.__version__,
        "commit": commit(),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }
