"""The short way on any machine: on a GPU as it is, elsewhere with kernels on CPU tensors (in Triton's interpreter)."""

from __future__ import annotations

import torch

from kalmannorm._ops import dispatch
from kalmannorm._running.short_way import Repeated, ShortForward


def use_kernels_on_the_cpu(monkeypatch):
    """As if the CPU were a GPU with Triton. Nothing changes where there is a GPU.

    Bundles run in PyTorch's operations, because the interpreter is slow. Their kernels have tests of their own.
    """
    if torch.cuda.is_available():
        return
    from kalmannorm._ops.normalize import registered, triton_run

    def kernels_for(x, size):
        fits = x.dtype in dispatch.DTYPES and x.numel() > 0
        return triton_run if fits else dispatch.aten

    monkeypatch.setattr(dispatch, "kernels_for", kernels_for)
    monkeypatch.setattr(registered, "kernels_for", kernels_for)
    monkeypatch.setattr(dispatch, "has_kernels", lambda device: True)
    monkeypatch.setattr(triton_run, "processors_of", lambda x: 8)
    for name in ("triton_rows", "triton_settled_run", "triton_settled_rows", "triton_settled_alone"):
        monkeypatch.setattr(f"kalmannorm._ops.normalize.{name}.processors_of", lambda x: 8)


def the_long_way(monkeypatch, work, *args):
    """`work` without the short way."""
    with monkeypatch.context() as patch:
        patch.setattr(ShortForward, "normalize", lambda *_: None)
        return work(*args)


def count_repeated(monkeypatch):
    """A list that gets every norm that a recomputation runs again on the short way."""
    taken = []
    original = Repeated.run

    def run(self, norm, *given):
        taken.append(norm)
        return original(self, norm, *given)

    monkeypatch.setattr(Repeated, "run", run)
    return taken


def count_short(monkeypatch):
    """A list that gets every norm that takes the short way from now on."""
    taken = []
    original = ShortForward.normalize

    def normalize(self, call, target, norm, *given):
        y = original(self, call, target, norm, *given)
        if y is not None:
            taken.append(norm)
        return y

    monkeypatch.setattr(ShortForward, "normalize", normalize)
    return taken
