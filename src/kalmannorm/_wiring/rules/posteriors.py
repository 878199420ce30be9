"""Transition `learned`: which posteriors of this forward reach a norm, and in which order.

Activations, pooling, dropout and up-sampling leave a posterior unchanged. Concatenation concatenates. Addition sums
means and variances. A convolution or linear layer also leaves the posterior unchanged, because A does the mapping. A
product passes on the operand of full spatial size and ignores the gate. If entries no longer belong to channels, they
form a bag: the posteriors that reach an operation are concatenated, and A learns what to do with them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kalmannorm import moments as algebra
from kalmannorm._wiring.program import Detach, Posterior, Program, combined, selected
from kalmannorm._wiring.recording.trace import Op, Trace
from kalmannorm._wiring.rules import arguments, layout, names, relabel
from kalmannorm._wiring.rules.relabel import Labelled, NoBeliefError
from kalmannorm._wiring.rules.unary import UNARY


@dataclass(frozen=True)
class Arrival:
    """A step of `size` moments. `labels` is None in a bag, where entries no longer belong to channels.

    `parts` are the steps that a bag concatenates, so that none of them is added twice.
    """

    step: int
    size: int
    labels: Tensor | None
    parts: tuple[tuple[int, int], ...] = ()


class Posteriors:
    """Interprets a trace. `prior(call)` returns the step with the posteriors that reach a norm, and their number."""

    def __init__(self, trace: Trace, program: Program, identities: list[int], norm_steps: dict[int, int]) -> None:
        self.trace, self.program, self.identities, self.norm_steps = trace, program, identities, norm_steps
        self.arrivals: dict[int, Arrival] = {}
        for op in trace.ops:
            if op.norm is not None or any(i in self.arrivals for i in op.inputs):
                for index, state in zip(op.outputs, self._states(op), strict=True):
                    if state is not None:
                        self.arrivals[index] = self._cut(state) if trace.values[index].cut else state

    def _cut(self, state: Arrival) -> Arrival:
        step = self.program.add(Detach((state.step,)))
        return replace(state, step=step, parts=((step, state.size),) if state.parts else ())

    def prior(self, call: int) -> tuple[int, int] | None:
        value = self.trace.values[self.trace.norms[call].value]
        state = self.arrivals.get(value.index)
        if state is None:
            return None
        state = self._entering(state, 1, value.shape)
        return state.step, state.size

    def _entering(self, state: Arrival, axis: int, shape: tuple[int, ...]) -> Arrival:
        """The channels that a layer reads, with one entry each."""
        if state.labels is None:
            return state
        entries, share = layout.channels(state.labels, axis % len(shape), shape)
        if share is not None:
            return self._bag([state])
        step = selected(self.program, state.step, entries, state.size)
        labels = layout.along(axis % len(shape), entries.numel(), len(shape))
        return Arrival(step, entries.numel(), labels)

    def _bag(self, states: list[Arrival]) -> Arrival:
        parts: dict[int, int] = {}
        for state in states:
            for step, size in state.parts or ((state.step, state.size),):
                parts.setdefault(step, size)
        steps = list(parts)
        step = steps[0] if len(steps) == 1 else combined(self.program, algebra.concatenate, steps)
        return Arrival(step, sum(parts.values()), None, tuple(parts.items()))

    def _states(self, op: Op) -> list[Arrival | None]:
        try:
            states = self._interpret(op)
        except Exception:  # a kind of call that its rule does not handle
            states = []
        if len(states) == len(op.outputs):
            return states
        given = [self.arrivals[i] for i in dict.fromkeys(op.inputs) if i in self.arrivals]
        floating = [self.trace.values[i].dtype.is_floating_point for i in op.outputs]
        return [self._bag(given) if given and kept else None for kept in floating]

    def _interpret(self, op: Op) -> list[Arrival | None]:
        count = len(op.outputs)
        if op.norm is not None:
            shape = self.trace.values[op.outputs[0]].shape
            identity = self.identities[op.norm]
            if identity not in self.norm_steps:
                self.norm_steps[identity] = self.program.add(Posterior((), identity))
            return [Arrival(self.norm_steps[identity], shape[1], layout.along(1, shape[1], len(shape)))]
        given = [i for i in dict.fromkeys(op.inputs) if i in self.arrivals]
        states = [self.arrivals[i] for i in given]
        if not self.trace.values[op.outputs[0]].dtype.is_floating_point:
            return [None] * count
        if op.name in names.REARRANGEMENTS:
            relabelled = self._rearrange(op)
            return relabelled if relabelled is not None else [self._bag(states)] * count
        if len(states) == 1:
            return [self._one(op, given[0], states[0])] * count
        if op.name in names.SUMS:
            return [self._sum(states)] * count
        if op.name in names.PRODUCTS | names.QUOTIENTS:
            sizes = [torch.Size(self.trace.values[i].shape).numel() for i in given]
            full = [state for state, size in zip(states, sizes, strict=True) if size == max(sizes)]
            return [full[0] if len(full) == 1 else self._bag(full)] * count
        return [self._bag(states)] * count

    def _one(self, op: Op, index: int, state: Arrival) -> Arrival:
        shape = self.trace.values[index].shape
        if op.name in names.SAME or op.name in UNARY or op.name in names.OTHER_NORMS:
            return state
        kept = names.SUMS | names.PRODUCTS | names.QUOTIENTS | names.POOLS | {"softmax", "normalize"}
        if op.name in kept or (op.name in ("max", "min") and len(op.inputs) > 1):
            out = self.trace.values[op.outputs[0]].shape
            if state.labels is not None and len(out) == len(shape):
                fits = all(size in (1, full) for size, full in zip(state.labels.shape, out, strict=True))
                return state if fits else self._bag([state])
            return self._bag([state])
        if op.name in names.CONVOLUTIONS | names.TRANSPOSED:
            return self._bag([self._entering(state, 1, shape)])
        if op.name == "linear":
            return self._bag([self._entering(state, -1, shape)])
        if op.name in names.MEANS and state.labels is not None:
            return self._mean(op, state)
        return self._bag([state])

    def _mean(self, op: Op, state: Arrival) -> Arrival:
        assert state.labels is not None
        given = arguments.named(op, arguments.REDUCTION)
        dims = given["dim"]
        rank = state.labels.dim()
        axes = list(range(rank)) if dims is None else [dims] if isinstance(dims, int) else list(dims)
        axes = [axis % rank for axis in axes]
        if any(state.labels.shape[axis] > 1 for axis in axes):
            return self._bag([state])
        labels = state.labels
        if not given["keepdim"]:
            for axis in sorted(axes, reverse=True):
                labels = labels.squeeze(axis)
        return replace(state, labels=labels)

    def _sum(self, states: list[Arrival]) -> Arrival:
        first = states[0]
        for state in states[1:]:
            if first.labels is None or state.labels is None or first.size != state.size:
                return self._bag(states)
            if first.labels.shape != state.labels.shape or not torch.equal(first.labels, state.labels):
                return self._bag(states)
        assert first.labels is not None
        return Arrival(combined(self.program, algebra.add, [s.step for s in states]), first.size, first.labels)

    def _rearrange(self, op: Op) -> list[Arrival | None] | None:
        """Views, slices and concatenations of entries that belong to channels. None if they no longer do."""
        try:
            given = [self.arrivals.get(ref.index) for ref in relabel.operands(op)]
            labelled = [
                Labelled(arrival.step, arrival.size, arrival.labels)
                for arrival in given
                if arrival is not None and arrival.labels is not None
            ]
            if len(labelled) < len(given):
                return None
            parts = relabel.relabelled(self.program, self.trace, op, labelled)
        except NoBeliefError:
            return None
        return [Arrival(part.step, part.size, part.labels) for part in parts]
