"""What the kernel tests share: the device they run on, and memory that is NaN until a kernel has filled it."""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def poison(monkeypatch):
    def poisoned(make):
        def made(*args, **kwargs):
            memory = make(*args, **kwargs)
            if memory.is_floating_point():
                return memory.fill_(float("nan"))
            return memory.fill_(99 if memory.dtype in (torch.int8, torch.uint8) else 10**6)

        return made

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
