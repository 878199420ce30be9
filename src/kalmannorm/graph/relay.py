"""What passes between norms inside one forward: posteriors on their way, and results that several priors share.

Nothing outlives the forward of the converted model: its hooks clear the state at the start and at the end. When only a
part of the model runs, a posterior waits until every norm that reads it has done so. Inside an activation-checkpoint
segment, results are kept apart, because its recomputation must do exactly what its forward did; posteriors that enter
it are kept with the segment, for the recomputation to find.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kalmannorm.graph.plan import Plan
from kalmannorm.graph.program import Context
from kalmannorm.graph.segment import recompute_id, reentrant, segment
from kalmannorm.moments import Moments

_ENTERING = "_kalmannorm_entering"


@dataclass
class Scope:
    """Of one stretch of code that is run, and perhaps recomputed, as a whole."""

    memo: dict[int | None, dict[int, Any]] | None = field(default_factory=dict)
    posteriors: dict[int, Moments] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)


class _State(threading.local):
    """One per thread, so that two threads may run one model."""

    def __init__(self) -> None:
        self.depth = 0
        self.whole = False
        self.home: Any = None
        self.memo: dict[int | None, dict[int, Any]] | None = None
        self.posteriors: dict[int, Moments] = {}
        self.counts: dict[int, int] = {}
        self.pending: dict[int, set[int]] = {}
        self.inner: dict[int, Scope] = {}
        self.slot: tuple[int, int, Scope] | None = None


class Relay:
    """Shared by all norms of a converted model; never a part of its state dict."""

    def __init__(self, plan: Plan, readers: dict[int, set[int]]) -> None:
        self.plan, self.program = plan, plan.program
        self.readers = readers
        self.warned = False
        self.state = _State()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "state"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.state = _State()

    def enter(self, whole: bool) -> None:
        """A forward begins: of the whole model, or of a part that was called by itself."""
        state = self.state
        if whole:
            self._clear(state)
            state.depth = 0
        elif state.depth == 0 and segment() is not None:
            return  # a part, checkpointed or recomputed by itself: the segment's scope serves
        if state.depth == 0:
            state.memo, state.home, state.whole = {}, segment(), whole
        state.depth += 1

    def leave(self, whole: bool) -> None:
        state = self.state
        state.depth = 0 if whole else max(state.depth - 1, 0)
        if whole:
            self._clear(state)
        if state.depth == 0:
            state.memo, state.home, state.whole = None, None, False
            state.inner.clear()

    @staticmethod
    def _clear(state: _State) -> None:
        state.posteriors.clear()
        state.counts.clear()
        state.pending.clear()
        state.inner.clear()
        state.slot = None

    def scope(self, found: Any) -> Scope | None:
        """The scope of a segment; None where the forward's own state serves."""
        state = self.state
        if found is None or (state.depth > 0 and found is state.home):
            return None
        running = recompute_id()
        if running == -1 and state.depth > 0:
            if id(found) not in state.inner:
                state.inner[id(found)] = Scope()
            return state.inner[id(found)]
        if state.slot is None or state.slot[:2] != (id(found), running):
            state.slot = (id(found), running, Scope())
        return state.slot[2]

    def call_index(self, first: int, calls: int) -> int:
        """Which call of a norm this is, for norms that run several times in one forward."""
        if calls == 1:
            return 0
        found = segment()
        scope, state = self.scope(found), self.state
        counts = state.counts if scope is None else scope.counts
        count = counts.get(first, 0)
        counts[first] = count + 1
        if scope is not None:
            entering = _entering(found)
            if recompute_id() == -1:
                total = state.counts.get(first, 0)
                state.counts[first] = total + 1
                entering.setdefault(("count", first), total)
            count += entering.get(("count", first), 0)
        return min(count, calls - 1) if state.depth > 0 or scope is not None else count % calls

    def deliver(self, call: int, posterior: Moments) -> None:
        if call not in self.readers:
            return
        found = segment()
        scope, state = self.scope(found), self.state
        if scope is not None:
            scope.posteriors[call] = posterior
            if recompute_id() != -1:
                return
        state.posteriors[call] = posterior
        if not state.whole:
            state.pending[call] = set(self.readers[call])

    def evaluate(self, call: int, target: int, sources: tuple[int, ...], x: Tensor) -> Moments | None:
        """The moments that reach a norm; None where one of the posteriors it needs did not arrive."""
        found = segment()
        scope, state = self.scope(found), self.state
        arrived: dict[int, Moments] = {}
        for source in sources:
            posterior = self._arrived(source, scope, found)
            if posterior is None:
                return None
            arrived[source] = posterior
        memos = state.memo if scope is None else scope.memo
        memo = {} if memos is None else memos.setdefault(x.device.index, {})  # a model may lie on several devices
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        context = Context(x.device, dtype, arrived)
        previous = self.program.evaluate(target, context, memo)
        if not state.whole:
            self._consume(call, sources)
        return previous

    def _arrived(self, source: int, scope: Scope | None, found: Any) -> Moments | None:
        if scope is None:
            return self.state.posteriors.get(source)
        if source in scope.posteriors:
            return scope.posteriors[source]
        entering = _entering(found)
        if recompute_id() != -1:
            return entering.get(source)
        posterior = self.state.posteriors.get(source)
        if posterior is not None:
            if reentrant(found):
                posterior = Moments(posterior.mean.detach(), posterior.var.detach())
                self._warn_detached()
            entering[source] = posterior
        return posterior

    def forget(self) -> None:
        """The last norm of the forward has run.

        `torch.compile(model)` compiles the forward and calls the model's hooks outside of it: what were left for them
        to clear would have to be an output of the compiled graph.
        """
        state = self.state
        if state.whole and self.scope(segment()) is None:
            if state.memo is not None:
                state.memo.clear()
            state.posteriors.clear()

    def _consume(self, call: int, sources: tuple[int, ...]) -> None:
        state = self.state
        for source in sources:
            waiting = state.pending.get(source)
            if waiting is not None:
                waiting.discard(call)
                if not waiting:
                    del state.pending[source]
                    state.posteriors.pop(source, None)

    def _warn_detached(self) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(
                "kalmannorm: a re-entrant checkpoint cuts the gradient of the prior that enters its segment; use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or convert with transition='weights'",
                UserWarning,
                stacklevel=2,
            )


def _entering(found: Any) -> dict[Any, Any]:
    """Kept on the segment itself, so that it lives exactly as long."""
    kept: dict[Any, Any] | None = getattr(found, _ENTERING, None)
    if kept is None:
        kept = {}
        setattr(found, _ENTERING, kept)
    return kept


@dataclass
class Wire:
    """One norm's end of the relay. `calls` are its calls in the trace; each has a target step and its sources."""

    relay: Relay
    calls: tuple[int, ...]
    targets: tuple[int | None, ...]
    sources: tuple[tuple[int, ...], ...]
    last: tuple[bool, ...]  # whether no norm runs after this call

    def begin(self) -> int:
        """Called once per forward of the norm: which of its calls this is."""
        return self.relay.call_index(self.calls[0], len(self.calls))

    def previous(self, which: int, x: Tensor) -> Moments | None:
        target = self.targets[which]
        return None if target is None else self.relay.evaluate(self.calls[which], target, self.sources[which], x)

    def deliver(self, which: int, posterior: Moments) -> None:
        self.relay.deliver(self.calls[which], posterior)
        if self.last[which]:
            self.relay.forget()


@dataclass
class Begin:
    """A forward pre-hook; an object, not a closure, so that the model can be pickled."""

    relay: Relay
    whole: bool

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.relay.enter(self.whole)


@dataclass
class End:
    """A forward hook, called also when the forward fails."""

    relay: Relay
    whole: bool

    def __call__(self, module: nn.Module, args: Any, out: Any) -> None:
        self.relay.leave(self.whole)
