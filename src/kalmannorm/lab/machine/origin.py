"""Where a figure comes from: hardware, versions, commit and command, for every record."""

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
    """Of the checkout that this code runs from, "unknown" where it is installed."""
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


def command() -> str:
    """This process's command line, as one would type it."""
    program, checkout = Path(sys.argv[0]).resolve(), Path(__file__).parents[3]
    script = program.suffix == ".py" and program.is_relative_to(checkout)
    name = program.relative_to(checkout).as_posix() if script else program.name
    words = ["kalmannorm"] if program.stem in ("kalmannorm", "__main__") else ["python", name]
    return shlex.join([*words, *sys.argv[1:]])


_MACHINES = {"aarch64": "64-bit ARM", "arm64": "64-bit ARM", "x86_64": "64-bit x86", "AMD64": "64-bit x86"}


def hardware() -> str:
    """The kind of CPU, its cores, the vector instructions that torch uses, and the GPUs."""
    parts = [platform.machine(), f"{os.cpu_count()} CPU cores", torch.backends.cpu.get_cpu_capability()]
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        parts += [f"{names.count(name)} × {name}" for name in dict.fromkeys(names)]
    return in_words(", ".join(parts))


def in_words(told: str) -> str:
    """The same for people, of older records too; "DEFAULT" says only that torch knows of no vector instructions."""
    return ", ".join(_MACHINES.get(part, part) for part in told.split(", ") if part != "DEFAULT")


def version(package: str) -> str:
    """Of an installed distribution; "–" where it is not, as when another one brings the same code."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "–"


def origin(*packages: str) -> dict[str, str]:
    """`packages` are further distributions whose versions matter."""
    return {
        "hardware": hardware(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        **{package: version(package) for package in packages},
        "python": platform.python_version(),
        "kalmannorm": kalmannorm.__version__,
        "commit": commit(),
        "command": command(),
    }
