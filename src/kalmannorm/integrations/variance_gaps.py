"""How far the variances of training batches are from the population variance that inference uses.

    gap = mean over groups and channels of |S - running_var| / (running_var + eps)

S is the variance of a group's values. A large gap means that batches are noisy estimates: here the prior matters most.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kalmannorm._groups import group_size
from kalmannorm._model.settings import norms
from kalmannorm._norms.grouped import GroupedNorm


class VarianceGaps:
    """Watches the norms of a model while a batch runs through them."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._found: dict[str, Tensor] = {}

    def start(self, model: nn.Module) -> None:
        """Watch every norm of this library until `stop`."""
        self.stop()
        self._found.clear()
        for name, norm in norms(model):
            if norm.running_var is not None:
                self._handles.append(norm.register_forward_pre_hook(self._hook(name)))

    def _hook(self, name: str) -> Any:
        def look(norm: GroupedNorm, arguments: tuple[Any, ...]) -> None:
            if norm.training and arguments and len(arguments[0]):
                self._found[name] = gap(norm, arguments[0])

        return look

    def stop(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def last(self) -> dict[str, float]:
        """The gap of every norm that was watched last. This waits for the device."""
        return {name: float(value) for name, value in self._found.items()}


@torch.no_grad()
def gap(norm: GroupedNorm, x: Tensor) -> Tensor:
    """The gap of one batch (N, C, *) to a norm's running variance. A last group that is smaller is left out."""
    size = min(group_size(len(x), norm.statistics_batch_size), len(x))
    groups = x[: len(x) // size * size].float().reshape(-1, size, *x.shape[1:])  # (G, m, C, *)
    variance = groups.transpose(1, 2).flatten(2).var(2, correction=0)
    running = norm.running_var
    assert running is not None
    return torch.mean(torch.abs((variance - running) / (running + norm.eps)))
