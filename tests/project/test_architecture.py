"""The house rules: imports go one way, the core needs torch alone, private rooms stay private, public names are at the
top."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kalmannorm
import kalmannorm_command

ROOT = Path(kalmannorm.__file__).parent
# The floors of the house. A room may import from the floors before its own, and from nothing else but itself.
FLOORS = [
    {"moments"},
    {"_filter", "_groups", "_names"},
    {"_support", "_ops"},
    {"functional", "_wiring"},
    {"_norms", "_running"},
    {"_model"},
    {"integrations", "lab.errors"},
    {"lab.bounds", "lab.models"},
    {"lab.machine"},
    {"lab.data", "lab.recipes"},
    {"lab.words", "lab.files"},
    {"lab.training", "lab.report"},
    {"lab.bench", "lab.analysis", "lab.export"},
    {"lab.comparing"},
    {"lab.experiments"},
    {"__main__"},
]
WITH_EXTRAS = {"integrations", "lab", "__main__"}
"""What needs more than torch, and is never imported by what does not."""
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_of(path): path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"}
MODULES = [module for module in FILES if module != "lab"]  # which holds a docstring


def room_of(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == "lab" else 1])


def imported(module: str) -> set[str]:
    """The modules of this package that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports hide the direction"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("kalmannorm.") in FILES else node.module or "" for name in whole]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.removeprefix("kalmannorm.") for name in names if name.startswith("kalmannorm.")}
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    room = room_of(module)
    assert room in FLOOR, f"{room} has no floor: give it one in this test and in docs/architecture.md"
    others = {room_of(other) for other in imported(module)} - {room, "lab"}
    assert not {other for other in others if FLOOR[other] >= FLOOR[room]}


def test_no_module_imports_itself_through_others():
    finished: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in finished:
            for other in imported(module):
                visit(other, (*path, module))
            finished.add(module)

    for module in MODULES:
        visit(module, ())


@pytest.mark.parametrize("module", [module for module in MODULES if module.split(".")[0] not in WITH_EXTRAS])
def test_the_core_needs_torch_alone(module):
    path = FILES[module]
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


COMMANDS = Path(kalmannorm_command.__file__).parent


@pytest.mark.parametrize("module", MODULES)
def test_the_library_does_not_import_the_command_line(module):
    text = FILES[module].read_text(encoding="utf-8")
    assert module == "__main__" or ("import kalmannorm_command" not in text and "from kalmannorm_command" not in text)


@pytest.mark.parametrize("path", sorted(COMMANDS.glob("*.py")), ids=lambda path: path.stem)
def test_the_command_line_imports_the_library_inside_functions(path):
    """So that it answers --help without torch. `progress` is itself imported inside functions."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
    allowed = {"typer", "kalmannorm_command"} | ({"kalmannorm", "rich", "torch"} if path.stem == "progress" else set())
    assert not names - allowed - sys.stdlib_module_names


def test_importing_does_not_load_the_compiler():
    """`torch._dynamo` takes two seconds to import. Users who do not compile must not wait for it."""
    code = "import sys, kalmannorm; assert not {'torch._dynamo', 'kalmannorm.integrations'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_importable_and_documented():
    for name in kalmannorm.__all__:
        value = getattr(kalmannorm, name)
        if name != "__version__":
            assert value.__doc__, name


def test_the_architecture_page_lists_every_file_and_no_other():
    repository = Path(__file__).parents[2]
    page = (repository / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/.]+\.py)(?:::\w+)?`", page))
    modules = [path for path in FILES.values() if not path.name.startswith("__")]
    unnamed = [path.relative_to(ROOT) for path in modules if not any(path.as_posix().endswith(f"/{n}") for n in named)]
    assert not unnamed
    everything = [
        f"/{path.relative_to(repository).as_posix()}"
        for folder in ("src", "tests", "benchmarks", "docs")
        for path in (repository / folder).rglob("*.py")
    ]
    assert not [name for name in named if not any(path.endswith(f"/{name}") for path in everything)]
