"""A launch that was made ready reaches the kernel that Triton built, with what the kernel's parameters stand for.

Triton's compiler is stood in for; `tests/gpu/test_gpu.py` launches real kernels so.
"""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", minversion="3.4")

import triton.language as tl  # noqa: E402
from triton.compiler import CompiledKernel  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from kalmannorm._ops import triton_launching  # noqa: E402
from kalmannorm._ops.triton_launching import Ready, ready  # noqa: E402


@triton.jit
def some_kernel(x_ptr, size, y_ptr, N, eps, BLOCK: tl.constexpr, FLAG: tl.constexpr, PDL: tl.constexpr):
    pass


class Built(CompiledKernel):
    """Notes what it is launched with."""

    def __init__(self, launches):
        self.launches = launches

    def __getitem__(self, grid):
        return lambda *args: self.launches.append((grid, args))


@pytest.fixture
def asked(monkeypatch):
    """What Triton was asked to launch; `launches` are those that went past it."""
    found = []

    def run(self, *args, grid, warmup, **kwargs):
        found.append((grid, args, kwargs))
        return Built(launches)

    launches = []
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(triton_launching, "TRIED", True)
    return found, launches


class Elsewhere(torch.Tensor):
    """A tensor that says it is on another device."""

    def get_device(self):
        return 1


OPTIONS = {"FLAG": True, "PDL": False, "num_warps": 2, "BLOCK": 64}


def test_once_by_triton_and_then_past_it_in_the_order_of_the_parameters(asked):
    found, launches = asked
    launch = Ready(some_kernel, (3,), (7, 0.5), OPTIONS)
    x, y, other = (torch.empty(16) for _ in range(3))
    launch(x, 16, y)
    assert found == [((3,), (x, 16, y, 7, 0.5), OPTIONS)]
    assert launches == []
    launch(other, 16, None)
    assert len(found) == 2, "None is another kernel"
    launch(other, 16, y)
    launch(other, 16, None)
    assert len(found) == 2
    settled = 7, 0.5, 64, True, False
    assert launches == [
        ((3, 1, 1), (other.data_ptr(), 16, y.data_ptr(), *settled)),
        ((3, 1, 1), (other.data_ptr(), 16, None, *settled)),
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda x, size, y: (x.half(), size, y),
        lambda x, size, y: (x, size, torch.empty(17)[1:]),
        lambda x, size, y: (x, 1, y),
        lambda x, size, y: (Elsewhere(x), size, y),
    ],
    ids=["another dtype", "an address that is no multiple of 16", "another number", "another device"],
)
def test_what_a_kernel_is_not_built_for_is_for_triton(change, asked):
    found, launches = asked
    launch = Ready(some_kernel, (3,), (7, 0.5), OPTIONS)
    given = torch.empty(16), 16, torch.empty(16)
    launch(*given)
    launch(*given)
    launch(*change(*given))
    assert (len(found), len(launches)) == (2, 1)


def test_where_nobody_tried_it_every_launch_is_tritons(asked, monkeypatch):
    found, launches = asked
    monkeypatch.setattr(triton_launching, "TRIED", False)
    launch = Ready(some_kernel, (3,), (7, 0.5), OPTIONS)
    for _ in range(3):
        launch(torch.empty(16), 16, torch.empty(16))
    assert (len(found), len(launches)) == (3, 0)


def test_the_interpreter_builds_nothing(monkeypatch):
    monkeypatch.setattr(triton_launching, "TRIED", True)
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **kwargs: None)
    launch = Ready(some_kernel, (3,), (7, 0.5), OPTIONS)
    launch(torch.empty(16), 16, torch.empty(16))
    assert not launch.built


def test_numbers_that_change_with_every_batch_are_not_all_kept(asked):
    found, launches = asked
    launch = Ready(some_kernel, (3,), (7, 0.5), OPTIONS)
    x, y = torch.empty(16), torch.empty(16)
    for size in range(2 * triton_launching.MOST):
        launch(x, size, y)
    assert len(launch.built) == triton_launching.MOST
    launch(x, 5, y)
    launch(x, 2 * triton_launching.MOST - 1, y)
    assert (len(found), len(launches)) == (2 * triton_launching.MOST + 1, 1)


@pytest.mark.parametrize(
    ("version", "expected"),
    [("3.3.1", False), ("3.4.0", True), ("3.6.0+git1", True), ("3.7rc1", True), ("3.10", False), ("main", False)],
)
def test_versions_that_were_tried(version, expected, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    assert triton_launching.tried(version) == expected


def test_the_same_launch_is_kept(asked):
    first = ready(some_kernel, (2, 5), torch.device("cpu"), BLOCK=32)
    assert ready(some_kernel, (2, 5), torch.device("cpu"), BLOCK=32) is first
    assert ready(some_kernel, (2, 4), torch.device("cpu"), BLOCK=32) is not first
    assert ready(some_kernel, (2, 5), torch.device("meta"), BLOCK=32) is not first
    assert first.options == {"BLOCK": 32, "PDL": False}
