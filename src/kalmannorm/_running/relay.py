"""Passes data between the norms of one forward: posteriors, and results that several priors share.

The hooks of the converted model clear the state at the beginning and the end of its forward. If parts of the model are
called by themselves, a posterior is kept until every norm that reads it has done so, or until its norm runs again. So
parts have to be called in the order of the forward.

Inside an activation-checkpoint segment results are kept separately, because its recomputation must do exactly what its
forward did. Posteriors that enter a segment are kept with it, so that the recomputation finds them.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from types import ModuleType
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from kalmannorm._ops.propagate.bundle import PRIOR_MEAN, PRIOR_VAR
from kalmannorm._ops.track.registered import number_of
from kalmannorm._ops.track.request import TrackingRequest
from kalmannorm._running.compiled_way import (
    CompiledForward,
    CompiledModel,
    prepared,
    track_norms,
    track_traced,
)
from kalmannorm._running.learned_way import LearnedForward
from kalmannorm._running.paths import Path
from kalmannorm._running.prior_bundles import Prior, PriorBundles, Results
from kalmannorm._running.scopes import Memo, Scope, ThreadState, kept_by
from kalmannorm._running.settled_way import SettledForward
from kalmannorm._running.short_way import ShortForward
from kalmannorm._support.activation_checkpoints import Segment, recompute_id, segments, unseen
from kalmannorm._support.changes import Changes
from kalmannorm._support.compiling import (
    begin_traced,
    current,
    end_traced,
)
from kalmannorm._support.pickles import check_complete, refuse_moved
from kalmannorm._support.tracing import untraced
from kalmannorm._wiring.plan import Plan
from kalmannorm._wiring.program import Context, Parameter, parted
from kalmannorm._wiring.weak_modules import WeakModule
from kalmannorm.moments import Moments, closed

_OF_THIS_PROCESS = (
    "learned",
    "state",
    "bundles",
    "bundles_without_priors",
    "faded",
    "settled",
    "tables",
    "number",
    "compiled",
    "compiled_for",
    "compiled_tables",
    "norms",
    "in_compiled",
    "replacements",
    "branches",
)


class Relay:
    """Shared by all norms of a converted model. It is never a part of the state dict."""

    compiles = True
    """Whether compiled norms need it."""

    def __init__(self, plan: Plan, model: nn.Module | None = None) -> None:
        self.plan, self.program, self.model = plan, plan.program, WeakModule(model)
        calls = [norm.calls for norm in plan.norms.values()]
        self.readers: dict[int, set[int]] = {}
        self.earlier: dict[int, tuple[int, ...]] = {}
        for norm_calls in calls:
            for nth, call in enumerate(norm_calls):
                # A loop may run fewer times than in the example. Its last posterior is then that of an earlier call.
                self.earlier[call.identity] = tuple(c.identity for c in reversed(norm_calls[:nth]))
                for path in (call, *call.others):
                    for source in path.posteriors:
                        self.readers.setdefault(source, set()).add(path.identity)
        for source in list(self.readers):
            for sibling in self.earlier.get(source, ()):
                self.readers.setdefault(sibling, set()).update(self.readers[source])
        self.warned = False
        self.told: set[str] = set()  # replaced layers of which a warning told
        self.missed: dict[int, tuple[int, ...]] = {}  # by call: norms that feed it and did not run before it
        self._begin()

    def _begin(self) -> None:
        """Create what belongs to this process and is no part of a copy or a pickle."""
        self.learned = self.plan.transition == "learned"
        self.state = ThreadState()
        self.bundles: WeakKeyDictionary[nn.Module, PriorBundles] = WeakKeyDictionary()
        self.bundles_without_priors: WeakKeyDictionary[nn.Module, PriorBundles] = WeakKeyDictionary()
        self.faded = -1, False  # whether all priors have faded, and the value of `Changes.count` for which this holds
        self.tables: dict[Any, Any] = {}  # tables of kernels that update the statistics of many norms
        self.number = number_of(self)
        self.compiled: list[CompiledModel] = []  # for each device and dtype
        self.compiled_for: dict[Any, tuple[int, list[Any]]] = {}  # their places, and the steps they were made from
        self.compiled_tables: dict[Any, Any] = {}
        self.in_compiled: set[int] = set()  # first calls of norms that `torch.compile` has traced
        self.replacements = Changes.replacements  # up to which replaced layers were looked for
        self.branches = any(call.others for norm in self.plan.norms.values() for call in norm.calls)
        self.norms = {call.identity: norm.module for norm in self.plan.norms.values() for call in norm.calls}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OF_THIS_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.model = WeakModule(None)  # older pickles have no model
        self.__dict__.update(state)
        check_complete(self, ("plan", "program", "readers", "earlier", "warned", "missed", "told"))
        self._begin()

    def enter(self, whole: bool, part: nn.Module, compiled: bool = False) -> None:
        """Begin a forward of the whole model, or of a part that was called by itself.

        `compiled`: by `torch.compile`, so norms do not take the short way of eager mode.
        """
        state = self.state
        active = segments()
        if whole:
            self._clear(state)
            state.left = None  # of a forward that failed
            if self.replacements != Changes.replacements and not torch.compiler.is_compiling():
                self.warn_replaced(part)
        if whole or not state.whole:
            state.depth = 0  # parts do not nest: an open one was interrupted
        if state.depth == 0 and state.short is not None:  # the forward calls itself, or was interrupted
            state.short.track()
            state.short = None
        if not whole and state.depth == 0 and active:
            return  # a part, checkpointed or recomputed by itself: the scope of the segment is used
        if state.depth == 0:
            state.memo, state.whole, state.part = {}, whole, part
            state.home = active[0].key if active else None
            if not active and recompute_id() == -1 and not compiled and not torch.compiler.is_compiling():
                given = self._bundles_of_part(self._has_faded()), state.memo, self._model()
                state.short = self._short_forward(*given)
        state.depth += 1

    def _short_forward(self, bundles: PriorBundles, memo: dict[Any, Any], model: WeakModule) -> ShortForward:
        if self.learned:
            return LearnedForward(bundles, memo, model, self)
        return (SettledForward if bundles.alone else ShortForward)(bundles, memo, model)

    def leave(self, whole: bool) -> None:
        state = self.state
        state.depth = 0 if whole else max(state.depth - 1, 0)
        if whole:
            self._clear(state)
        if state.depth == 0:
            state.memo, state.home, state.whole, state.part = None, None, False, None
            state.inner.clear()
            self.track_postponed()
            state.short = None

    def postpone(self, request: TrackingRequest, kernels: ModuleType) -> bool:
        """Postpone an update of statistics to the end of the forward.

        False if no forward runs: the norm then updates now.
        """
        if self.state.depth == 0:
            return False
        self.state.postponed.add(request, kernels, self.tables)
        return True

    def track_postponed(self) -> None:
        """Make the postponed updates."""
        forward = current(self.number)
        if forward is not None:  # the last norm did not run
            forward.track()
        end_traced(self.number)
        left = self.state.left
        if left is not None:
            self.state.left = None
            if torch.compiler.is_compiling():
                track_traced(self, left)
            else:
                self.track_norms(*left[1:])
        if not torch.compiler.is_compiling():
            if self.state.short is not None:
                self.state.short.track()
            self.state.postponed.run(self.tables)

    @staticmethod
    def _clear(state: ThreadState) -> None:
        state.posteriors.clear()
        state.counts.clear()
        state.ran.clear()
        state.pending.clear()
        state.inner.clear()

    def open_segments(self) -> list[Segment]:
        """The segments inside the forward of the model, innermost first."""
        active, state = segments(), self.state
        if state.depth > 0 and state.home is not None:
            for i, segment in enumerate(active):
                if segment.key is state.home:
                    return active[:i]
        return active

    def segment(self) -> Segment | None:
        """The segment in which a norm runs, if it is the only one inside the forward and is not re-entrant.

        In a recomputation it need not be the only one. A segment inside it may have asked for its own input, and torch
        recomputes the outer one for that. The state that a segment keeps tells how its norms ran.
        """
        active = self.open_segments()
        if not active or active[0].reentrant():
            return None
        return active[0] if len(active) == 1 or active[0].recomputed else None

    def first_in_recomputation(self, call: int, segment: Segment) -> bool:
        """Whether this is the first run of a call in the recomputation of a segment. It counts as one."""
        repeated = self._scopes([segment])[0].repeated
        if call in repeated:
            return False
        repeated.add(call)
        return True

    def _scopes(self, active: list[Segment]) -> list[Scope]:
        """The scope of every segment, in the same order."""
        found: list[Scope] = []
        inner = self.state.inner
        for segment in reversed(active):
            if segment.recomputed:
                kept = kept_by(segment, self)
                if kept.recomputation is None or kept.recomputation[0] != recompute_id():
                    kept.recomputation = (recompute_id(), Scope())
                scope = kept.recomputation[1]
            else:
                if id(segment.key) not in inner:
                    if self.state.depth == 0 and inner is self.state.inner:
                        inner.clear()  # outside a forward of the model nothing else clears it
                    inner[id(segment.key)] = Scope()
                scope = inner[id(segment.key)]
            inner = scope.inner
            found.insert(0, scope)
        return found

    def call_index(self, first: int, calls: int) -> int:
        """The index of this call, for norms that run several times in one forward."""
        if calls == 1:
            return 0
        active = self.open_segments()
        count = self._count(first, active, self._scopes(active))
        return min(count, calls - 1) if self.state.depth > 0 or active else count % calls

    def _count(self, first: int, active: list[Segment], scopes: list[Scope]) -> int:
        counts = scopes[0].counts if scopes else self.state.counts
        count = counts.get(first, 0)
        counts[first] = count + 1
        if not active:
            return count
        kept = kept_by(active[0], self)
        if active[0].recomputed:
            return kept.counts.get(first, 0) + count
        total = self._count(first, active[1:], scopes[1:])
        if count == 0:
            kept.counts[first] = total
        return total

    def arrived(self) -> dict[int, Moments | Tensor]:
        """The posteriors of the norms that ran, by call. Those of the short way are one tensor, (2, G, C)."""
        return self.state.posteriors

    def deliver_outside(self, call: int, posterior: Tensor) -> None:
        """`deliver` for the first run of a norm on the short way, outside of all segments."""
        if call in self.readers:
            self.state.posteriors[call] = posterior
            if not self.state.whole:
                self.state.pending[call] = set(self.readers[call])

    def deliver(self, call: int, posterior: Moments | Tensor) -> None:
        if call not in self.readers:
            return
        active, state = self.open_segments(), self.state
        for segment, scope in zip(active, self._scopes(active), strict=True):
            scope.posteriors[call] = posterior
            if segment.recomputed:
                return
        if call in state.posteriors:
            # The norm runs more often than in the example. Results computed from its last posterior are out of date.
            for memo in (state.memo, state.traced):
                if memo is not None:
                    memo.clear()
        state.posteriors[call] = posterior
        if not state.whole:
            state.pending[call] = set(self.readers[call])

    def evaluate(self, call: int, target: int, sources: tuple[int, ...], x: Tensor) -> Moments | None:
        """The moments that reach a norm. None if a posterior that it needs did not arrive."""
        active, state = self.open_segments(), self.state
        scopes = self._scopes(active)
        arrived: dict[int, Moments] = {}
        for source in sources:
            posterior = self._find_posterior(source, active, scopes)
            if posterior is None:
                if not torch.compiler.is_compiling():
                    self.missed[call] = (source,)
                return None
            arrived[source] = posterior
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        context = Context(x.device, dtype, arrived, x.shape[0])
        rows = None if sources else self._rows(call, target, context, active)
        if rows is not None:  # bundles read no posteriors, so there is none to consume
            return Prior.of_rows(rows)
        previous = self.program.evaluate(target, context, self._memo(scopes, bool(sources), x))
        if not state.whole:
            self.consume(call, sources)
        return previous

    def _rows(self, call: int, target: int, context: Context, active: list[Segment]) -> Tensor | None:
        """The rows of a bundle for this call, if it has one.

        The bundle belongs to the whole forward, not to the segment that asks first. A segment keeps the rows that its
        norms got, and its recomputation takes them again.
        """
        if active:
            kept, key = kept_by(active[0], self), (call, torch.is_grad_enabled())
            if not active[0].recomputed and not active[0].reentrant() and key not in kept.rows:
                rows = self._rows(call, target, context, active[1:])
                if rows is not None:
                    kept.rows[key] = rows
            return kept.rows.get(key)
        if torch.compiler.is_compiling() or self.state.memo is None:
            return None
        results = self._memo_of(self.state.memo, context.device, together=closed.applicable())
        if not isinstance(results, Results):
            return None
        if call not in results.rows:
            with unseen():
                # With priors: this recomputation may be of a forward before they had faded.
                self._bundles_of_part(faded=False).fill(call, target, context, results)
        return results.rows.get(call)

    def constant_priors(self, like: Tensor) -> Callable[[int, int], Moments]:
        """A function that computes priors which read no posterior, by call and step, with the bits of a forward."""
        bundles, results, context = PriorBundles.of(self.plan, None), Results(), Context(like.device, like.dtype, {})

        def prior(call: int, target: int) -> Moments:
            bundles.fill(call, target, context, results)
            rows = results.rows.get(call)
            if rows is None:
                return self.program.evaluate(target, context, results)
            return Moments(rows[PRIOR_MEAN, :1].clone(), rows[PRIOR_VAR, :1].clone())

        return prior

    def ran(self) -> dict[int, int] | None:
        """The norms that ran in this forward. None if that is not known, in a trace that does not contain all of it."""
        if not torch.compiler.is_compiling():
            return self.state.ran
        forward = current(self.number)
        return None if forward is None else forward.ran

    def unnoticed(self, calls: AbstractSet[int]) -> frozenset[int]:
        """Those of these norms that may run unnoticed: in compiled code, or because another module replaced them."""
        model = self.model.module()
        present = set() if model is None else {id(module) for module in model.modules()}
        return frozenset(c for c in calls if c in self.in_compiled or id(self.norms[c].module()) not in present)

    def constant(self, target: int, x: Tensor) -> Moments:
        """The prior as a constant of a graph that `torch.jit.trace` records. It depends on parameters alone."""
        with untraced(), torch.no_grad():
            dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
            return self.program.evaluate(target, Context(x.device, dtype, {}, x.shape[0]), {})

    def calibrated(self, first: int, paths: tuple[tuple[Path, ...], ...]) -> tuple[tuple[Path, ...], ...]:
        """The paths of a norm, by its first call, with calibrated priors. The plan changes too."""
        norm = next(norm for norm in self.plan.norms.values() if norm.calls and norm.calls[0].identity == first)
        norm.module.hold()  # the norm got other tensors after it was traced
        steps: dict[int, int | None] = {}
        for path in (path for call in norm.calls for path in (call, *call.others)):
            if path.target is not None:
                path.target = self.program.calibrated(path.target, norm.module)
            steps[path.identity] = path.target
        self.bundles.clear()
        self.bundles_without_priors.clear()
        self.compiled_for.clear()
        return tuple(tuple(path._replace(target=steps[path.call]) for path in each) for each in paths)

    def _model(self) -> WeakModule:
        """The model that runs, or of which a part runs."""
        return self.model

    def _bundles_of_part(self, faded: bool) -> PriorBundles:
        """The bundles of the running model, or of the part that runs. `faded`: without priors."""
        part = self.state.part
        assert part is not None
        known = self.bundles_without_priors if faded else self.bundles
        if part not in known:
            inside = None if self.state.whole else part
            make = PriorBundles.of_learned if self.learned else PriorBundles.of
            known[part] = PriorBundles.of(self.plan, inside, faded=True) if faded else make(self.plan, inside)
        return known[part]

    def _has_faded(self) -> bool:
        """Whether the priors of all norms have faded in a closing phase. Then they run as norms without priors."""
        if self.faded[0] != Changes.count:
            norms: list[Any] = [norm.module.module() for norm in self.plan.norms.values()]
            fed = [norm for norm in norms if norm is not None and norm.prior_features is not None]
            self.faded = Changes.count, not self.learned and bool(fed) and all(norm.runs_faded() for norm in fed)
        return self.faded[1]

    def _memo(self, scopes: list[Scope], learned: bool, x: Tensor) -> dict[int, Any]:
        if torch.compiler.is_compiling():
            memo = self.state.traced
        elif scopes:
            # The recomputation may get posteriors from other places than the forward did, so nothing is shared.
            memo = None if learned else scopes[0].memo
        else:
            memo = self.state.memo
        return {} if memo is None else self._memo_of(memo, x.device, together=False)

    @staticmethod
    def _memo_of(memo: Memo, device: torch.device, together: bool) -> dict[int, Any]:
        """The results in a memo. `together`: priors are computed in bundles."""
        # A model may use several devices. Results computed without gradients cannot be used with gradients.
        index = device.index, torch.is_grad_enabled()
        if index not in memo:
            memo[index] = Results() if together else {}
        return memo[index]

    def _find_posterior(self, source: int, active: list[Segment], scopes: list[Scope]) -> Moments | None:
        posteriors = scopes[0].posteriors if scopes else self.state.posteriors
        for candidate in (source, *self.earlier.get(source, ())):
            if candidate in posteriors:
                return parted(posteriors[candidate])
        if not active:
            return None
        kept = kept_by(active[0], self)
        if active[0].recomputed:
            return kept.entering.get(source)
        posterior = self._find_posterior(source, active[1:], scopes[1:])
        if posterior is not None:
            if active[0].reentrant():
                posterior = Moments(*(None if part is None else part.detach() for part in posterior))  # type: ignore[arg-type]
                self._warn_detached()
            kept.entering[source] = posterior
        return posterior

    def keep_entering(self, sources: tuple[int, ...]) -> None:
        """Keep posteriors that enter a segment, for a recomputation that takes the long way."""
        active = self.open_segments()
        scopes = self._scopes(active)
        for source in sources:
            self._find_posterior(source, active, scopes)

    def begin_compiled(self, compiles: bool) -> None:
        """The first norm is traced. From here on, results are shared within the graph.

        `compiles`: by `torch.compile`, not by `torch.export`.
        """
        self.state.traced = {}
        begin_traced(CompiledForward(self) if compiles and self.state.whole else None)

    def end_compiled(self) -> None:
        """The last norm has run under `torch.compile`.

        The model's own hooks run outside the compiled graph. What they need is an output of the graph. So this is one
        tensor, the moments of all norms.
        """
        self.state.traced = None
        forward = current(self.number)
        if forward is not None:
            self.state.left = forward.left()
            end_traced(self.number, norms_only=True)
        if self.state.whole:
            self.state.posteriors.clear()

    def place_of_compiled(self, device: torch.device, dtype: torch.dtype) -> int:
        """The place in `compiled` of the bundles for a device and a dtype. They are prepared if necessary."""
        steps = list(self.program.steps)
        known = self.compiled_for.get((device, dtype))
        if known is None or not all(map(operator.is_, known[1], steps)):
            bundles = PriorBundles.of(self.plan, None)
            self.compiled.append(prepared(bundles, self.model.module(), Context(device, dtype, {}, 0)))
            known = self.compiled_for[device, dtype] = len(self.compiled) - 1, steps
        return known[0]

    def track_norms(self, moments: Tensor, norms: Sequence[int], batches: Sequence[tuple[int, ...]]) -> None:
        """Update statistics for compiled code. `norms` are the first calls of the norms."""
        track_norms(self.norms, self.compiled_tables, moments, norms, batches)

    def consume(self, call: int, sources: tuple[int, ...]) -> None:
        state = self.state
        for source in sources:
            for candidate in (source, *self.earlier.get(source, ())):
                waiting = state.pending.get(candidate)
                if waiting is not None:
                    waiting.discard(call)
                    if not waiting:
                        del state.pending[candidate]
                        state.posteriors.pop(candidate, None)

    def replaced(self, model: nn.Module) -> list[str]:
        """Layers and norms that priors still read, but that are no longer in the model."""
        present = {id(module) for module in model.modules()}
        norms = [norm for norm in self.plan.norms.values() if id(norm.module.module()) in present]
        calls = [path for norm in norms for call in norm.calls for path in (call, *call.others)]
        read = self.program.needed([path.target for path in calls if path.target is not None])
        steps = {i: self.program.steps[i] for i in read if i in self.plan.owners}
        lost = [
            i for i, step in steps.items() if isinstance(step, Parameter) and id(step.owner.module()) not in present
        ]
        found = [self.plan.owners[i] for i in lost]
        if not self.learned:
            found += self._removed(model, present, {need for path in calls for need in path.needs})
        return list(dict.fromkeys(found))

    def _removed(self, model: nn.Module, present: AbstractSet[int], needs: AbstractSet[int]) -> list[str]:
        """Norms, of these, that are not in the model any more, and no frozen norm or other batch norm instead."""
        modules = dict(model.named_modules())
        own = {id(norm.module.module()) for norm in self.plan.norms.values()}
        found = []
        for name, norm in self.plan.norms.items():
            now = modules.get(name)
            kept = id(norm.module.module()) in present or not any(call.identity in needs for call in norm.calls)
            if not kept and (now is None or id(now) in own or not hasattr(now, "running_mean")):
                found.append(name)
        return found

    def warn_replaced(self, model: nn.Module) -> None:
        self.replacements = Changes.replacements
        found = [name for name in self.replaced(model) if name not in self.told]
        if found:
            self.told.update(found)
            warnings.warn(
                f"kalmannorm: {', '.join(map(repr, found))} was replaced after conversion, and priors still read the "
                "old weights: call kalmannorm.rewire(model, example_input)",
                UserWarning,
                stacklevel=2,
            )

    def _warn_detached(self) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(
                "kalmannorm: a re-entrant checkpoint cuts the gradient of the prior that enters its segment; use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or convert with transition='weights'",
                UserWarning,
                stacklevel=2,
            )


def __getattr__(name: str) -> NoReturn:
    refuse_moved(__name__, name, frozenset({"Begin", "End", "Wire"}))
