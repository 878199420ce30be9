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

import operator
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kalmannorm._groups import group_count, group_size
from kalmannorm._ops.dispatch import on_device_of, triton_for
from kalmannorm._ops.normalize.row_kernels import RowGradients
from kalmannorm._ops.plain import PLAIN
from kalmannorm._ops.propagate import aten, native_bundle
from kalmannorm._ops.propagate.aten import Made
from kalmannorm._ops.propagate.bundle import Bundle
from kalmannorm._ops.propagate.rows import asked_of, differentiated, spread, summed
from kalmannorm._running.bundling import Call, Fitting, Part, form_of, parts_of
from kalmannorm._running.closing_sums import Collecting, settled_states
from kalmannorm._support.changes import Changes
from kalmannorm._wiring.plan import Plan
from kalmannorm._wiring.program import Context, Program, Step
from kalmannorm._wiring.weak_modules import WeakModule
from kalmannorm.moments import Moments
from kalmannorm.moments.core import full_precision

CHANGED = (
    "kalmannorm: a parameter that a prior depends on was modified by an inplace operation after the forward, for "
    "example by an optimizer; run the forward again before this backward, or call all backwards before the optimizer"
)

OWN = 7
"""Arguments of a bundle's node before its tensors."""
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

    @classmethod
    def of_rows(cls, rows: Tensor) -> Prior:
        """From the rows of a norm, (5, G, C)."""
        weight, bias, mean, var, gain = rows.unbind(0)
        return cls.of(Moments(mean, var), gain, (weight, bias))


class Results(dict[int, Any]):
    """Results of steps, by number. Also the rows for each call, and which bundles were tried in this forward."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, Tensor] = {}
        self.collecting: dict[int, Collecting] = {}  # by number of the bundle
        self.gradients: dict[int, RowGradients] = {}  # likewise, if its norms share memory for gradients of rows
        self.checked = False
        self.tried: set[int] = set()


class _Cached(NamedTuple):
    tensors: list[Tensor]
    versions: list[tuple[int, int]]
    probe: Tensor
    outputs: list[Tensor]


def _has_gain(norm: WeakModule) -> bool:
    return getattr(norm.module(), "gain_logit", None) is not None


class PriorBundles:
    """The bundles of one model, or of a part that is called by itself."""

    def __init__(self, program: Program, calls: Sequence[Call], *, learned: bool = False, alone: bool = False) -> None:
        """`alone`: norms are settled and read no priors, so each reads its γ and β by itself."""
        self.program, self.calls, self.learned, self.alone = program, calls, learned, alone
        self.filters = False  # whether the parts read the filters that convolutions compute
        self.parts: list[Part] = []
        self.watched: tuple[list[int], list[Step]] = [], []  # the steps of all parts
        self.of_step: dict[int, int] = {}
        self.of_call: dict[int, int] = {}
        self.cached: dict[int, _Cached] = {}
        self.built = False
        self.kernels_built = set[bool]()  # for settled norms or others: the kernels of a step were looked for
        self.lock = threading.Lock()

    @classmethod
    def of(cls, plan: Plan, part: nn.Module | None, faded: bool = False) -> PriorBundles:
        """The bundles for all norms of a plan, or for those in a part of the model.

        `faded`: all priors have faded. Then the norms that run once read nothing of each other, and no bundle runs: see
        `settled_way.py`.
        """
        inside = None if part is None else {id(module) for module in part.modules()}
        calls = [
            Call(norm.calls[0].identity, None, norm.module, norm.calls[0].shape, faded=_has_gain(norm.module))
            for norm in plan.norms.values()
            if faded and len(norm.calls) == 1
            if inside is None or id(norm.module.module()) in inside
        ] or [
            Call(call.identity, call.target, norm.module, call.shape)
            for norm in plan.norms.values()
            for call in norm.calls
            if call.target is not None or (len(norm.calls) == 1 and plan.transition == "weights")
            if inside is None or id(norm.module.module()) in inside
        ]
        return cls(plan.program, sorted(calls, key=lambda call: call.identity), alone=faded)

    @classmethod
    def of_learned(cls, plan: Plan, part: nn.Module | None) -> PriorBundles:
        """As `of`, for learned transitions: γ, β and gains of the norms that run once. They compute their priors."""
        inside = None if part is None else {id(module) for module in part.modules()}
        calls = [
            Call(norm.calls[0].identity, None, norm.module, norm.calls[0].shape, norm.calls[0].target is not None)
            for norm in plan.norms.values()
            if len(norm.calls) == 1
            if inside is None or id(norm.module.module()) in inside
        ]
        return cls(plan.program, sorted(calls, key=lambda call: call.identity), learned=True)

    def fill(self, call: int, target: int | None, context: Context, results: Results) -> None:
        """Compute the bundle that this call needs, if possible."""
        device = context.device
        if device.type == "meta" or not self.calls:
            return
        if not results.checked:
            self.update(context)
            results.checked = True
        number = self.of_call.get(call, None if target is None else self.of_step.get(target))
        if number is not None and number not in results.tried:
            self._fill(number, context, results)

    def tensors_of_parts(self, context: Context) -> list[tuple[Part, list[Tensor]]] | None:
        """All parts, and the tensors that they read now. None if one of them does not fit. No part reads filters."""
        self.update(context, filters=False)
        results, found = Results(), list[tuple[Part, list[Tensor]]]()
        for number, part in enumerate(self.parts):
            if number not in results.tried:
                self._fill(number, context, results)
            there = all(step in results for step in (*part.given, *part.steps))
            tensors = _tensors(part, context, results) if there else None
            if tensors is None:
                return None
            found.append((part, tensors))
        return found

    def update(self, context: Context, *, filters: bool = True) -> None:
        """Make the parts, or make them again if a step was replaced. `filters`: they may read computed filters."""
        with self.lock:
            self._forget_deleted()
            if not self.built or self._outdated() or self.filters != filters:
                self._build(context, filters)

    def _forget_deleted(self) -> None:
        """Remove calls of norms that were replaced in the model."""
        calls = [call for call in self.calls if call.norm.module() is not None]
        if len(calls) < len(self.calls):
            self.calls, self.built = calls, False

    def _outdated(self) -> bool:
        numbers, steps = self.watched
        return not all(map(operator.is_, map(self.program.steps.__getitem__, numbers), steps))

    def _build(self, context: Context, filters: bool) -> None:
        def measure(step: int) -> int:
            with torch.no_grad():
                return self.program.evaluate(step, context, {}).mean.shape[1]

        try:
            with torch.inference_mode(False):
                self.parts = parts_of(self.program, self.calls, measure, filters=filters)
        except Exception:  # any error: it may belong to a norm that never runs; a norm that runs raises it again
            self.parts = []
        pairs = [pair for part in self.parts for pair in part.watched]
        self.watched = [number for number, _ in pairs], [step for _, step in pairs]
        self.of_step = {step: number for number, part in enumerate(self.parts) for step in part.steps}
        self.of_call = {call.identity: number for number, part in enumerate(self.parts) for call in part.calls}
        self.cached, self.built, self.filters = {}, True, filters

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
        try:
            tensors = _tensors(part, context, results)
        except RuntimeError:  # sharded by FSDP, or deleted: see `_build`
            return
        if not tensors:  # none fit, or no norm has γ or β
            return
        groups, collecting, gradients = groups_in(part, context), None, None
        if torch.is_grad_enabled():
            states = settled_states(part)
            if states:
                collecting = results.collecting[number] = Collecting(states)
            gradients = RowGradients.fitting(part.bundle.widths, groups)
            if gradients is not None:
                results.gradients[number] = gradients
        outputs = self._outputs(number, tensors, groups, context, collecting, gradients)
        calls, steps = len(part.calls), len(part.steps)
        for call, rows in zip(part.calls, outputs[:calls], strict=True):
            results.rows[call.identity] = rows
        for step, mean, var in zip(part.steps, outputs[calls : calls + steps], outputs[calls + steps :], strict=True):
            results[step] = Moments(mean, var)

    def _outputs(
        self,
        number: int,
        tensors: list[Tensor],
        groups: list[int],
        context: Context,
        collecting: Collecting | None,
        gradients: RowGradients | None,
    ) -> Sequence[Tensor]:
        """The rows of the norms (5, G, C), then the means and the variances of the other results."""
        part = self.parts[number]
        bundle = part.bundle
        fitting = part.fitting
        assert fitting is not None
        run = aten if PLAIN.active else fitting.runs.get(context.dtype)
        if run is None:
            run = fitting.runs[context.dtype] = runner(bundle, context, tensors)
        with full_precision(context.device), on_device_of(tensors[0]):
            further = [] if collecting is None else collecting.probes
            if torch.is_grad_enabled() and (further or True in [tensor.requires_grad for tensor in tensors]):
                given = bundle, run, context.dtype, groups, fitting, collecting, gradients
                return _bundled(*given, *tensors, *further)
            keep = context.device.type == "cpu" and not any(tensor.is_inference() for tensor in tensors)
            known = self.cached.get(number) if keep else None
            if known is not None and _same(known, tensors):
                outputs = known.outputs
            else:
                with torch.inference_mode(False), torch.no_grad():
                    outputs = _listed(run.forward(bundle, tensors, context.dtype, context.device, False))
                if keep:
                    versions = [(tensor._version, tensor.data_ptr()) for tensor in tensors]
                    self.cached[number] = _Cached(tensors, versions, _probe(tensors), outputs)
            return [*spread(bundle, outputs[0], groups), *outputs[1:]]


def groups_in(part: Part, context: Context) -> list[int]:
    """The number of groups of each norm, counted again if a setting of a norm has changed."""
    key, known = (context.examples, Changes.count), part.groups
    if known is None or known[0] != key:
        known = part.groups = key, [groups_of(call.norm.module(), context.examples) for call in part.calls]
    return known[1]


def groups_of(norm: Any, examples: int) -> int:
    """The number of groups of a norm in training. In other modes one row is enough."""
    if not norm.training or norm.frozen or examples == 0:
        return 1
    return group_count(examples, group_size(examples, norm.statistics_batch_size))


def _tensors(part: Part, context: Context, results: Results) -> list[Tensor] | None:
    """The current tensors of a bundle. None if they do not fit the bundle."""
    origins = part.origins
    owned, filters = _owned(origins.owned), [owner.tensor(name) for owner, name in origins.computed]
    given = [results[step][piece] for step, piece in origins.given]
    if not all(_fits(tensor, shape, context) for tensor, shape in zip(given, origins.shapes, strict=True)):
        return None
    found = owned
    if filters or given:
        listed = [*owned, *filters, *given]
        found = [listed[place] for place in origins.order]
    # The same tensors fit again, unless someone gave them other memory, as FSDP does with `p.data`.
    if part.fitting is not None and part.fitting.holds(owned, context.device, filters):
        return found
    part.fitting = None
    pairs = zip(found, part.sources, strict=True)
    if not all(_fits(tensor, source.shape, context) for tensor, source in pairs if source.owner is not None):
        return None
    forms = [form_of(each) for each in filters]
    part.fitting = Fitting(context.device, owned, [tensor.data_ptr() for tensor in owned], forms)
    return found


def _owned(owned: Sequence[tuple[WeakModule, str]]) -> list[Any]:
    """Parameters, or what is in their place."""
    try:
        return [owner.reference()._parameters[name] for owner, name in owned]  # type: ignore[union-attr]
    except (AttributeError, KeyError):  # a module was deleted, or has a tensor that is no parameter
        return [_stored(owner, name) for owner, name in owned]


def _stored(owner: WeakModule, name: str) -> Any:
    module = owner.module()
    stored = module is not None and name in module._parameters
    return module._parameters[name] if stored else owner.tensor(name)  # type: ignore[union-attr]


def _fits(tensor: Any, shape: tuple[int, ...], context: Context) -> bool:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.shape != shape or tensor.device != context.device:
        return False
    return bool(tensor.dtype.is_floating_point and tensor.data_ptr() != 0)


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


def runner(bundle: Bundle, context: Context, tensors: list[Tensor]) -> ModuleType:
    """The module that runs the bundle: Triton kernels or C kernels if possible, else PyTorch operations."""
    # Without layers nothing is gained in C. Gains of learned transitions then have the bits of the long way.
    works = any(stage.layers or stage.elementwise for stage in bundle.stages)
    if works and context.device.type == "cpu" and native_bundle.applies(bundle, context.dtype, tensors):
        return native_bundle
    if (
        context.device.type == "cuda"
        and context.dtype == torch.float32
        and triton_for(context.device.index) is not None
    ):
        from kalmannorm._ops.propagate import triton_bundle

        if triton_bundle.applies(bundle, tensors):
            return triton_bundle
    return aten


def _listed(made: Made) -> list[Tensor]:
    return [made.rows, *(mean for mean, _ in made.others), *(var for _, var in made.others)]


class _Bundled(torch.autograd.Function):
    """Returns the rows of all norms (5, G, C), then means and variances of the other results.

    A missing gradient is None. Tensors that would get gradients only from missing ones also get None.

    Parts of a model may have backwards of their own, and a bundle may have norms of several parts. So its tensors are
    not saved as torch saves them, which would allow one backward. What the first backward frees, a second one computes
    again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        bundle: Bundle,
        run: ModuleType,
        dtype: torch.dtype,
        groups: Sequence[int],
        fitting: Fitting,
        collecting: Collecting | None,
        gradients: RowGradients | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.collecting, ctx.gradients = collecting, gradients
        wanted, last = list(ctx.needs_input_grad[OWN:]), fitting.last
        if collecting is not None:
            tensors, wanted = tensors[: len(bundle.masks)], wanted[: len(bundle.masks)]
        known = last[1] if last is not None and last[0] == wanted else None
        made: Made = run.forward(bundle, tensors, dtype, tensors[0].device, True, known)
        fitting.last = wanted, made.state
        ctx.bundle, ctx.run, ctx.dtype, ctx.groups, ctx.state = bundle, run, dtype, groups, made.state
        ctx.tensors, ctx.versions, ctx.kept = tensors, [tensor._version for tensor in tensors], made.saved
        rows, *others = _listed(made)
        return *spread(bundle, rows, groups), *others

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        bundle, tensors, collecting = ctx.bundle, ctx.tensors, ctx.collecting
        norms, others = len(bundle.norms), len(bundle.results) - len(bundle.norms)
        nothing, device = [None] * OWN, tensors[0].device
        whole, further = None if ctx.gradients is None else ctx.gradients.take(grads[:norms]), list[Any]()
        if collecting is not None:
            with torch.no_grad():
                whole = summed(bundle, grads[:norms]) if whole is None else whole
            further = collecting.gradients(whole, bundle.widths, [grad is not None for grad in grads[:norms]])
        if not bundle.copies and [tensor._version for tensor in tensors] != ctx.versions:
            raise RuntimeError(CHANGED)
        with full_precision(device), on_device_of(tensors[0]):
            if torch.is_grad_enabled():
                return *nothing, *differentiated(bundle, tensors, ctx.dtype, ctx.groups, grads), *further
            if ctx.kept is None:
                with torch.no_grad():
                    made = ctx.run.forward(bundle, tensors, ctx.dtype, device, True)
                ctx.kept, ctx.state = made.saved, made.state
            kept, ctx.kept = ctx.kept, None
            asked = asked_of(bundle, ctx.needs_input_grad[OWN : OWN + len(tensors)], grads)
            grad_rows, grad_others = grads[:norms], grads[norms:]
            pairs = list(zip(grad_others[:others], grad_others[others:], strict=True))
            whole = summed(bundle, grad_rows) if whole is None else whole
            return *nothing, *ctx.run.backward(bundle, tensors, kept, ctx.state, whole, pairs, asked), *further


_bundled: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Bundled).apply
"""`_Bundled.apply` without its checks for `torch.func`, under which bundles do not run."""
