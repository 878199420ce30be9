"""The C kernels are built once, privately, with torch's threads, and nothing fails without a compiler."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys

import pytest
import torch

from kalmannorm import _ops
from kalmannorm._ops import native_library

pytestmark = pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="no C compiler")


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """No library is loaded, and the folder for builds is new."""
    monkeypatch.setattr(native_library, "_LOADED", {})
    monkeypatch.setenv("KALMANNORM_NATIVE_CACHE", str(tmp_path / "builds"))
    return tmp_path / "builds"


def builds(monkeypatch):
    commands, run = [], native_library._run
    monkeypatch.setattr(native_library, "_run", lambda command: (commands.append(command), run(command)))
    return commands


def test_built_once_and_found_by_the_next_process(fresh, monkeypatch):
    commands = builds(monkeypatch)
    assert native_library.library(torch.float32) is not None
    first = len(commands)
    assert first == len(native_library.SOURCES) + 1
    native_library._LOADED.clear()  # as in another process
    assert native_library.library(torch.float32) is not None
    assert len(commands) == first
    assert [path.suffix for path in fresh.iterdir()] == [".so"]  # nothing else stays
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o700


def test_a_damaged_build_is_made_again(fresh, monkeypatch):
    native_library.library(torch.float32)
    (path,) = fresh.iterdir()
    other = fresh.parent / "other"  # a file that this process has loaded is not read again
    other.mkdir(mode=0o700)
    (other / path.name).write_bytes(b"no library")
    monkeypatch.setenv("KALMANNORM_NATIVE_CACHE", str(other))
    native_library._LOADED.clear()
    assert native_library.library(torch.float32) is not None
    assert (other / path.name).stat().st_size > 1000


def test_without_openmp_in_one_thread(fresh, monkeypatch, tmp_path):
    """The compiler has no OpenMP."""
    script = tmp_path / "cc"
    script.write_text(
        f'#!/bin/sh\nfor each in "$@"; do [ "$each" = -fopenmp ] && exit 1; done\nexec {shutil.which("cc")} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    assert native_library.library(torch.float32) is not None


def test_another_processor_gets_its_own_build(fresh, monkeypatch):
    native_library.library(torch.float64)
    native_library._LOADED.clear()
    monkeypatch.setattr(native_library, "_processor", lambda: "another")
    native_library.library(torch.float64)
    assert len(list(fresh.iterdir())) == 2


@pytest.mark.parametrize("how", ["off", "missing", "broken", "hanging"])
def test_without_a_compiler_pytorch_operations_run(fresh, monkeypatch, tmp_path, how):
    if how == "off":
        monkeypatch.setenv("KALMANNORM_NATIVE", "0")
    elif how == "missing":
        monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    else:
        script = tmp_path / "cc"
        script.write_text("#!/bin/sh\nexit 1\n" if how == "broken" else "#!/bin/sh\nexec sleep 60\n")
        script.chmod(0o755)
        monkeypatch.setenv("CC", str(script))
        monkeypatch.setattr(native_library, "SECONDS", 0.2)
    x = torch.randn(4, 3, 5, 5)
    assert not native_library.usable(x)
    assert torch.allclose(_ops.dispatch.kernels_for(x, 2).observe(x, 2)[0][0], x[:2].mean((0, 2, 3)), atol=1e-6)


def test_a_folder_that_cannot_be_written(fresh, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KALMANNORM_NATIVE_CACHE", str(tmp_path / "file" / "builds"))
    assert native_library.library(torch.float32) is not None


def test_a_folder_that_others_can_write_is_not_used(fresh):
    """Their code would run with the rights of this user."""
    fresh.mkdir()
    fresh.chmod(0o777)
    assert native_library.library(torch.float32) is not None
    assert list(fresh.iterdir()) == []


def test_a_user_without_a_home(fresh, monkeypatch):
    def missing():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(native_library.Path, "home", missing)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("KALMANNORM_NATIVE_CACHE")
    assert native_library.library(torch.float32) is not None


def test_a_compiler_with_arguments(fresh, monkeypatch):
    monkeypatch.setenv("CC", "cc -pipe")
    commands = builds(monkeypatch)
    assert native_library.library(torch.float32) is not None
    assert all(command[1] == "-pipe" for command in commands)


def test_the_openmp_library_of_torch_is_found():
    folder = os.path.dirname(os.path.realpath(torch.__file__))
    paths = ["/a folder/sklearn.libs/libgomp-1.so.1.0.0", f"{folder}/lib/libgomp.so.1", "/usr/lib/libm.so.6"]
    maps = "".join(f"7f00-7f01 r-xp 00000000 08:01 1234                       {path}\n" for path in paths)
    assert native_library._openmp_in(maps.encode()) == [paths[1], paths[0]]


def test_one_openmp_library():
    """A second one would have threads of its own, which wait in a loop for work on the same cores."""
    script = """
import re, torch
from kalmannorm._ops import native_library

def loaded():
    with open("/proc/self/maps") as maps:
        return set(re.findall(r"/\\S*/lib(?:gomp|iomp5|omp)[^/\\s]*[.]so[^/\\s]*", maps.read()))

before = loaded()
assert native_library.library(torch.float32) is not None
assert loaded() == before, loaded()
print(len(before))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    if native_library._openmp():  # of this process, whose torch is the same
        assert int(done.stdout) == 1


def test_a_forked_process():
    """Without threads of its own, as a worker of a data loader."""
    script = """
import os, torch, kalmannorm
torch.set_num_threads(2)
norm = kalmannorm.GhostBatchNorm2d(64, statistics_batch_size=2)
x = torch.randn(4, 64, 32, 32)
expected = norm(x)
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    os._exit(0 if torch.equal(norm(x), expected) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.returncode == 0, done.stderr
