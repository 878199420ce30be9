"""Transition `weights`: what is believed of every tensor, from parameters alone, by the rules of `kalmannorm.moments`.

Reads a trace and adds steps to a program. Each tensor gets a step with K moments and the labels that say which of them
each element has, or an `Unknown` with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn import functional as F

from kalmannorm import moments as algebra
from kalmannorm._wiring.program import AffineBelief, Apply, Detach, NormBelief, Program, Standardized
from kalmannorm._wiring.recording.trace import Op, Ref, Trace
from kalmannorm._wiring.rules import arguments, layout, names, relabel
from kalmannorm._wiring.rules.products import Products
from kalmannorm._wiring.rules.reader import State, Unknown
from kalmannorm._wiring.rules.relabel import Labelled, NoBeliefError
from kalmannorm._wiring.rules.unary import UNARY, activation_options, averaged, gated
from kalmannorm._wiring.weak_modules import Weakly


class Beliefs(Products):
    """Interprets a trace; `prior(call)` then gives the step that predicts what a norm reads."""

    def __init__(self, trace: Trace, program: Program, identities: list[int], norm_steps: dict[int, int]) -> None:
        super().__init__(trace, program)
        self.identities, self.norm_steps = identities, norm_steps
        for op in trace.ops:
            if op.norm is not None or any(trace.values[i].fed for i in op.inputs):
                self._interpret(op)

    def prior(self, call: int) -> int | Unknown:
        """The step whose moments are the prior of this call, (1, C)."""
        value = self.trace.values[self.trace.norms[call].value]
        state = self.state(value)
        return state if isinstance(state, Unknown) else self.by_channel(state, 1, value.shape)

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
            if isinstance(state, Labelled) and not layout.broadcasts(state.labels, value.shape):
                state = Unknown(f"no rule for {op.name}{where}: shapes do not agree")
            if isinstance(state, Labelled) and value.cut:
                state = replace(state, step=self.program.add(Detach((state.step,))))
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
            ({"normalize"}, self._normalize),
            ({"einsum"}, self._einsum),
            ({"matmul", "bmm"}, self._matmul),
            ({"scaled_dot_product_attention"}, self._attention),
        ):
            if name in table:
                return rule
        return None

    def _norm(self, op: Op) -> State:
        assert op.norm is not None
        norm = self.trace.norms[op.norm].module
        shape = self.trace.values[op.outputs[0]].shape
        identity = self.identities[op.norm]
        if identity not in self.norm_steps:
            self.norm_steps[identity] = self.program.add(NormBelief((), Weakly(norm), shape[1]))
        return Labelled(self.norm_steps[identity], shape[1], layout.along(1, shape[1], len(shape)))

    def _same(self, op: Op) -> State:
        argument = op.args[0] if op.args else op.kwargs.get("input")
        if isinstance(argument, Ref) and argument.index in self.averages:
            self.averages[op.outputs[0]] = self.averages[argument.index]
        if isinstance(argument, Ref):
            self.terms[op.outputs[0]] = self._terms(argument.index)
        return self._known(argument)

    def _move(self, op: Op) -> State | list[State]:
        parts = relabel.operands(op)
        self._follow_average(op, parts[0])
        return list(relabel.moved(self.program, self.trace, op, [self._known(ref) for ref in parts]))

    def _pool(self, op: Op) -> State | list[State]:
        argument = op.args[0] if op.args else op.kwargs["input"]
        state, shape = self._known(argument), self._shape(argument)
        if any(size > 1 for size in state.labels.shape[2:]):
            # Padded before: every channel is a mixture with the padding, and stays one.
            state = self._channels_of(op, self.by_channel(state, 1, shape), 1)
        if op.name.startswith("adaptive_avg"):
            window = torch.Size(shape).numel() / torch.Size(self.trace.values[op.outputs[0]].shape).numel()
            state = self._apply(averaged, state, positions=max(round(window), 1))
        elif op.name.startswith("avg_pool"):
            kernel = arguments.named(op, {"input": None, "kernel_size": 1})["kernel_size"]
            rank = len(shape) - 2
            sizes = [kernel] * rank if isinstance(kernel, int) else list(kernel) * (rank // len(kernel))
            state = self._apply(averaged, state, positions=math.prod(sizes))
        return [state, *[Unknown("indices")] * (len(op.outputs) - 1)]

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

    def _linear(self, op: Op) -> State:
        given = arguments.named(op, arguments.LINEAR)
        state = self._known(given["input"])
        weight, bias = self._static(given["weight"]), self._static(given["bias"])
        inputs = [self.by_channel(state, -1, self._shape(given["input"])), weight, *([] if bias is None else [bias])]
        step = self.program.add(Apply(tuple(inputs), algebra.linear))  # type: ignore[arg-type]
        return self._channels_of(op, step, -1)

    def _other_norm(self, op: Op) -> State:
        layered = op.name in ("layer_norm", "rms_norm")
        grouped = op.name == "group_norm"
        signature = arguments.RMS_NORM if op.name == "rms_norm" else arguments.LAYER_NORM
        given = arguments.named(
            op, signature if layered else arguments.GROUP_NORM if grouped else arguments.MOMENTS_NORM
        )
        shape = self._shape(given["input"])
        parts = {part: self._static(given[part]) for part in ("weight", "bias") if given.get(part) is not None}
        steps: tuple[int, ...] = tuple(step for step in parts.values() if step is not None)
        axes = len(given["normalized_shape"]) if layered else 1
        tail = shape[len(shape) - axes :] if layered else shape[1:2]
        size = torch.Size(tail).numel()
        step = self.program.add(AffineBelief(steps, tuple(parts), size))
        state = self.state(self.trace.values[given["input"].index])
        if isinstance(state, Labelled) and axes == 1 and (layered or grouped):
            # Norms across channels leave each its own mean and variance, of which something is known here.
            groups = 1 if layered else given["num_groups"]
            before = self.by_channel(state, -1 if layered else 1, shape)
            step = self.program.add(Standardized((before, *steps), tuple(parts), groups, op.name != "rms_norm"))
        if not layered:
            return Labelled(step, size, layout.along(1, size, len(shape)))
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
        first, second = self._known(a), self._known(b)
        together = self._added(op.outputs[0], a.index, b.index, sign * alpha)
        if together is not None:
            return together
        if alpha != 1:
            second = self._apply(algebra.scale, second, factor=alpha)
        return self._both(algebra.add if sign == 1 else algebra.subtract, first, second)

    def _product(self, op: Op) -> State:
        given = arguments.named(op, arguments.TWO)
        a, b = given["input"], given["other"]
        for one, other in ((a, b), (b, a)):
            if self._random(other):
                self._weighted(op.outputs[0], one.index, 1.0)
                return self._known(one)  # stochastic depth: the same in expectation
            if not isinstance(other, Ref):
                self._weighted(op.outputs[0], one.index, other)
                return self._apply(algebra.scale, self._known(one), factor=other)
        first, second = self._known(a), self._known(b)
        for one, other, factor in ((a, b, second), (b, a, first)):
            if not self.trace.values[other.index].fed and self._shape(one) == self.trace.values[op.outputs[0]].shape:
                self._weighted(op.outputs[0], one.index, factor)
        if self._shape(a) == self._shape(b):
            for x, gate in ((first, second), (second, first)):
                name = gated(self.program, x.step, gate.step)
                if name is not None and torch.equal(x.labels, gate.labels):
                    return self._apply(algebra_gate, x, name=name)
        return self._both(algebra.product, first, second)

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

    def _unfold(self, op: Op) -> State | list[State]:
        if op.func is not F.unfold:
            return self._move(op)
        given = op.args[0] if op.args else op.kwargs["input"]
        state, shape = self._known(given), self._shape(given)
        # F.unfold pads with zeros and takes no integers.
        labels = (state.labels + 1).double().expand(shape)
        unfolded = relabel.on_labels(self.trace, op, labels).round().long() - 1
        return self._with_constant(state, 0.0, torch.where(unfolded < 0, state.size, unfolded))


def algebra_gate(m: algebra.Moments, name: str) -> algebra.Moments:
    """x f(x), for code that writes SiLU or Hardswish as a product."""
    function = getattr(F, name)
    return algebra.through(m, lambda x: x * function(x))
