"""Transition `weights`: what is believed of every tensor, from parameters alone, by the rules of `kalmannorm.moments`.

Reads a trace and adds steps to a program. Each tensor gets a step with K moments and the labels that say which of them
each element has, or an `Unknown` with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kalmannorm import moments as algebra
from kalmannorm.graph import arguments, layout, moves, names
from kalmannorm.graph.moves import Labelled, NoBeliefError
from kalmannorm.graph.program import (
    AffineBelief,
    Apply,
    Gather,
    Mix,
    NormBelief,
    Program,
    Softmax,
    Static,
    combined,
    selected,
)
from kalmannorm.graph.statics import Statics
from kalmannorm.graph.trace import Op, Ref, Trace, Value
from kalmannorm.graph.unary import UNARY, activation_options, gated


@dataclass(frozen=True)
class Unknown:
    reason: str


State = Labelled | Unknown


class Beliefs:
    """Interprets a trace; `prior(call)` then gives the step that predicts what a norm reads."""

    def __init__(self, trace: Trace, program: Program, identities: list[int], norm_steps: dict[int, int]) -> None:
        self.trace, self.program, self.identities = trace, program, identities
        self.statics = Statics(trace, program)
        self.states: dict[int, State] = {}
        self.averages: dict[int, int] = {}  # values that sum to 1 along an axis, as softmax makes them
        self.norm_steps = norm_steps
        for op in trace.ops:
            if op.norm is not None or any(trace.values[i].fed for i in op.inputs):
                self._interpret(op)

    def prior(self, call: int) -> int | Unknown:
        """The step whose moments are the prior of this call, (1, C)."""
        value = self.trace.values[self.trace.norms[call].value]
        state = self.state(value)
        return state if isinstance(state, Unknown) else self.by_channel(state, 1, value.shape)

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

    def _interpret(self, op: Op) -> None:
        rule = self._rule(op)
        where = f" ({op.place})" if op.place else ""
        try:
            result = Unknown(f"no rule for {op.name}{where}") if rule is None else rule(op)
        except NoBeliefError as reason:
            result = Unknown(str(reason) if reason.told else f"{reason}{where}")
        except Exception as error:  # a call that its rule did not think of
            result = Unknown(f"{op.name}: {type(error).__name__}: {error}{where}")
        results = result if isinstance(result, list) else [result] * len(op.outputs)
        if len(results) != len(op.outputs):
            results = [Unknown(f"no rule for {op.name}{where}: {len(op.outputs)} results")] * len(op.outputs)
        for index, state in zip(op.outputs, results, strict=True):
            value = self.trace.values[index]
            if isinstance(state, Labelled) and not _broadcasts(state.labels, value.shape):
                state = Unknown(f"no rule for {op.name}{where}: shapes do not agree")
            self.states[index] = state

    def _rule(self, op: Op) -> Callable[[Op], State | list[State]] | None:
        name = op.name
        if op.norm is not None:
            return self._norm
        for table, rule in (
            (names.SAME, self._same),
            (names.MOVES, self._move),
            (names.POOLS, self._pool),
            (names.MEANS, self._reduce),
            (names.CONVOLUTIONS, self._convolution),
            (names.TRANSPOSED, self._convolution),
            ({"linear"}, self._linear),
            (names.OTHER_NORMS, self._other_norm),
            (names.SUMS, self._sum),
            (names.PRODUCTS, self._product),
            (names.QUOTIENTS, self._quotient),
            (UNARY, self._unary),
            ({"pad"}, self._pad),
            ({"unfold"}, self._unfold),
            ({"softmax"}, self._softmax),
            ({"matmul", "bmm"}, self._matmul),
            ({"scaled_dot_product_attention"}, self._attention),
        ):
            if name in table:
                return rule
        return None

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

    def _norm(self, op: Op) -> State:
        assert op.norm is not None
        norm = self.trace.norms[op.norm].module
        shape = self.trace.values[op.outputs[0]].shape
        identity = self.identities[op.norm]
        if identity not in self.norm_steps:
            self.norm_steps[identity] = self.program.add(NormBelief((), norm, shape[1]))
        return Labelled(self.norm_steps[identity], shape[1], layout.along(1, shape[1], len(shape)))

    def _same(self, op: Op) -> State:
        argument = op.args[0] if op.args else op.kwargs.get("input")
        if isinstance(argument, Ref) and argument.index in self.averages:
            self.averages[op.outputs[0]] = self.averages[argument.index]
        return self._known(argument)

    def _move(self, op: Op) -> State | list[State]:
        parts = moves.operands(op)
        self._follow_average(op, parts[0])
        return list(moves.moved(self.program, self.trace, op, [self._known(ref) for ref in parts]))

    def _follow_average(self, op: Op, argument: Ref) -> None:
        """Where the axis of a softmax goes when two axes are swapped; other moves lose it."""
        axis, rank = self.averages.get(argument.index), len(self._shape(argument))
        if axis is not None and op.name in ("transpose", "swapaxes", "swapdims") and len(op.args) == 3:
            one, other = (int(a) % rank for a in op.args[1:])
            self.averages[op.outputs[0]] = {one: other, other: one}.get(axis, axis)

    def _pool(self, op: Op) -> State | list[State]:
        state = self._known(op.args[0] if op.args else op.kwargs["input"])
        if any(size > 1 for size in state.labels.shape[2:]):
            # Padded before: every channel is a mixture with the padding, and stays one.
            step = self.by_channel(state, 1, self._shape(op.args[0]))
            state = self._channels_of(op, step, 1)
        return [state, *[Unknown("indices")] * (len(op.outputs) - 1)]

    def _reduce(self, op: Op) -> State | list[State]:
        given = arguments.named(op, arguments.REDUCTION)
        state, shape = self._known(given["input"]), self._shape(given["input"])
        if isinstance(given["dim"], Ref):
            raise NoBeliefError(f"no rule for {op.name} of two features")
        rank = len(shape)
        dims = given["dim"]
        axes = list(range(rank)) if dims is None else [dims] if isinstance(dims, int) else list(dims)
        axes = [axis % rank for axis in axes]
        labels, entries, repeats = layout.gathered(state.labels, axes, shape)
        total = torch.Size([shape[axis] for axis in axes]).numel()
        if op.name not in ("mean", "sum") and entries.shape[1] > 1:
            raise NoBeliefError(f"no rule for {op.name} over channels")
        factor = repeats / total if op.name == "mean" else repeats if op.name == "sum" else 1
        if entries.shape[1] == 1 and factor == 1:
            step = selected(self.program, state.step, entries, state.size)
        else:
            step = self.program.add(Gather((state.step, self.program.constant(entries)), float(factor)))
        if not given["keepdim"]:
            for axis in sorted(axes, reverse=True):
                labels = labels.squeeze(axis)
        return [Labelled(step, entries.shape[0], labels), *[Unknown("indices")] * (len(op.outputs) - 1)]

    def _convolution(self, op: Op) -> State:
        transposed = op.name in names.TRANSPOSED
        given = arguments.named(op, arguments.TRANSPOSED if transposed else arguments.CONVOLUTION)
        state, shape = self._known(given["input"]), self._shape(given["input"])
        rank = int(op.name[-2])
        if len(shape) != rank + 2:
            raise NoBeliefError(f"{op.name} without a batch axis")
        weight, bias = self._static(given["weight"]), self._static(given["bias"])
        options = {name: given[name] for name in given if name not in ("input", "weight", "bias")}
        options |= {"input_size": shape[2:], "transposed": transposed}
        inputs = [self.by_channel(state, 1, shape), weight, *([] if bias is None else [bias])]
        step = self.program.add(Apply(tuple(inputs), algebra.convolution, options))  # type: ignore[arg-type]
        return self._channels_of(op, step, 1)

    def _channels_of(self, op: Op, step: int, axis: int) -> Labelled:
        shape = self.trace.values[op.outputs[0]].shape
        axis %= len(shape)
        return Labelled(step, shape[axis], layout.along(axis, shape[axis], len(shape)))

    def _linear(self, op: Op) -> State:
        given = arguments.named(op, arguments.LINEAR)
        state = self._known(given["input"])
        weight, bias = self._static(given["weight"]), self._static(given["bias"])
        inputs = [self.by_channel(state, -1, self._shape(given["input"])), weight, *([] if bias is None else [bias])]
        step = self.program.add(Apply(tuple(inputs), algebra.linear))  # type: ignore[arg-type]
        return self._channels_of(op, step, -1)

    def _other_norm(self, op: Op) -> State:
        layered = op.name in ("layer_norm", "rms_norm")
        given = arguments.named(
            op,
            arguments.LAYER_NORM
            if layered
            else arguments.GROUP_NORM
            if op.name == "group_norm"
            else arguments.MOMENTS_NORM,
        )
        shape = self._shape(given["input"])
        parts = {part: self._static(given[part]) for part in ("weight", "bias") if given[part] is not None}
        axes = len(given["normalized_shape"]) if layered else 1
        size = torch.Size(shape[len(shape) - axes :] if layered else shape[1:2]).numel()
        steps: tuple[int, ...] = tuple(step for step in parts.values() if step is not None)
        step = self.program.add(AffineBelief(steps, tuple(parts), size))
        if not layered:
            return Labelled(step, size, layout.along(1, size, len(shape)))
        tail = shape[len(shape) - axes :]
        return Labelled(step, size, torch.arange(size).reshape((1,) * (len(shape) - axes) + tuple(tail)))

    def _sum(self, op: Op) -> State:
        given = arguments.named(op, arguments.TWO)
        a, b = given["input"], given["other"]
        if op.name == "rsub":
            a, b = b, a
        sign = 1 if op.name == "add" else -1
        alpha = given["alpha"]
        if not isinstance(b, Ref):
            return self._apply(algebra.shift, self._known(a), offset=sign * alpha * b)
        if not isinstance(a, Ref):
            return self._apply(algebra.shift, self._apply(algebra.scale, self._known(b), factor=sign * alpha), offset=a)
        second = self._known(b)
        if alpha != 1:
            second = self._apply(algebra.scale, second, factor=alpha)
        return self._both(algebra.add if sign == 1 else algebra.subtract, self._known(a), second)

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

    def _product(self, op: Op) -> State:
        given = arguments.named(op, arguments.TWO)
        a, b = given["input"], given["other"]
        for one, other in ((a, b), (b, a)):
            if self._random(other):
                return self._known(one)  # stochastic depth: the same in expectation
            if not isinstance(other, Ref):
                return self._apply(algebra.scale, self._known(one), factor=other)
        first, second = self._known(a), self._known(b)
        if self._shape(a) == self._shape(b):
            for x, gate in ((first, second), (second, first)):
                name = gated(self.program, x.step, gate.step)
                if name is not None and torch.equal(x.labels, gate.labels):
                    return self._apply(algebra_gate, x, name=name)
        return self._both(algebra.product, first, second)

    def _quotient(self, op: Op) -> State:
        given = arguments.named(op, arguments.TWO)
        a, b = given["input"], given["other"]
        if self._random(b):
            return self._known(a)
        if not isinstance(b, Ref):
            return self._apply(algebra.scale, self._known(a), factor=1 / b)
        if self.trace.values[b.index].fed:
            raise NoBeliefError("no rule for the quotient of two features")
        inverse = self.statics.reciprocal(self.trace.values[b.index])
        if inverse is None:
            raise NoBeliefError("a constant that cannot be made again")
        shape = self._shape(b)
        size = torch.Size(shape).numel()
        divisor = Labelled(self.program.add(Static((inverse,))), size, torch.arange(size).reshape(shape))
        return self._both(algebra.product, self._known(a), divisor)

    def _unary(self, op: Op) -> State:
        state = self._known(op.args[0] if op.args else op.kwargs["input"])
        if op.name == "prelu":
            given = arguments.named(op, {"input": None, "weight": None})
            weight = self._static(given["weight"])
            shape = self._shape(given["input"])
            assert weight is not None
            step = self.program.add(Apply((self.by_channel(state, 1, shape), weight), algebra.prelu))
            return self._channels_of(op, step, 1)
        options = activation_options(op)
        if options is None:
            raise NoBeliefError(f"no rule for {op.name} with these options")
        return self._apply(UNARY[op.name], state, **options)

    def _pad(self, op: Op) -> State:
        given = arguments.named(op, arguments.PAD)
        state, shape = self._known(given["input"]), self._shape(given["input"])
        pad = list(given["pad"])
        value = float(given["value"] or 0)
        # A border like the rest, or one of -inf, which the maximum that follows never takes.
        if given["mode"] != "constant" or math.isinf(value):
            if any(size > 1 for size in state.labels.shape[len(shape) - len(pad) // 2 :]):
                raise NoBeliefError("padding of channels")
            return state
        labels = F.pad(state.labels.expand(shape), pad, value=state.size)
        return self._with_constant(state, value, labels)

    def _with_constant(self, state: Labelled, value: float, labels: Tensor) -> Labelled:
        """Labels may now hold the entry after the last: a number that is always the same."""
        constant = self.program.add(Static((self.program.constant(torch.tensor([value])),)))
        step = combined(self.program, algebra.concatenate, [state.step, constant])
        return Labelled(step, state.size + 1, layout.reduce(labels))

    def _unfold(self, op: Op) -> State | list[State]:
        if op.func is not F.unfold:
            return self._move(op)
        given = op.args[0] if op.args else op.kwargs["input"]
        state, shape = self._known(given), self._shape(given)
        # F.unfold pads with zeros and takes no integers.
        labels = (state.labels + 1).double().expand(shape)
        unfolded = moves.on_labels(self.trace, op, labels).round().long() - 1
        return self._with_constant(state, 0.0, torch.where(unfolded < 0, state.size, unfolded))

    def _softmax(self, op: Op) -> State:
        given = arguments.named(op, arguments.SOFTMAX)
        shape = self._shape(given["input"])
        axis = given["dim"] % len(shape)
        self.averages[op.outputs[0]] = axis
        state = self._known(given["input"])
        return replace(state, step=self.program.add(Softmax((state.step,), shape[axis])))

    def _average_of(self, state: Labelled, axis: int, rank: int) -> Labelled:
        """A weighted average over positions: as pooling, the moments stay."""
        labels = state.labels.reshape((1,) * (rank - state.labels.dim()) + tuple(state.labels.shape))
        if labels.shape[axis] > 1:
            raise NoBeliefError("an average over different channels")
        return replace(state, labels=labels)

    def _matmul(self, op: Op) -> State:
        a = op.args[0]
        b: Ref = op.args[1] if len(op.args) > 1 else op.kwargs["other" if "other" in op.kwargs else "mat2"]
        rank = len(self.trace.values[op.outputs[0]].shape)
        value = self.trace.values[b.index]
        if not value.fed and len(value.shape) == 2:
            state = self._known(a)
            weight = self.statics.transposed(value)
            if weight is not None:
                inputs = (self.by_channel(state, -1, self._shape(a)), weight)
                return self._channels_of(op, self.program.add(Apply(inputs, algebra.linear)), -1)
        for one, other, contracted, averaged in ((a, b, -1, -2), (b, a, -2, -1)):
            rank_of_weights = len(self._shape(one))
            if self.averages.get(one.index) == (rank_of_weights + contracted) % rank_of_weights:
                return self._average_of(self._known(other), averaged, rank)
        raise NoBeliefError("no rule for the matrix product of two features")

    def _attention(self, op: Op) -> State:
        given = arguments.named(op, arguments.ATTENTION)
        return self._average_of(self._known(given["value"]), -2, len(self._shape(given["value"])))


def algebra_gate(m: algebra.Moments, name: str) -> algebra.Moments:
    """x f(x), for code that writes SiLU or Hardswish as a product."""
    function = getattr(F, name)
    return algebra.through(m, lambda x: x * function(x))


def _broadcasts(labels: Tensor, shape: tuple[int, ...]) -> bool:
    return labels.dim() == len(shape) and all(size in (1, full) for size, full in zip(labels.shape, shape, strict=True))
