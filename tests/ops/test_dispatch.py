"""On which device kernels are launched, of many that need not be there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kalmannorm._ops.dispatch import on_device_of


@pytest.mark.parametrize("current", [0, 1])
def test_a_guard_where_another_device_is_current(current, monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current, raising=False)
    x = SimpleNamespace(device=torch.device("cuda", 1), is_cuda=True, get_device=lambda: 1)
    guard = on_device_of(x)
    assert isinstance(guard, torch.cuda.device) == (current == 0)
    assert current == 1 or guard.idx == 1


def test_none_on_a_cpu():
    with on_device_of(torch.zeros(1)):
        pass
