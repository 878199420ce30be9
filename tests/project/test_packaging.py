"""The wheel and the source archive: what is in them, and that the wheel works with torch alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import kalmannorm

ROOT = Path(__file__).parents[2]
SOURCE = Path(kalmannorm.__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with both files. The wheel is built from the source archive."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_files_hold_the_packages_and_no_more(built):
    [wheel], [archive] = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        metadata = HeaderParser().parsestr(opened.read(next(n for n in names if n.endswith("METADATA"))).decode())
    written = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*") if path.is_file()}
    written = {name for name in written if "__pycache__" not in name and ".egg-info" not in name}
    assert {name for name in names if ".dist-info/" not in name} == written
    assert {"kalmannorm/py.typed", "kalmannorm/lab/report/page/base.css"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    required = [Requirement(text) for text in metadata.get_all("Requires-Dist")]
    assert [each.name for each in required if each.marker is None] == ["torch"]
    with tarfile.open(archive) as opened:
        kept = {name.partition("/")[2] for name in opened.getnames()}
    assert {"CITATION.cff", "CHANGELOG.md", "Makefile", "constraints.txt", "docs/index.md", "tests/conftest.py"} <= kept
    assert not [name for name in kept if name.startswith((".venv", "runs", "build"))]


def needed_by(name: str, found: dict[str, set[str]]) -> None:
    """The top-level files of a distribution and of all that it requires on this machine, by distribution."""
    try:
        own = distribution(name)
    except PackageNotFoundError:  # for another platform
        return
    if name not in found:
        found[name] = {file.parts[0] for file in own.files or [] if file.parts[0] not in ("..", "__pycache__")}
        for requirement in map(Requirement, own.requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                needed_by(requirement.name.lower(), found)


USE = """
import torch, kalmannorm
from torch import nn
net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
x = torch.randn(2, 3, 8, 8)
net = kalmannorm.convert(net, x, statistics_batch_size=2)
net(x).square().mean().backward()
plain = kalmannorm.fold(net.eval())
assert torch.allclose(plain(x), net(x), atol=1e-5)
print(kalmannorm.__file__)
"""


@pytest.fixture(scope="module")
def clean(built, tmp_path_factory):
    """An environment for Python with the wheel, torch and what torch requires, and nothing else."""
    folder = tmp_path_factory.mktemp("clean")
    [wheel] = built.glob("*.whl")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder)]
    subprocess.run([*command, str(wheel)], check=True, timeout=300)
    found: dict[str, set[str]] = {}
    needed_by("torch", found)
    assert {"torch", "sympy", "filelock"} <= set(found)
    for name, tops in found.items():
        for top in tops:
            if not (folder / top).exists():
                (folder / top).symlink_to(distribution(name).locate_file(top))
    return {"PYTHONPATH": str(folder), "PATH": os.environ["PATH"], "PYTHONWARNINGS": "ignore"}, folder


def isolated(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python without site-packages."""
    return subprocess.run(
        [sys.executable, "-S", *arguments], env=environment, capture_output=True, text=True, timeout=300
    )


def test_the_wheel_works_with_torch_alone(clean):
    environment, folder = clean
    done = isolated(environment, "-c", USE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(folder / "kalmannorm" / "__init__.py")
    missing = isolated(environment, "-c", "import typer")
    assert "No module named 'typer'" in missing.stderr


def test_the_command_without_the_lab_tells_its_version_and_what_is_missing(clean):
    environment, _ = clean
    script = (
        "import sys; sys.argv = ['kalmannorm', *sys.argv[1:]]; import kalmannorm_command; kalmannorm_command.main()"
    )
    done = isolated(environment, "-c", script, "--version")
    assert re.fullmatch(rf"kalmannorm {re.escape(kalmannorm.__version__)}, torch \S+\n", done.stdout), done.stderr
    refused = isolated(environment, "-c", script, "train")
    assert (refused.returncode, "needs the lab" in refused.stderr) == (1, True)


def test_the_import_is_short(clean):
    """Beside torch's own import, with bytecode, the best of three, in seconds of the processor.

    On a busy machine both take longer.
    """
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(clean[1] / "kalmannorm")], check=True)
    code = (
        "from time import process_time as now; start = now(); import torch; torch_is = now(); import kalmannorm; "
        "print((now() - torch_is) / (torch_is - start))"
    )
    shares = [float(isolated(clean[0], "-c", code).stdout) for _ in range(3)]
    assert min(shares) < 0.1, shares


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == kalmannorm.__version__
    [paper] = citation["references"]
    assert (paper["year"], len(paper["authors"])) == (2018, 5)


def test_all_versions_of_python_are_run_or_checked():
    """The workflow installs on those that it does not run, and `make pythons` resolves for the same ones."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    run, checked = (jobs[name]["strategy"]["matrix"]["python"] for name in ("test", "resolve"))
    [named] = re.findall(r"^PYTHONS := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert named.split() == checked
    assert sorted(run + checked) == ["3.10", "3.11", "3.12", "3.13"]
    oldest = re.search(r'requires-python = ">=(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert oldest is not None and oldest[1] == "3.10"


@pytest.mark.parametrize("name", ["ci", "docs", "release"])
def test_the_workflows_run_targets_of_the_makefile(name):
    text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    assert all(job["runs-on"] for job in jobs.values())
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    used = re.findall(r"run: make ([\w-]+)", text)
    assert used
    assert set(used) <= set(targets)
