"""The house rules: imports go one way, the core needs torch alone, every public name is at the top."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kalmannorm

ROOT = Path(kalmannorm.__file__).parent
# Each layer may import from those before it, never from those after it.
LAYERS = [
    {"moments"},
    {"groups", "filter"},
    {"checks", "checkpoints", "statistics", "kernels", "fused", "pickles", "segment"},
    {"op"},
    {"functional"},
    {"distributed", "example"},
    {"tracking"},
    {"grouped", "transition"},
    {"norm", "baselines", "others", "graph"},
    {"registry"},
    {"become"},
    {"conversion"},
    {"population", "optimization", "tallies"},
    {"deploy", "accumulation", "fusion"},
    {"recalibration"},
    {"lab"},
    {"cli"},
    {"__main__"},
]
# What needs more than torch, and is never imported by what does not.
WITH_EXTRAS = {"lab", "cli", "__main__"}
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    """Top-level parts of kalmannorm that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative imports hide the direction"
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = (name or "").partition(".")
            if package == "kalmannorm" and rest.split(".")[0] in RANK:
                found.add(rest.split(".")[0])
    return found


FILES = [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    part = part_of(path)
    assert part in RANK, f"{part} has no place in the layers: give it one in this test and in docs/architecture.md"
    wrong = {other for other in imported_parts(path) if other != part and RANK[other] >= RANK[part]}
    assert not wrong


@pytest.mark.parametrize(
    "path", [path for path in FILES if part_of(path) not in WITH_EXTRAS], ids=lambda path: str(path.relative_to(ROOT))
)
def test_the_core_needs_torch_alone(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            package = name.split(".")[0]
            allowed = {"torch", "kalmannorm"} | ({"triton"} if path.name.startswith("triton_") else set())
            assert package in allowed or package in sys.stdlib_module_names, f"{path.name}: {name}"


def test_importing_does_not_load_the_compiler():
    """`torch._dynamo` takes two seconds; who does not compile should not wait for it."""
    code = "import sys, kalmannorm; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_importable_and_documented():
    for name in kalmannorm.__all__:
        value = getattr(kalmannorm, name)
        if name != "__version__":
            assert value.__doc__, name
