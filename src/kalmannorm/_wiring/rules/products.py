"""Rules of `weights` for what brings several features together: reductions, quotients, attention, matrix products."""

from __future__ import annotations

from dataclasses import replace

import torch

from kalmannorm import moments as algebra
from kalmannorm._wiring.program import Apply, Softmax, Static
from kalmannorm._wiring.recording.trace import Op, Ref
from kalmannorm._wiring.rules import arguments
from kalmannorm._wiring.rules.reader import Reader, State, Unknown
from kalmannorm._wiring.rules.relabel import Labelled, NoBeliefError
from kalmannorm._wiring.rules.unary import inverse_root, reciprocal, second_moment


class Products(Reader):
    def _reduce(self, op: Op) -> State | list[State]:
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

    def _quotient(self, op: Op) -> State:
        given = arguments.named(op, arguments.TWO)
        a, b = given["input"], given["other"]
        if self._random(b):
            return self._known(a)
        if not isinstance(b, Ref):
            return self._apply(algebra.scale, self._known(a), factor=1 / b)
        if self.trace.values[b.index].fed:
            return self._both(algebra.product, self._known(a), self._apply(reciprocal, self._known(b)))
        inverse = self.statics.reciprocal(self.trace.values[b.index])
        if inverse is None:
            raise NoBeliefError("a constant that cannot be made again")
        shape = self._shape(b)
        size = torch.Size(shape).numel()
        divisor = Labelled(self.program.add(Static((inverse,))), size, torch.arange(size).reshape(shape))
        return self._both(algebra.product, self._known(a), divisor)

    def _normalize(self, op: Op) -> State:
        """x / |x|: the length of many values hardly varies, so it is taken as fixed."""
        given = arguments.named(op, arguments.NORMALIZE)
        state, shape = self._known(given["input"]), self._shape(given["input"])
        if given["p"] != 2 or not isinstance(given["dim"], int):
            raise NoBeliefError("no rule for normalize with these options")
        length = self._summed(self._apply(second_moment, state), [given["dim"] % len(shape)], shape)
        return self._both(algebra.product, state, self._apply(inverse_root, length))

    def _softmax(self, op: Op) -> State:
        given = arguments.named(op, arguments.SOFTMAX)
        shape = self._shape(given["input"])
        axis = given["dim"] % len(shape)
        self.averages[op.outputs[0]] = axis
        state = self._known(given["input"])
        return replace(state, step=self.program.add(Softmax((state.step,), shape[axis])))

    def _follow_average(self, op: Op, argument: Ref) -> None:
        """Where the axis of a softmax goes when two axes are swapped; other moves lose it."""
        axis, rank = self.averages.get(argument.index), len(self._shape(argument))
        if axis is not None and op.name in ("transpose", "swapaxes", "swapdims") and len(op.args) == 3:
            one, other = (int(a) % rank for a in op.args[1:])
            self.averages[op.outputs[0]] = {one: other, other: one}.get(axis, axis)

    def _matmul(self, op: Op) -> State:
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

    def _einsum(self, op: Op) -> State:
        given = op.args[1:] if len(op.args) != 2 or isinstance(op.args[1], Ref) else tuple(op.args[1])
        letters, arrow, out = str(op.args[0]).replace(" ", "").partition("->")
        names = letters.split(",")
        repeated = any(len(set(name)) < len(name) for name in (*names, out))
        if len(given) != 2 or not arrow or "." in letters or repeated:
            raise NoBeliefError(f"no rule for einsum {op.args[0]!r}")
        return self._contract(given[0], given[1], names[0], names[1], out)

    def _contract(self, a: Ref, b: Ref, of_a: str, of_b: str, out: str) -> State:
        """An einsum of two. Where one of them holds weights that sum to 1 over what is summed, it is an average."""
        summed = "".join(dict.fromkeys(name for name in of_a + of_b if name not in out))
        sizes = dict(zip(of_a, self._shape(a), strict=True)) | dict(zip(of_b, self._shape(b), strict=True))
        shape = tuple(sizes[name] for name in out + summed)
        axes = list(range(len(out), len(shape)))
        for weights, own, other, names in ((a, of_a, b, of_b), (b, of_b, a, of_a)):
            axis = self.averages.get(weights.index)
            if axis is not None and summed == own[axis]:
                return self._without(
                    self._summed(self._spread(other, names, out + summed), axes, shape, mean=True), axes
                )
        both = self._both(algebra.product, self._spread(a, of_a, out + summed), self._spread(b, of_b, out + summed))
        return self._without(self._summed(both, axes, shape), axes)

    def _spread(self, argument: Ref, names: str, order: str) -> Labelled:
        """With an axis for every name of `order`."""
        state = self._known(argument)
        labels = state.labels.permute([names.index(name) for name in order if name in names])
        for axis, name in enumerate(order):
            if name not in names:
                labels = labels.unsqueeze(axis)
        return replace(state, labels=labels)

    def _without(self, state: Labelled, axes: list[int]) -> Labelled:
        return replace(state, labels=state.labels.squeeze(tuple(axes)))

    def _attention(self, op: Op) -> State:
        given = arguments.named(op, arguments.ATTENTION)
        value = given["value"]
        rank = len(self._shape(value))
        return self._summed(self._known(value), [rank - 2], self._shape(value), mean=True)
