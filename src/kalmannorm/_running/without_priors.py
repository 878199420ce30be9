"""The relay of a model whose norms have no priors. It only lets them take the short way.

No norm reads anything of another one. So the model was never traced: nothing is known of when and how often a norm
runs. The bundles have γ and β of the norms that are in the running module. If all of them are settled, no bundle runs
(`settled_way.py`). Copies and pickles of a part of the model
do not contain the rest of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from kalmannorm._running.bundling import Call
from kalmannorm._running.paths import Path
from kalmannorm._running.prior_bundles import PriorBundles
from kalmannorm._running.relay import Relay
from kalmannorm._running.wires import Wire
from kalmannorm._support.changes import Changes
from kalmannorm._wiring.plan import Plan
from kalmannorm._wiring.program import Program
from kalmannorm._wiring.weak_modules import WeakModule


class RelayWithoutPriors(Relay):
    """Shared by all norms of a model that `convert` gave no priors."""

    compiles = False

    def __init__(self) -> None:
        super().__init__(Plan(Program(), {}, "weights"))

    def _begin(self) -> None:
        super()._begin()
        self.settled: tuple[int, WeakKeyDictionary[nn.Module, bool]] = -1, WeakKeyDictionary()

    def _bundles_of_part(self, faded: bool) -> PriorBundles:
        part = self.state.part
        assert part is not None
        known = self.bundles_without_priors if faded else self.bundles
        if part not in known:
            calls = [Call(norm.wire.calls[0], None, WeakModule(norm)) for norm in self._norms_of(part)]
            known[part] = PriorBundles(self.program, calls, alone=faded)
        return known[part]

    def _norms_of(self, part: nn.Module) -> list[Any]:
        return [each for each in part.modules() if self._connects(each)]

    def _has_faded(self) -> bool:
        """Whether all norms of the part are settled."""
        part = self.state.part
        assert part is not None
        count, known = self.settled
        if count != Changes.count:
            known = WeakKeyDictionary()
            self.settled = Changes.count, known
        if part not in known:
            norms = self._norms_of(part)
            known[part] = bool(norms) and all(norm.runs_settled() for norm in norms)
        return known[part]

    def _model(self) -> WeakModule:
        return WeakModule(self.state.part)

    def _connects(self, module: nn.Module) -> bool:
        return getattr(module.__dict__.get("wire"), "relay", None) is self


def connect_without_priors(norms: Iterable[Any]) -> Relay:
    """Give every norm a wire to a new relay."""
    relay = RelayWithoutPriors()
    for number, norm in enumerate(norms):
        path = Path(number, None, (), frozenset())
        norm.wire = Wire(relay, calls=(number,), paths=((path,),), first=(False,), last=(False,))
    return relay
