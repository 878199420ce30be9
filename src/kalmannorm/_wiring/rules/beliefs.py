"""Transition `weights`: the belief about every tensor, from parameters alone, by the rules of `kalmannorm.moments`.

`Beliefs` reads a trace and adds steps to a program. Each tensor gets a step with K moments, and labels that say which
of them each element has. If that is not possible, it gets an `Unknown` with the reason. The rules come first, one
method for each kind of operation. The methods that the rules share follow.

The model's input is taken as N(0, 1). This is only used where the input is mixed with the output of a norm, for example
in a residual stream that begins at a convolution of the input. A norm that depends on the input alone has no prior.
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
from kalmannorm._wiring.program import (
    AffineBelief,
    Apply,
    Detach,
    InputBelief,
    Mix,
    NormBelief,
    Program,
    Softmax,
    Standardized,
    Static,
    WeightedSum,
    combined,
    selected,
)
from kalmannorm._wiring.recording.trace import Op, Ref, Trace, Value
from kalmannorm._wiring.rules import arguments, layout, masks, names, relabel
from kalmannorm._wiring.rules.relabel import Labelled, NoBeliefError
from kalmannorm._wiring.rules.statics import Statics
from kalmannorm._wiring.rules.unary import (
    UNARY,
    activation_options,
    averaged,
    gated,
    inverse_root,
    reciprocal,
    second_moment,
)
from kalmannorm._wiring.weak_modules import WeakModule


@dataclass(frozen=True)
class Unknown:
    reason: str


Belief = Labelled | Unknown
Coefficient = float | Labelled  # a number, or a number without variance for each element
_MOST_TERMS = 64
_FROM_INPUT = "fed by the model's input"


class Beliefs:
    """Interprets a trace. `prior(call)` then returns the step that predicts the input of a norm."""

    def __init__(self, trace: Trace, program: Program, identities: list[int], norm_steps: dict[int, int]) -> None:
        self.trace, self.program = trace, program
        self.statics = Statics(trace, program)
        self.beliefs: dict[int, Belief] = {}
        self.sums_to_one: dict[int, int] = {}  # values that sum to 1 along an axis, such as outputs of softmax
        self.terms: dict[int, dict[int, Coefficient]] = {}  # values that are weighted sums of other values
        self.raw: set[int] = set()  # values that no layer has computed from the input, such as the input itself
        self.input_step: int | None = None
        self.identities, self.norm_steps = identities, norm_steps
        for op in trace.ops:
            if op.norm is not None or any(trace.values[i].fed for i in op.inputs):
                self._interpret(op)

    def prior(self, call: int) -> int | Unknown:
        """The step whose moments are the prior of this call, (1, C)."""
        value = self.trace.values[self.trace.norms[call].value]
        state = self.belief(value)
        if isinstance(state, Unknown):
            return state
        step = self.by_channel(state, 1, value.shape)
        # Beliefs about the input alone would need to be exact: nothing that the model learns corrects them.
        known = self.program.leaves(step, (NormBelief, AffineBelief)) or not self._of_input(step)
        return step if known else Unknown(_FROM_INPUT)

    def _interpret(self, op: Op) -> None:
        rule = self._rule(op)
        where = f" ({op.place})" if op.place else ""
        try:
            result = Unknown(f"no rule for {op.name}{where}") if rule is None else rule(op)
        except NoBeliefError as reason:
            named = "" if op.name in str(reason) else f": {op.name}"
            result = Unknown(str(reason) if reason.told else f"{reason}{named}{where}")
        except Exception as error:  # a kind of call that its rule does not handle
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
            self.beliefs[index] = state
        fed = [i for i in op.inputs if self.trace.values[i].fed]
        if op.norm is None and op.name not in names.LAYERS | names.OTHER_NORMS and all(i in self.raw for i in fed):
            self.raw.update(op.outputs)

    def _rule(self, op: Op) -> Callable[[Op], Belief | list[Belief]] | None:
        name = op.name
        if op.norm is not None:
            return self._norm
        for table, rule in (
            (names.SAME, self._same),
            (names.REARRANGEMENTS, self._rearrange),
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
            ({"glu"}, self._glu),
            ({"pad"}, self._pad),
            ({"where"}, self._where),
            ({"masked_fill"}, self._masked_fill),
            ({"setitem"}, self._setitem),
            ({"copy"}, self._copy),
            ({"unfold"}, self._unfold),
            ({"softmax"}, self._softmax),
            ({"normalize"}, self._unit_length),
            ({"einsum"}, self._einsum),
            ({"matmul", "bmm"}, self._matmul),
            ({"scaled_dot_product_attention"}, self._attention),
        ):
            if name in table:
                return rule
        return None

    def _norm(self, op: Op) -> Belief:
        assert op.norm is not None
        norm = self.trace.norms[op.norm].module
        shape = self.trace.values[op.outputs[0]].shape
        identity = self.identities[op.norm]
        if identity not in self.norm_steps:
            self.norm_steps[identity] = self.program.add(NormBelief((), WeakModule(norm), shape[1]))
        return Labelled(self.norm_steps[identity], shape[1], layout.along(1, shape[1], len(shape)))

    def _same(self, op: Op) -> Belief:
        argument = op.args[0] if op.args else op.kwargs.get("input", op.kwargs.get("data"))
        if op.name == "new_tensor":
            argument = op.args[1] if len(op.args) > 1 else op.kwargs.get("data")
        if isinstance(argument, Ref) and argument.index in self.sums_to_one:
            self.sums_to_one[op.outputs[0]] = self.sums_to_one[argument.index]
        if isinstance(argument, Ref):
            self.terms[op.outputs[0]] = self._terms(argument.index)
        return self._known(argument)

    def _rearrange(self, op: Op) -> Belief | list[Belief]:
        parts = relabel.operands(op)
        self._follow_average(op, parts[0])
        return list(relabel.relabelled(self.program, self.trace, op, [self._known(ref) for ref in parts]))

    def _pool(self, op: Op) -> Belief | list[Belief]:
        argument = op.args[0] if op.args else op.kwargs["input"]
        state, shape = self._known(argument), self._shape(argument)
        if any(size > 1 for size in state.labels.shape[2:]):
            # The tensor was padded before: every channel is already a mixture with the padding, and stays one.
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

    def _convolution(self, op: Op) -> Belief:
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

    def _linear(self, op: Op) -> Belief:
        given = arguments.named(op, arguments.LINEAR)
        state = self._known(given["input"])
        weight, bias = self._static(given["weight"]), self._static(given["bias"])
        inputs = [self.by_channel(state, -1, self._shape(given["input"])), weight, *([] if bias is None else [bias])]
        step = self.program.add(Apply(tuple(inputs), algebra.linear))  # type: ignore[arg-type]
        return self._channels_of(op, step, -1)

    def _other_norm(self, op: Op) -> Belief:
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
        state = self.belief(self.trace.values[given["input"].index])
        if isinstance(state, Labelled) and axes == 1 and (layered or grouped) and not self._of_input(state.step):
            # A norm across channels leaves each channel its own mean and variance. The belief contains some of this.
            groups = 1 if layered else given["num_groups"]
            before = self.by_channel(state, -1 if layered else 1, shape)
            step = self.program.add(Standardized((before, *steps), tuple(parts), groups, op.name != "rms_norm"))
        if not layered:
            return Labelled(step, size, layout.along(1, size, len(shape)))
        return Labelled(step, size, torch.arange(size).reshape((1,) * (len(shape) - axes) + tuple(tail)))

    def _sum(self, op: Op) -> Belief:
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
        together = self._record_sum(op.outputs[0], a.index, b.index, sign * alpha)
        if together is not None:
            return together
        if alpha != 1:
            second = self._apply(algebra.scale, second, factor=alpha)
        return self._both(algebra.add if sign == 1 else algebra.subtract, first, second)

    def _product(self, op: Op) -> Belief:
        given = arguments.named(op, arguments.TWO)
        a, b = given["input"], given["other"]
        for one, other in ((a, b), (b, a)):
            if self._random(other):
                self._record_multiple(op.outputs[0], one.index, 1.0)
                return self._known(one)  # stochastic depth: unchanged in expectation
            if not isinstance(other, Ref):
                self._record_multiple(op.outputs[0], one.index, other)
                return self._apply(algebra.scale, self._known(one), factor=other)
        for one, other in ((a, b), (b, a)):
            if self._shape(one) == self.trace.values[op.outputs[0]].shape and self._hides(other, one):
                return self._known(one)
        first, second = self._known(a), self._known(b)
        self._factors(a, b)
        for one, other, factor in ((a, b, second), (b, a, first)):
            if not self.trace.values[other.index].fed and self._shape(one) == self.trace.values[op.outputs[0]].shape:
                self._record_multiple(op.outputs[0], one.index, factor)
        if self._shape(a) == self._shape(b):
            for x, gate in ((first, second), (second, first)):
                name = gated(self.program, x.step, gate.step)
                if name is not None and torch.equal(x.labels, gate.labels):
                    return self._apply(algebra_gate, x, name=name)
        return self._both(algebra.product, first, second)

    def _unary(self, op: Op) -> Belief:
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

    def _glu(self, op: Op) -> Belief:
        """a σ(b), for the halves a and b of the tensor."""
        given = arguments.named(op, arguments.GLU)
        state, shape = self._known(given["input"]), self._shape(given["input"])
        axis = given["dim"] % len(shape)
        sizes = [shape[i] if i == axis else size for i, size in enumerate(state.labels.shape)]
        halves = [layout.reduce(half) for half in state.labels.expand(sizes).chunk(2, axis)]
        value, gate = (replace(state, labels=half) for half in halves)
        return self._both(algebra.product, value, self._apply(algebra.sigmoid, gate))

    def _where(self, op: Op) -> Belief:
        if len(op.args) + len(op.kwargs) != 3:
            raise NoBeliefError("no rule for where with one argument")
        # The order of torch.where and that of the method x.where differ.
        method = op.func is torch.Tensor.where
        given = arguments.named(
            op, dict.fromkeys(("input", "condition", "other") if method else ("condition", "input", "other"))
        )
        for one, other, kept in ((given["input"], given["other"], True), (given["other"], given["input"], False)):
            if isinstance(one, Ref) and self.trace.values[one.index].fed:
                return self._masked(op, one, given["condition"], other, kept)
        raise NoBeliefError("no rule for where without features")

    def _masked_fill(self, op: Op) -> Belief:
        given = arguments.named(op, arguments.MASKED_FILL)
        return self._masked(op, given["input"], given["mask"], given["value"], False)

    def _masked(self, op: Op, one: Ref, mask: Any, other: Any, kept: bool) -> Belief:
        """The belief about `one` with a constant at some positions: see masks.py. `kept`: where the mask is true."""
        number = self._number(other)
        state, shape = self._known(one), self.trace.values[op.outputs[0]].shape
        if number is None:
            raise NoBeliefError(f"no rule for {op.name} of two features")
        if self._shape(one) == shape and masks.over_positions(self.trace, self.trace.values[mask.index], state.labels):
            return state
        if self.trace.values[mask.index].fed or self.trace.values[mask.index].random:
            raise NoBeliefError(f"no rule for {op.name} with a mask over channels that depends on the data")
        chosen = relabel.fixed(self.trace, mask).bool()
        labels = torch.where(chosen if kept else ~chosen, state.labels, state.size).expand(shape)
        return self._with_constant(state, number, labels)

    def _hides(self, mask: Ref, one: Ref) -> bool:
        """Whether a product with `mask` only hides positions of `one`."""
        value, state = self.trace.values[mask.index], self.belief(self.trace.values[one.index])
        if isinstance(state, Unknown) or not masks.is_mask(self.trace, value):
            return False
        return len(value.shape) <= state.labels.dim() and masks.over_positions(self.trace, value, state.labels)

    def _number(self, argument: Any) -> float | None:
        """The number that all elements of a constant have. None if there is no such number."""
        if not isinstance(argument, Ref):
            return float(argument) if isinstance(argument, (int, float)) else None
        value = self.trace.values[argument.index]
        if value.fed or value.random:
            return None
        if value.constant is not None and value.constant.numel():
            first = value.constant.flatten()[0]
            return float(first) if bool((value.constant == first).all()) else None
        made = None if value.op is None else self.trace.ops[value.op].name
        return {"zeros": 0.0, "new_zeros": 0.0, "zeros_like": 0.0, "ones": 1.0, "new_ones": 1.0, "ones_like": 1.0}.get(
            made or ""
        )

    def _setitem(self, op: Op) -> Belief:
        """Written elements get the labels of the source. A mask that depends on the data may only hide positions."""
        target, index, source = op.args
        shape = self._shape(target)
        number = self._number(source)
        if isinstance(index, Ref) and number is not None and self.trace.values[target.index].fed:
            state, mask = self._known(target), self.trace.values[index.index]
            if mask.dtype == torch.bool and masks.over_positions(self.trace, mask, state.labels, leading=True):
                return state
        where = relabel.fixed(self.trace, index)
        marks = torch.zeros(shape, dtype=torch.bool)
        marks[where] = True
        new, extent = self._written(source, number)
        entries = torch.zeros(shape, dtype=torch.long)
        entries[where] = new.labels.expand(extent)
        if bool(marks.all()):
            return replace(new, labels=layout.reduce(entries))
        old, extent = self._written(target, self._number(target))
        labels = torch.where(marks, entries + old.size, old.labels.expand(extent))
        step = combined(self.program, algebra.concatenate, [old.step, new.step])
        return Labelled(step, old.size + new.size, layout.reduce(labels))

    def _written(self, argument: Any, number: float | None) -> tuple[Labelled, tuple[int, ...]]:
        """The belief about one side of a write, with its shape. A constant with one number has one entry."""
        shape = self._shape(argument) if isinstance(argument, Ref) else ()
        if number is None:
            return self._known(argument), shape
        step = self.program.add(Static((self.program.constant(torch.tensor([number])),)))
        return Labelled(step, 1, torch.zeros((1,) * len(shape), dtype=torch.long)), shape

    def _copy(self, op: Op) -> Belief:
        state, rank = self._known(op.args[1]), len(self._shape(op.args[0]))
        return replace(state, labels=state.labels.reshape((1,) * (rank - state.labels.dim()) + state.labels.shape))

    def _pad(self, op: Op) -> Belief:
        given = arguments.named(op, arguments.PAD)
        state, shape = self._known(given["input"]), self._shape(given["input"])
        pad = list(given["pad"])
        value = float(given["value"] or 0)
        # The border has values like the rest. Or it is -inf, which the max pooling that follows never selects.
        if given["mode"] != "constant" or math.isinf(value):
            if any(size > 1 for size in state.labels.shape[len(shape) - len(pad) // 2 :]):
                raise NoBeliefError("padding of channels")
            return state
        labels = F.pad(state.labels.expand(shape), pad, value=state.size)
        return self._with_constant(state, value, labels)

    def _unfold(self, op: Op) -> Belief | list[Belief]:
        if op.func is not F.unfold:
            return self._rearrange(op)
        given = op.args[0] if op.args else op.kwargs["input"]
        state, shape = self._known(given), self._shape(given)
        # F.unfold pads with zeros and does not accept integers.
        labels = (state.labels + 1).double().expand(shape)
        unfolded = relabel.on_labels(self.trace, op, labels).round().long() - 1
        return self._with_constant(state, 0.0, torch.where(unfolded < 0, state.size, unfolded))

    def _reduce(self, op: Op) -> Belief | list[Belief]:
        given = arguments.named(op, arguments.REDUCTION)
        state, shape = self._known(given["input"]), self._shape(given["input"])
        if isinstance(given["dim"], Ref):
            raise NoBeliefError(f"no rule for {op.name} of two features")
        dims = given["dim"]
        axes = list(range(len(shape))) if dims is None else [dims] if isinstance(dims, int) else list(dims)
        axes = [axis % len(shape) for axis in axes]
        if op.name not in ("mean", "sum") and any(state.labels.shape[axis] > 1 for axis in axes):
            raise NoBeliefError(f"no rule for {op.name} over channels")
        result = self._summed(state, axes, shape, mean=op.name != "sum")
        if not given["keepdim"]:
            result = replace(result, labels=result.labels.squeeze(tuple(axes)))
        return [result, *[Unknown("indices")] * (len(op.outputs) - 1)]

    def _quotient(self, op: Op) -> Belief:
        given = arguments.named(op, arguments.TWO)
        a, b = given["input"], given["other"]
        if self._random(b):
            return self._known(a)
        if not isinstance(b, Ref):
            return self._apply(algebra.scale, self._known(a), factor=1 / b)
        if self.trace.values[b.index].fed:
            divisor = self._apply(reciprocal, self._known(b))
            self._factors(a, b)
            return self._both(algebra.product, self._known(a), divisor)
        inverse = self.statics.reciprocal(self.trace.values[b.index])
        if inverse is None:
            raise NoBeliefError("a constant that cannot be computed again")
        shape = self._shape(b)
        size = torch.Size(shape).numel()
        divisor = Labelled(self.program.add(Static((inverse,))), size, torch.arange(size).reshape(shape))
        return self._both(algebra.product, self._known(a), divisor)

    def _unit_length(self, op: Op) -> Belief:
        """x / |x|. The length of many values hardly varies, so it is taken as a constant."""
        given = arguments.named(op, arguments.NORMALIZE)
        state, shape = self._known(given["input"]), self._shape(given["input"])
        if given["p"] != 2 or not isinstance(given["dim"], int):
            raise NoBeliefError("no rule for normalize with these options")
        length = self._summed(self._apply(second_moment, state), [given["dim"] % len(shape)], shape)
        return self._both(algebra.product, state, self._apply(inverse_root, length))

    def _softmax(self, op: Op) -> Belief:
        given = arguments.named(op, arguments.SOFTMAX)
        shape = self._shape(given["input"])
        axis = given["dim"] % len(shape)
        self.sums_to_one[op.outputs[0]] = axis
        state = self._known(given["input"])
        return replace(state, step=self.program.add(Softmax((state.step,), shape[axis])))

    def _follow_average(self, op: Op, argument: Ref) -> None:
        """Follow the axis of a softmax if two axes are swapped. Other rearrangements lose it."""
        axis, rank = self.sums_to_one.get(argument.index), len(self._shape(argument))
        if axis is not None and op.name in ("transpose", "swapaxes", "swapdims") and len(op.args) == 3:
            one, other = (int(a) % rank for a in op.args[1:])
            self.sums_to_one[op.outputs[0]] = {one: other, other: one}.get(axis, axis)

    def _matmul(self, op: Op) -> Belief:
        a: Ref = op.args[0]
        b: Ref = op.args[1] if len(op.args) > 1 else op.kwargs["other" if "other" in op.kwargs else "mat2"]
        value, ranks = self.trace.values[b.index], (len(self._shape(a)), len(self._shape(b)))
        if not value.fed and ranks[1] == 2:
            weight = self.statics.transposed(value)
            if weight is not None:
                inputs = (self.by_channel(self._known(a), -1, self._shape(a)), weight)
                return self._channels_of(op, self.program.add(Apply(inputs, algebra.linear)), -1)
        if min(ranks) < 2:
            raise NoBeliefError("no rule for the product of a matrix and a vector of features")
        batch = "".join(chr(ord("A") + i) for i in range(max(ranks) - 2))
        of_a, of_b = (batch[len(batch) + 2 - rank :] for rank in ranks)
        return self._contract(a, b, of_a + "ik", of_b + "kj", batch + "ij")

    def _einsum(self, op: Op) -> Belief:
        given = op.args[1:] if len(op.args) != 2 or isinstance(op.args[1], Ref) else tuple(op.args[1])
        letters, arrow, out = str(op.args[0]).replace(" ", "").partition("->")
        names = letters.split(",")
        repeated = any(len(set(name)) < len(name) for name in (*names, out))
        if len(given) == 1 and sorted(names[0]) == sorted(out) and out.isalpha() and not repeated:
            return self._spread(given[0], names[0], out)  # a permutation
        if len(given) != 2 or not arrow or "." in letters or repeated:
            raise NoBeliefError(f"no rule for einsum {op.args[0]!r}")
        return self._contract(given[0], given[1], names[0], names[1], out)

    def _contract(self, a: Ref, b: Ref, of_a: str, of_b: str, out: str) -> Belief:
        """An einsum of two tensors. If one of them has weights that sum to 1 over the summed axes, it is an average."""
        summed = "".join(dict.fromkeys(name for name in of_a + of_b if name not in out))
        sizes = dict(zip(of_a, self._shape(a), strict=True)) | dict(zip(of_b, self._shape(b), strict=True))
        shape = tuple(sizes[name] for name in out + summed)
        axes = list(range(len(out), len(shape)))
        for weights, own, other, letters in ((a, of_a, b, of_b), (b, of_b, a, of_a)):
            axis = self.sums_to_one.get(weights.index)
            if axis is not None and summed == own[axis]:
                return self._without(
                    self._summed(self._spread(other, letters, out + summed), axes, shape, mean=True), axes
                )
        first, second = self._spread(a, of_a, out + summed), self._spread(b, of_b, out + summed)
        self._factors(a, b)
        both = self._both(algebra.product, first, second)
        return self._without(self._summed(both, axes, shape), axes)

    def _spread(self, argument: Ref, names: str, order: str) -> Labelled:
        """Give the tensor an axis for every name in `order`."""
        state = self._known(argument)
        labels = state.labels.permute([names.index(name) for name in order if name in names])
        for axis, name in enumerate(order):
            if name not in names:
                labels = labels.unsqueeze(axis)
        return replace(state, labels=labels)

    def _without(self, state: Labelled, axes: list[int]) -> Labelled:
        return replace(state, labels=state.labels.squeeze(tuple(axes)))

    def _attention(self, op: Op) -> Belief:
        given = arguments.named(op, arguments.ATTENTION)
        value = given["value"]
        rank = len(self._shape(value))
        return self._summed(self._known(value), [rank - 2], self._shape(value), mean=True)

    def belief(self, value: Value) -> Belief:
        if value.index in self.beliefs:
            return self.beliefs[value.index]
        if value.reason is not None:
            return Unknown(value.reason)
        if value.fed:
            return self._input(value)
        if value.random:
            return Unknown("random numbers")
        step = self.statics.step(value)
        numel = torch.Size(value.shape).numel()
        if step is None:
            return Unknown("a constant that cannot be computed again")
        if numel > layout.LARGEST or not value.dtype.is_floating_point:
            return Unknown(f"a constant with {numel} values of type {value.dtype}")
        labels = torch.arange(numel).reshape(value.shape)
        self.beliefs[value.index] = Labelled(self.program.add(Static((step,))), numel, labels)
        return self.beliefs[value.index]

    def _input(self, value: Value) -> Belief:
        """The belief about an input. Integers and single numbers, such as tokens and times, are no features."""
        self.raw.add(value.index)
        if len(value.shape) < 2 or not value.dtype.is_floating_point:
            return Unknown(_FROM_INPUT)
        if self.input_step is None:
            self.input_step = self.program.add(InputBelief())
        return Labelled(self.input_step, 1, torch.zeros((1,) * len(value.shape), dtype=torch.long))

    def _of_input(self, step: int) -> bool:
        """Whether a step depends on the belief about the input."""
        return self.input_step is not None and bool(self.program.leaves(step, InputBelief))

    def _factors(self, *operands: Ref) -> None:
        """An input that is multiplied by features as it is may be a mask or a weight: nothing is known about it."""
        fed = [ref.index in self.raw for ref in operands if self.trace.values[ref.index].fed]
        if any(fed) and not all(fed):
            raise NoBeliefError(_FROM_INPUT)

    def by_channel(self, state: Labelled, axis: int, shape: tuple[int, ...]) -> int:
        """The step with one entry per channel along `axis`."""
        entries, share = layout.channels(state.labels, axis, shape)
        if share is None:
            return selected(self.program, state.step, entries, state.size)
        return self.program.add(
            Mix((state.step, self.program.constant(entries), self.program.constant(share.to(torch.float32))))
        )

    def _known(self, argument: Any) -> Labelled:
        if not isinstance(argument, Ref):
            raise NoBeliefError("an argument that is not a tensor")
        value = self.trace.values[argument.index]
        state = self.belief(value)
        if isinstance(state, Unknown):
            raise NoBeliefError(state.reason, told=value.index in self.beliefs or value.reason is not None)
        return state

    def _shape(self, argument: Ref) -> tuple[int, ...]:
        return self.trace.values[argument.index].shape

    def _static(self, argument: Any) -> int | None:
        """The step of a tensor that does not depend on data. None for None."""
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
            raise NoBeliefError("a belief with too many entries")
        steps = [selected(self.program, a.step, of_a, a.size), selected(self.program, b.step, of_b, b.size)]
        return Labelled(combined(self.program, function, steps), of_a.numel(), labels)

    def _random(self, argument: Any) -> bool:
        return isinstance(argument, Ref) and self.trace.values[argument.index].random

    def _with_constant(self, state: Labelled, value: float, labels: Tensor) -> Labelled:
        """Append an entry for a constant number. The labels may now contain the index of this entry."""
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

    def _record_multiple(self, out: int, of: int, factor: Coefficient) -> None:
        """Remember that a value is a factor times another value."""
        self.terms[out] = {base: self._times(own, factor) for base, own in self._terms(of).items()}

    def _record_sum(self, out: int, a: int, b: int, factor: float) -> Labelled | None:
        """Remember that a value is a + factor b.

        If the two have a term in common, as in x + α (f - x), return the belief with its coefficients added. Else None.
        """
        first, second = self._terms(a), self._terms(b)
        if len(first) + len(second) > _MOST_TERMS:
            return None
        terms, shared = dict(first), False
        for base, own in second.items():
            weighted = self._times(own, factor)
            shared = shared or base in first
            terms[base] = self._plus(first[base], weighted) if base in first else weighted
        self.terms[out] = terms
        states = {base: self.beliefs.get(base) for base in terms}
        if not shared or any(not isinstance(state, Labelled) for state in states.values()):
            return None
        total: Labelled | None = None
        for base, factor_of in terms.items():
            state = self._times(states[base], factor_of)  # type: ignore[arg-type]
            assert isinstance(state, Labelled)
            total = state if total is None else self._both(algebra.add, total, state)
        return total

    def _summed(self, state: Labelled, axes: list[int], shape: tuple[int, ...], *, mean: bool = False) -> Labelled:
        """The sum or mean over axes, which are kept with size 1.

        Different entries are taken as independent. Positions of one entry are neither independent nor equal: see
        `averaged`.
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


def algebra_gate(m: algebra.Moments, name: str) -> algebra.Moments:
    """x f(x), for code that writes SiLU or Hardswish as a product."""
    function = getattr(F, name)
    return algebra.through(m, lambda x: x * function(x))
