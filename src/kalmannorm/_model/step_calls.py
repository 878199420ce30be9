"""Whether `ClosingPhase.step` is called once per optimizer step.

An optimizer changes parameters in place, and torch counts such changes (`Tensor._version`). The counts of two norms'
weights tell whether the optimizer has stepped, without a hook and without waiting for the device. Optimizers that write
to `parameter.data`, and steps that a CUDA graph replays, are not counted. So a count that never moves says nothing.

A GradScaler skips a step now and then. Then the count stays, too. So too many calls of `step` are recognised by their
share after the first step of the optimizer, and by calls of both kinds that alternate.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kalmannorm._norms.grouped import GroupedNorm

FORGOTTEN = 20
"""Changes of a weight without a call of `step` that count as a mistake. An optimizer step makes one to three."""
IDLE, ALTERNATIONS = 0.4, 5
"""The share of calls without an optimizer step, and how often one with a step has followed them."""


class StepCalls:
    def __init__(self, norms: Sequence[GroupedNorm]) -> None:
        trained = [norm for norm in norms if norm.weight is not None and norm.weight.requires_grad]
        self._norms = list({id(norm): norm for norm in (*trained[:1], *trained[-1:])}.values())
        self._calls = self._idle = self._alternations = 0
        self._idled = False
        self.begin()

    def begin(self) -> None:
        """Expect the next call from here."""
        self._count = self._changes()

    def called(self) -> bool:
        """Take a call of `step`. Returns whether there are too many."""
        count = self._changes()
        idles = count == self._count
        self._count = count
        if not idles or self._calls:  # a GradScaler may skip the first steps
            self._calls += 1
            self._idle += idles
            self._alternations += self._idled and not idles
            self._idled = idles
        return self._alternations >= ALTERNATIONS and self._idle >= IDLE * self._calls

    def forgotten(self) -> bool:
        """Whether the optimizer has made many steps since the last call of `step`."""
        return self._changes() - self._count >= FORGOTTEN

    def _changes(self) -> int:
        return sum(map(_version, self._norms))


def _version(norm: GroupedNorm) -> int:
    weight = norm.weight
    return weight._version if isinstance(weight, Tensor) and not weight.is_inference() else 0
