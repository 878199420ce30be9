"""What the rules of `weights` stand on: the belief of every tensor read so far, and steps that combine beliefs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kalmannorm import moments as algebra
from kalmannorm._wiring.program import Apply, Mix, Program, Static, WeightedSum, combined, selected
from kalmannorm._wiring.recording.trace import Op, Ref, Trace, Value
from kalmannorm._wiring.rules import layout
from kalmannorm._wiring.rules.relabel import Labelled, NoBeliefError
from kalmannorm._wiring.rules.statics import Statics


@dataclass(frozen=True)
class Unknown:
    reason: str


State = Labelled | Unknown
Coefficient = float | Labelled  # a number, or one without variance for each element
_MOST_TERMS = 64


class Reader:
    """Each tensor has a step with K moments and labels that say which of them an element has, or an `Unknown`."""

    def __init__(self, trace: Trace, program: Program) -> None:
        self.trace, self.program = trace, program
        self.statics = Statics(trace, program)
        self.states: dict[int, State] = {}
        self.averages: dict[int, int] = {}  # values that sum to 1 along an axis, as softmax makes them
        self.terms: dict[int, dict[int, Coefficient]] = {}  # values that are known to be weighted sums of others

    def state(self, value: Value) -> State:
        if value.index in self.states:
            return self.states[value.index]
        if value.reason is not None:
            return Unknown(value.reason)
        if value.fed:
            return Unknown("fed by the model's input")
        if value.random:
            return Unknown("random numbers")
        step = self.statics.step(value)
        numel = torch.Size(value.shape).numel()
        if step is None:
            return Unknown("a constant that cannot be made again")
        if numel > layout.LARGEST or not value.dtype.is_floating_point:
            return Unknown(f"a constant of {numel} values of {value.dtype}")
        labels = torch.arange(numel).reshape(value.shape)
        self.states[value.index] = Labelled(self.program.add(Static((step,))), numel, labels)
        return self.states[value.index]

    def by_channel(self, state: Labelled, axis: int, shape: tuple[int, ...]) -> int:
        """The step that has one entry per channel along `axis`."""
        entries, share = layout.channels(state.labels, axis, shape)
        if share is None:
            return selected(self.program, state.step, entries, state.size)
        return self.program.add(
            Mix((state.step, self.program.constant(entries), self.program.constant(share.to(torch.float32))))
        )

    def _known(self, argument: Any) -> Labelled:
        if not isinstance(argument, Ref):
            raise NoBeliefError("an argument that is no tensor")
        state = self.state(self.trace.values[argument.index])
        if isinstance(state, Unknown):
            raise NoBeliefError(state.reason, told=True)
        return state

    def _shape(self, argument: Ref) -> tuple[int, ...]:
        return self.trace.values[argument.index].shape

    def _static(self, argument: Any) -> int | None:
        """The step of a tensor that no data has entered; None for None."""
        if argument is None:
            return None
        value = self.trace.values[argument.index]
        step = None if value.fed or value.random else self.statics.step(value)
        if step is None:
            raise NoBeliefError("a weight that depends on the data")
        return step

    def _channels_of(self, op: Op, step: int, axis: int) -> Labelled:
        shape = self.trace.values[op.outputs[0]].shape
        axis %= len(shape)
        return Labelled(step, shape[axis], layout.along(axis, shape[axis], len(shape)))

    def _apply(self, function: Callable[..., Any], state: Labelled, **options: Any) -> Labelled:
        return replace(state, step=self.program.add(Apply((state.step,), function, options)))

    def _both(self, function: Callable[..., Any], a: Labelled, b: Labelled) -> Labelled:
        if a.labels.shape == b.labels.shape and torch.equal(a.labels, b.labels) and a.size == b.size:
            return Labelled(combined(self.program, function, [a.step, b.step]), a.size, a.labels)
        labels, of_a, of_b = layout.pair(a.labels, b.labels, b.size)
        if of_a.numel() > layout.LARGEST:
            raise NoBeliefError("a belief of too many entries")
        steps = [selected(self.program, a.step, of_a, a.size), selected(self.program, b.step, of_b, b.size)]
        return Labelled(combined(self.program, function, steps), of_a.numel(), labels)

    def _random(self, argument: Any) -> bool:
        return isinstance(argument, Ref) and self.trace.values[argument.index].random

    def _with_constant(self, state: Labelled, value: float, labels: Tensor) -> Labelled:
        """Labels may now hold the entry after the last: a number that is always the same."""
        constant = self.program.add(Static((self.program.constant(torch.tensor([value])),)))
        step = combined(self.program, algebra.concatenate, [state.step, constant])
        return Labelled(step, state.size + 1, layout.reduce(labels))

    def _terms(self, index: int) -> dict[int, Coefficient]:
        return self.terms.get(index, {index: 1.0})

    def _times(self, a: Coefficient, b: Coefficient) -> Coefficient:
        if isinstance(a, Labelled) and isinstance(b, Labelled):
            return self._both(algebra.product, a, b)
        if isinstance(a, Labelled) or isinstance(b, Labelled):
            state, factor = (a, b) if isinstance(a, Labelled) else (b, a)
            assert isinstance(state, Labelled)
            return state if factor == 1 else self._apply(algebra.scale, state, factor=factor)
        return a * b

    def _plus(self, a: Coefficient, b: Coefficient) -> Coefficient:
        if isinstance(a, Labelled) and isinstance(b, Labelled):
            return self._both(algebra.add, a, b)
        if isinstance(a, Labelled) or isinstance(b, Labelled):
            state, offset = (a, b) if isinstance(a, Labelled) else (b, a)
            assert isinstance(state, Labelled)
            return self._apply(algebra.shift, state, offset=offset)
        return a + b

    def _weighted(self, out: int, of: int, factor: Coefficient) -> None:
        """Remember that a value is another one times a factor."""
        self.terms[out] = {base: self._times(own, factor) for base, own in self._terms(of).items()}

    def _added(self, out: int, a: int, b: int, factor: float) -> Labelled | None:
        """Remember that a value is a + factor b. Where the two have a term in common, as in x + α (f - x), the belief
        that comes of adding up its coefficients; else None."""
        first, second = self._terms(a), self._terms(b)
        if len(first) + len(second) > _MOST_TERMS:
            return None
        terms, shared = dict(first), False
        for base, own in second.items():
            weighted = self._times(own, factor)
            shared = shared or base in first
            terms[base] = self._plus(first[base], weighted) if base in first else weighted
        self.terms[out] = terms
        states = {base: self.states.get(base) for base in terms}
        if not shared or any(not isinstance(state, Labelled) for state in states.values()):
            return None
        total: Labelled | None = None
        for base, factor_of in terms.items():
            state = self._times(states[base], factor_of)  # type: ignore[arg-type]
            assert isinstance(state, Labelled)
            total = state if total is None else self._both(algebra.add, total, state)
        return total

    def _summed(self, state: Labelled, axes: list[int], shape: tuple[int, ...], *, mean: bool = False) -> Labelled:
        """The sum or mean over axes, which stay with size 1.

        Different entries are taken as independent; positions of one entry are neither that nor alike: see `averaged`.
        """
        labels, rows, repeats = layout.gathered(state.labels, axes, shape)
        total = torch.Size([shape[axis] for axis in axes]).numel()
        entries, counts = layout.counted(rows)
        positions = counts * repeats
        weights = positions / total if mean else positions
        if entries.shape[1] == 1 and bool((positions == 1).all() and (weights == 1).all()):
            return Labelled(selected(self.program, state.step, entries, state.size), entries.shape[0], labels)
        spread = weights.square() / positions.clamp(min=1).sqrt()
        parts = (entries, weights.to(torch.float32), spread.to(torch.float32))
        step = self.program.add(WeightedSum((state.step, *(self.program.constant(part) for part in parts))))
        return Labelled(step, entries.shape[0], labels)
