"""Which norms feed each norm, channel by channel.

The trace knows the sources of whole tensors only. That is too coarse if features of several norms are concatenated and
split again, as in channel shuffles: a part may not contain channels of every source. So concatenations are followed by
labels, until a layer mixes the channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kalmannorm._wiring.program import Program
from kalmannorm._wiring.recording.trace import Op, Ref, Trace
from kalmannorm._wiring.rules import layout, names, relabel
from kalmannorm._wiring.rules.relabel import Labelled, NoBeliefError
from kalmannorm._wiring.rules.unary import UNARY


@dataclass(frozen=True)
class Fed:
    """The norm calls that feed each label, as bits. Without labels there is one entry for the whole tensor."""

    masks: tuple[int, ...]
    labels: Tensor | None = None

    def whole(self) -> int:
        if self.labels is None:
            return self.masks[0]
        found = 0
        for label in set(self.labels.flatten().tolist()):
            found |= self.masks[label]
        return found


class Feeding:
    """Reads a trace. `sources(call)` returns the calls that feed this call, with no norm between."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.parted: dict[int, Fed] = {}  # values whose sources differ between channels, or are fewer than in the trace
        for op in trace.ops:
            if op.norm is None and any(trace.values[i].sources for i in op.outputs):
                self._follow(op)

    def sources(self, call: int) -> list[int]:
        bits = self._of(self.trace.norms[call].value).whole()
        return [k for k in range(len(self.trace.norms)) if bits >> k & 1]

    def _of(self, index: int) -> Fed:
        return self.parted.get(index) or Fed((self.trace.values[index].sources,))

    def _follow(self, op: Op) -> None:
        for index, fed in zip(op.outputs, self._through(op), strict=True):
            value = self.trace.values[index]
            masks = tuple(mask & value.sources for mask in fed.masks)
            # A tensor that took the data of another one keeps its own sources too. The operation's input does not have
            # them.
            if op.name == "identity" and not any(masks):
                continue
            if fed.labels is not None or masks != (value.sources,):
                self.parted[index] = Fed(masks, fed.labels)

    def _through(self, op: Op) -> list[Fed]:
        count = len(op.outputs)
        given = [self._of(i) for i in op.inputs]
        if op.name in names.REARRANGEMENTS:
            found = self._relabelled(op)
            if found is not None:
                return found
        elif all(fed.labels is None for fed in given):
            pass
        elif (op.name in names.SAME or op.name in UNARY or op.name in names.POOLS) and len(given) == 1:
            labels = self._labelled(op.inputs[0]).labels
            if all(layout.broadcasts(labels, self.trace.values[i].shape) for i in op.outputs):
                return [given[0]] * count
        elif op.name == "batch_norm" and not any(fed.whole() for fed in given[1:]):
            return [given[0]] * count
        elif op.name in names.SUMS | names.PRODUCTS | names.QUOTIENTS and len(given) == 2:
            return [self._both(op, *given)] * count
        whole = 0
        for fed in given:
            whole |= fed.whole()
        return [Fed((whole,))] * count

    def _labelled(self, index: int) -> Labelled:
        fed, rank = self._of(index), len(self.trace.values[index].shape)
        labels = torch.zeros((1,) * rank, dtype=torch.long) if fed.labels is None else fed.labels
        return Labelled(0, len(fed.masks), labels)

    def _relabelled(self, op: Op) -> list[Fed] | None:
        parts = [ref.index for ref in relabel.operands(op) if isinstance(ref, Ref)]
        given = [self._of(i) for i in parts]
        if len({fed.masks for fed in given}) == 1 and all(fed.labels is None for fed in given):
            return [given[0]] * len(op.outputs)
        try:
            found = relabel.relabelled(Program(), self.trace, op, [self._labelled(i) for i in parts])
        except NoBeliefError:
            return None
        masks = tuple(mask for fed in given for mask in fed.masks)
        return [Fed(masks, part.labels) for part in found]

    def _both(self, op: Op, first: Fed, second: Fed) -> Fed:
        a, b = (self._labelled(i) for i in op.inputs)
        labels, of_a, of_b = layout.pair(a.labels, b.labels, b.size)
        pairs = zip(of_a.tolist(), of_b.tolist(), strict=True)
        return Fed(tuple(first.masks[i] | second.masks[j] for i, j in pairs), labels)
