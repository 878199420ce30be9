"""Computes the priors of a forward together. A bundle runs when a norm first needs one of its results.

Parameters are read from their modules at that moment, as the steps of a program do. If a bundle cannot be used, nothing
is computed here, and every step is evaluated by itself. This is the case if a parameter is missing, is on another
device, has another shape, or is sharded and not present. It is also the case under `torch.func`, in forward mode and in
traces.

Without gradients the results of a bundle are kept while its parameters stay the same. Version counters and one value of
each parameter are compared, because writes to `p.data` do not change the counter. On a GPU the comparison would cost
more than computing the bundle again, so nothing is kept there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kalmannorm._groups import group_count, group_size
from kalmannorm._ops.dispatch import on_device_of, triton_for
from kalmannorm._ops.propagate import aten
from kalmannorm._ops.propagate.aten import Values
from kalmannorm._ops.propagate.bundle import Bundle
from kalmannorm._running.bundling import Call, Part, parts_of
from kalmannorm._running.spreading import Spread
from kalmannorm._wiring.plan import Plan
from kalmannorm._wiring.program import Context, Program
from kalmannorm.moments import Moments, closed
from kalmannorm.moments.core import full_precision

Affine = tuple[Tensor | None, Tensor | None]
"""γ and β."""


class Prior(Moments):
    """A prior with its gain and, if they are not the norm's own tensors, with γ and β."""

    gain: Tensor
    affine: Affine

    @classmethod
    def of(cls, moments: Moments, gain: Tensor, affine: Affine = (None, None)) -> Prior:
        prior = cls(*moments)
        prior.gain, prior.affine = gain, affine
        return prior


class ForCall(NamedTuple):
    """The results of a bundle for one call. The moments are None if the bundle does not compute them."""

    moments: Moments | None
    gain: Tensor
    affine: Affine


class Results(dict[int, Any]):
    """Results of steps, by number. Also the results for each call, and which bundles were tried in this forward."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, ForCall] = {}
        self.checked = False
        self.tried: set[int] = set()

    def prior(self, call: int, moments: Moments) -> Moments:
        """The prior for this call of a norm."""
        given = self.given.get(call)
        return moments if given is None else Prior.of(given.moments or moments, given.gain, given.affine)


class _Cached(NamedTuple):
    tensors: list[Tensor]
    versions: list[tuple[int, int]]
    probe: Tensor
    outputs: list[Tensor]


class PriorBundles:
    """The bundles of one model, or of a part that is called by itself."""

    def __init__(self, program: Program, calls: Sequence[Call]) -> None:
        self.program, self.calls = program, calls
        self.parts: list[Part] = []
        self.of_step: dict[int, int] = {}
        self.of_call: dict[int, int] = {}
        self.cached: dict[int, _Cached] = {}
        self.built = False
        self.lock = threading.Lock()

    @classmethod
    def of(cls, plan: Plan, part: nn.Module | None) -> PriorBundles:
        """The bundles for all norms of a plan, or for those in a part of the model."""
        inside = None if part is None else {id(module) for module in part.modules()}
        calls = [
            Call(call.identity, call.target, norm.module)
            for norm in plan.norms.values()
            for call in norm.calls
            if call.target is not None and (inside is None or id(norm.module.module()) in inside)
        ]
        return cls(plan.program, sorted(calls, key=lambda call: call.identity))

    def fill(self, call: int, target: int, context: Context, results: Results) -> None:
        """Compute the bundle that this call needs, if possible."""
        device = context.device
        if device.type == "meta" or not self.calls:
            return
        if not results.checked:
            with self.lock:
                self._forget_deleted()
                if not self.built or self._outdated():
                    self._build(context)
            results.checked = True
        number = self.of_call.get(call, self.of_step.get(target))
        if number is not None and number not in results.tried:
            self._fill(number, context, results)

    def _forget_deleted(self) -> None:
        """Remove calls of norms that were replaced in the model."""
        calls = [call for call in self.calls if call.norm.module() is not None]
        if len(calls) < len(self.calls):
            self.calls, self.built = calls, False

    def _outdated(self) -> bool:
        steps = self.program.steps
        return any(steps[i] is not step for part in self.parts for i, step in part.watched)

    def _build(self, context: Context) -> None:
        def measure(step: int) -> int:
            with torch.no_grad():
                return self.program.evaluate(step, context, {}).mean.shape[1]

        try:
            with torch.inference_mode(False):
                self.parts = parts_of(self.program, self.calls, measure)
        except Exception:  # any error: it may belong to a norm that never runs; a norm that runs raises it again
            self.parts = []
        self.of_step = {step: number for number, part in enumerate(self.parts) for step in part.steps}
        self.of_call = {call.identity: number for number, part in enumerate(self.parts) for call in part.calls}
        self.cached, self.built = {}, True

    def _fill(self, number: int, context: Context, results: Results) -> None:
        results.tried.add(number)
        part = self.parts[number]
        for step in part.given:
            earlier = self.of_step.get(step)
            if earlier is not None and earlier not in results.tried:
                self._fill(earlier, context, results)
            try:
                self.program.evaluate(step, context, results)
            except Exception:  # see `_build`
                return
        tensors = _tensors(part, context, results)
        if tensors is None:
            return
        run = _runner(part.bundle, context, tensors)
        outputs = self._outputs(number, run, tensors, context)
        count = len(part.steps)
        for step, mean, var in zip(part.steps, outputs[:count], outputs[count : 2 * count], strict=True):
            results[step] = Moments(mean, var)
        gains, passed = outputs[2 * count : 2 * count + len(part.calls)], outputs[2 * count + len(part.calls) :]
        for call, gain in zip(part.calls, gains, strict=True):
            places = part.affine[call.identity] if passed else (None, None)
            weight, bias = (None if place is None else passed[place] for place in places)
            moments = results.get(call.target)
            results.given[call.identity] = ForCall(moments, gain, (weight, bias))
        if run.PASSES and torch.is_grad_enabled():
            _spread(part, context, results)

    def _outputs(self, number: int, run: ModuleType, tensors: list[Tensor], context: Context) -> Sequence[Tensor]:
        bundle = self.parts[number].bundle
        with full_precision(context.device), on_device_of(tensors[0]):
            if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
                made: tuple[Tensor, ...] = _Bundled.apply(bundle, run, context.dtype, *tensors)  # type: ignore[no-untyped-call]
                return made
            keep = context.device.type == "cpu" and not any(tensor.is_inference() for tensor in tensors)
            known = self.cached.get(number) if keep else None
            if known is not None and _same(known, tensors):
                return known.outputs
            with torch.inference_mode(False), torch.no_grad():
                values = run.forward(bundle, tensors, context.dtype, context.device, False)
                outputs = _listed(run.results(bundle, values), values.gains)
                if keep:
                    versions = [(tensor._version, tensor.data_ptr()) for tensor in tensors]
                    self.cached[number] = _Cached(tensors, versions, _probe(tensors), outputs)
        return outputs


def _spread(part: Part, context: Context, results: Results) -> None:
    """Expand the results of each call to as many rows as its norm will have groups."""
    calls, groups = list[int](), list[int]()
    rows = list[Tensor | None]()
    for call in part.calls:
        size, given = _groups(call.norm.module(), context.examples), results.given[call.identity]
        moments, gain, affine = given
        alike = all(row is None or row.dtype == gain.dtype for row in affine)
        if size > 1 and alike and moments is not None and gain.numel() == moments.mean.numel():
            calls.append(call.identity)
            groups += [size] * (3 + sum(row is not None for row in affine))
            rows += [moments.mean, moments.var, gain, *affine]
    there = [row for row in rows if row is not None]
    if not there:
        return
    made = iter(Spread.apply(groups, *there))  # type: ignore[no-untyped-call]
    spread = [None if row is None else next(made) for row in rows]
    for i, identity in enumerate(calls):
        mean, var, trust, weight, bias = spread[5 * i : 5 * i + 5]
        assert mean is not None and var is not None and trust is not None
        results.given[identity] = ForCall(Moments(mean, var), trust, (weight, bias))


def _groups(norm: Any, examples: int) -> int:
    """The number of groups of a norm in training. In other modes one row is enough."""
    if not norm.training or norm.frozen or examples == 0:
        return 1
    return group_count(examples, group_size(examples, norm.statistics_batch_size))


def _tensors(part: Part, context: Context, results: Results) -> list[Tensor] | None:
    """The current tensors of a bundle. None if they do not fit the bundle."""
    found: list[Tensor] = []
    for source in part.sources:
        owner = source.owner
        tensor: Any = results[source.step][source.part] if owner is None else owner.tensor(source.name)
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.shape != source.shape:
            return None
        if tensor.device != context.device or not tensor.dtype.is_floating_point:
            return None
        if tensor.data_ptr() == 0:
            return None
        found.append(tensor)
    return found


def _same(known: _Cached, tensors: list[Tensor]) -> bool:
    if any(a is not b for a, b in zip(known.tensors, tensors, strict=True)):
        return False
    if any((t._version, t.data_ptr()) != seen for t, seen in zip(tensors, known.versions, strict=True)):
        return False
    return torch.equal(_probe(tensors), known.probe)


def _probe(tensors: list[Tensor]) -> Tensor:
    """One value of each tensor, from the middle of its memory."""
    middles = [t.detach().as_strided((1,), (1,), t.storage_offset() + t.numel() // 2) for t in tensors]
    return torch.cat([middle.double() for middle in middles])


def _runner(bundle: Bundle, context: Context, tensors: list[Tensor]) -> ModuleType:
    """The module that runs the bundle: Triton kernels if possible, else PyTorch operations."""
    if (
        context.device.type == "cuda"
        and context.dtype == torch.float32
        and triton_for(context.device.index) is not None
    ):
        from kalmannorm._ops.propagate import triton_bundle

        if triton_bundle.applies(bundle, tensors):
            return triton_bundle
    return aten


def _listed(results: Sequence[tuple[Tensor, Tensor]], gains: Sequence[Tensor]) -> list[Tensor]:
    return [*(mean for mean, _ in results), *(var for _, var in results), *gains]


class _Bundled(torch.autograd.Function):
    """Returns means, variances and gains, and also γ and β unchanged if the kernels add their gradients.

    A missing gradient is None. Tensors that would get gradients only from missing ones also get None.
    """

    @staticmethod
    def forward(ctx: Any, bundle: Bundle, run: ModuleType, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        values: Values = run.forward(bundle, tensors, dtype, tensors[0].device, True)
        ctx.bundle, ctx.run, ctx.dtype = bundle, run, dtype
        ctx.sizes = [len(saved) for saved in values.saved]
        saved = [tensor for each in values.saved for tensor in each]
        ctx.save_for_backward(*tensors, values.entries, *saved)
        passed = (tensors[place].detach() for place in bundle.passed if run.PASSES)
        return *_listed(run.results(bundle, values), values.gains), *passed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        bundle, saved = ctx.bundle, ctx.saved_tensors
        count, given = len(bundle.results), len(bundle.masks)
        grad_gains, grad_passed = (
            grads[2 * count : 2 * count + len(bundle.gains)],
            grads[2 * count + len(bundle.gains) :],
        )
        tensors, entries, rest = saved[:given], saved[given], iter(saved[given + 1 :])
        nothing = [None] * 3
        with full_precision(entries.device), on_device_of(entries):
            if torch.is_grad_enabled():
                passed = bundle.passed[: len(grad_passed)]
                spelt_out: Callable[..., list[Tensor]] = lambda *tensors: [  # noqa: E731
                    *aten.spelt_out(bundle, tensors, ctx.dtype, entries.device),
                    *(tensors[place] for place in passed),
                ]
                grad_logits = [
                    grad if grad is None or grad.numel() == gain.logits else grad.sum().view(tensors[gain.logit].shape)
                    for gain, grad in zip(bundle.gains, grad_gains, strict=True)
                ]
                return *nothing, *closed.again(spelt_out, tensors, [*grads[: 2 * count], *grad_logits, *grad_passed])
            saved = [tuple(next(rest) for _ in range(size)) for size in ctx.sizes]
            arrived = sum(1 << bit for bit in range(count) if grads[bit] is not None or grads[count + bit] is not None)
            arrived |= sum(1 << bit for bit, grad in enumerate(grads[2 * count :], count) if grad is not None)
            needed = zip(ctx.needs_input_grad[3:], bundle.masks, strict=True)
            asked = [wanted and bool(mask & arrived) for wanted, mask in needed]
            pairs = list(zip(grads[:count], grads[count : 2 * count], strict=True))
            values = Values(entries, [], saved)
            return *nothing, *ctx.run.backward(bundle, tensors, values, pairs, grad_gains, grad_passed, asked)
