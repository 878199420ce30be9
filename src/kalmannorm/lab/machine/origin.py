"""The origin of a measurement: hardware, versions, commit and command. Every record contains it."""

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
    """The commit of the checkout that this code runs from; "unknown" for an installed package."""
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
    """The command line of this process, as a user would type it."""
    program, checkout = Path(sys.argv[0]).resolve(), Path(__file__).parents[4]
    script = program.suffix == ".py" and program.is_relative_to(checkout)
    name = program.relative_to(checkout).as_posix() if script else program.name
    words = ["kalmannorm"] if program.stem in ("kalmannorm", "__main__") else ["python", name]
    return shlex.join([*words, *sys.argv[1:]])


_MACHINES = {"aarch64": "64-bit ARM", "arm64": "64-bit ARM", "x86_64": "64-bit x86", "AMD64": "64-bit x86"}


def hardware() -> str:
    """CPU architecture, number of cores, vector instructions that torch uses, and GPUs."""
    parts = [platform.machine(), f"{os.cpu_count()} CPU cores", torch.backends.cpu.get_cpu_capability()]
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        parts += [f"{names.count(name)} × {name}" for name in dict.fromkeys(names)]
    return in_words(", ".join(parts))


def in_words(told: str) -> str:
    """The same text with readable names, also for old records. "DEFAULT" means no known vector instructions."""
    return ", ".join(_MACHINES.get(part, part) for part in told.split(", ") if part != "DEFAULT")


def version(package: str) -> str:
    """Version of an installed distribution; "–" if another distribution provides the same package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "–"


def origin(*packages: str) -> dict[str, str]:
    """The origin as a record, with the versions of these further packages."""
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
