"""Everything of a training step but its kernels: for counts and times of host work, without a GPU."""

from __future__ import annotations

import torch

from support.short_way import use_kernels_on_the_cpu


def no_launches(monkeypatch):
    """From now on launches do nothing, as if all kernels were built. Bundles run theirs, too."""
    from kalmannorm._ops.propagate import triton_bundle
    from kalmannorm._ops.triton_launching import Ready

    use_kernels_on_the_cpu(monkeypatch)
    monkeypatch.setattr("kalmannorm._running.prior_bundles.runner", lambda *_: triton_bundle)
    monkeypatch.setattr(Ready, "__call__", lambda self, *given: None)
    monkeypatch.setattr(Ready, "direct", lambda self, *given: lambda stream, *addresses: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
