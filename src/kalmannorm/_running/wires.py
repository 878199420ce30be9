"""The wire of a norm: how a norm asks for its prior, passes on its posterior, and has its statistics updated."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from kalmannorm._ops.track.request import TrackingRequest
from kalmannorm._running.compiled_way import Key, site_of
from kalmannorm._running.paths import Path, longest
from kalmannorm._running.relay import Relay
from kalmannorm._running.scopes import kept_by
from kalmannorm._support.activation_checkpoints import Segment, saved_tensors_hooked
from kalmannorm._support.compiling import current
from kalmannorm._support.pickles import Complete
from kalmannorm._support.tracing import jit_traces
from kalmannorm._wiring.plan import Plan
from kalmannorm.moments import Moments


@dataclass
class Wire(Complete):
    """Connects one norm to the relay. `calls` are its calls in the trace, each with the paths that lead to it."""

    relay: Relay
    calls: tuple[int, ...]
    paths: tuple[tuple[Path, ...], ...]
    first: tuple[bool, ...]  # whether no norm runs before this call
    last: tuple[bool, ...]  # whether no norm runs after this call
    kept: tuple[nn.Module, ...] = ()  # modules that its priors read, kept even if the model is deleted: see `keepable`

    expects = True  # whether the last call should have had a prior
    single = False  # whether the norm runs once, on one path

    def __post_init__(self) -> None:
        self.single = self._is_single()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.single = self._is_single()

    def _is_single(self) -> bool:
        return len(self.calls) == len(self.paths[0]) == 1

    def path(self, which: int) -> Path | None:
        """The path that leads to this call: of those with all their norms, the one with the most norms.

        None if there is none. If parts are called by themselves, it is not known what ran: the path of the example.
        """
        paths = self.paths[which]
        if len(paths) == 1 and not paths[0].needs:
            return paths[0]
        relay, call = self.relay, self.calls[which]
        active = relay.open_segments()
        if active and active[0].recomputed:
            found = kept_by(active[0], relay).paths.get(call, 0)
            return None if found < 0 else paths[found]
        ran = relay.ran()
        if not relay.state.whole or ran is None:
            return paths[0]
        found = longest(paths, ran)
        if torch.compiler.is_compiling():  # norms outside of the graph may have run
            return paths[max(found, 0)]
        if found < 0:
            unnoticed, model = relay.unnoticed(paths[0].needs - ran.keys()), relay.model.module()
            self.forget(which, unnoticed)
            if unnoticed and model is not None:
                relay.warn_replaced(model)
            paths = self.paths[which]
            found = longest(paths, ran)
        if found < 0:
            relay.missed[call] = tuple(sorted(paths[0].needs - ran.keys()))
        if found != 0:
            for segment in active:
                kept_by(segment, relay).paths[call] = found
        return None if found < 0 else paths[found]

    def forget(self, which: int, norms: frozenset[int]) -> None:
        """Do not wait for these norms any more."""
        if norms:
            paths = list(self.paths)
            paths[which] = tuple(path._replace(needs=path.needs - norms) for path in paths[which])
            self.paths = tuple(paths)

    def calibrate(self) -> None:
        """From now on, scale and shift every prior of the norm by the norm's constants."""
        self.paths = self.relay.calibrated(self.calls[0], self.paths)

    def begin(self) -> int:
        """Called once per forward of the norm. Returns the index of this call."""
        which = self.relay.call_index(self.calls[0], len(self.calls))
        if self.first[which] and torch.compiler.is_compiling():
            self.relay.begin_compiled(torch.compiler.is_dynamo_compiling())
        ran = self.relay.ran()
        if ran is not None:
            ran[self.calls[0]] = len(ran)
        return which

    def normalize(self, norm: Any, x: Tensor, residual: Tensor | None, relu: bool) -> Tensor | None:
        """The whole forward of the norm on the short way. None if it must take the long way."""
        if not self.single:
            return None
        segment = None
        if saved_tensors_hooked():
            segment = self.relay.segment()
            if segment is None:  # hooks of others must see every norm
                return None
            if segment.recomputed:
                return self._repeat(norm, x, residual, relu, segment)
        state = self.relay.state
        forward = state.short
        if forward is None:
            return None
        call, target, sources, needs = self.paths[0][0]
        ran = state.ran
        if norm.closes and state.postponed.waiting:
            state.postponed.run_before_reading(norm.running_mean, self.relay.tables)
        # After a long run another one follows: both are then tracked in the order in which they ran.
        ready = not state.whole or (call not in ran and needs <= ran.keys())
        y: Tensor | None = None
        if segment is None:
            y = forward.normalize(call, target, norm, x, residual, relu) if ready else None
        else:
            kept = kept_by(segment, self.relay).repeated
            if ready and call not in kept:
                y = forward.normalize(call, target, norm, x, residual, relu, segment.region(), kept)
                if y is not None and sources:
                    self.relay.keep_entering(sources)
            kept.setdefault(call, None)  # the recomputation repeats the first run, so a later one is never short
        if y is not None:
            ran[call] = len(ran)
            if sources and not state.whole:
                self.relay.consume(call, sources)
        return y

    def _repeat(self, norm: Any, x: Tensor, residual: Tensor | None, relu: bool, segment: Segment) -> Tensor | None:
        """In a recomputation: what the first forward did, if that was on the short way."""
        found = kept_by(segment, self.relay).repeated.get(self.calls[0])
        if found is None or not self.relay.first_in_recomputation(self.calls[0], segment):
            return None
        y = found.run(norm, x, residual, relu, segment.region())
        return norm._finish(y, residual is not None or relu) if y is not None and norm.then else y

    def place(self, device: torch.device, dtype: torch.dtype) -> tuple[str, int, Key, int, bool, bool, bool] | None:
        """Where the norm is, for compiled code: the first fields of `Known` in `_norms/compiled.py`.

        None if it runs more than once, needs the posteriors of others, or is in no bundle.
        """
        alone = self.single and not self.paths[0][0].sources
        found = site_of(self.relay, self.calls[0], device, dtype) if alone else None
        if found is None:
            return None
        return self.relay.number, self.calls[0], *found, self.first[0], self.last[0], self.relay.branches

    def postpone_compiled(self, posterior: Moments, observation: Moments, x: Tensor, size: int) -> bool:
        """Postpone an update of statistics in compiled code. False: the norm must make it now."""
        forward = current(self.relay.number)
        if forward is None:
            return False
        moments = torch.stack([posterior.mean, posterior.var, observation.mean, observation.var])
        postponed: bool = forward.postpone(self.calls[0], moments.detach().view(-1), size, x)
        return postponed

    def mark_compiled(self) -> None:
        """The norm runs in compiled code, where a run is not noted. Called while it is traced."""
        self.relay.in_compiled.add(self.calls[0])

    def track_first_run(self) -> None:
        """If the norm ran on the short way in this forward, make its update before its next one."""
        forward = self.relay.state.short
        if forward is not None and forward.waits(self.calls[0]):
            forward.track()

    def track_before_reading(self, buffer: Tensor | None) -> None:
        """Make the updates of the norm that still wait, because this forward reads its statistics."""
        self.track_first_run()
        self.relay.state.postponed.run_before_reading(buffer, self.relay.tables)

    def previous(self, which: int, x: Tensor) -> Moments | None:
        path = self.path(which)
        if not torch.compiler.is_compiling():
            self.expects = path is None or path.target is not None
        if path is None or path.target is None:
            return None
        if not path.sources and jit_traces():
            return self.relay.constant(path.target, x)
        return self.relay.evaluate(path.call, path.target, path.sources, x)

    def postpone(self, request: TrackingRequest, kernels: ModuleType) -> bool:
        return self.relay.postpone(request, kernels)

    def track_postponed(self) -> None:
        self.relay.track_postponed()

    def deliver(self, which: int, posterior: Moments) -> None:
        self.relay.deliver(self.calls[which], posterior)
        if self.last[which] and torch.compiler.is_compiling():
            self.relay.end_compiled()


def keepable(plan: Plan) -> dict[str, tuple[nn.Module, ...]]:
    """For every norm of a plan the modules that its wire may keep: those that its priors read, and the layer to fold
    into.

    The relay keeps no modules. A wire keeps no module that contains a norm which does not run before its own. Earlier
    norms keep only modules that run before them, so there are no reference cycles.
    """
    order = {id(norm.module.module()): norm.calls[0].identity for norm in plan.norms.values() if norm.calls}
    kept: dict[str, tuple[nn.Module, ...]] = {}
    for name, norm in plan.norms.items():
        paths = [path for call in norm.calls for path in (call, *call.others)]
        targets = [path.target for path in paths if path.target is not None]
        read = [norm.fold, *(owner for target in targets for owner in plan.program.owners(target))]
        found = {id(module): module for known in read if (module := known.module()) is not None}
        own = order.get(id(norm.module.module()), 0)
        kept[name] = tuple(
            module for module in found.values() if all(order.get(id(m), -1) < own for m in module.modules())
        )
    return kept
