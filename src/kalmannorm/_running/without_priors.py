"""The relay of a model whose norms have no priors. It only lets them take the short way.

No norm reads anything of another one. So the model was never traced: nothing is known of when and how often a norm
runs. The bundles have γ and β of the norms that are in the running module. Copies and pickles of a part of the model
do not contain the rest of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from kalmannorm._running.bundling import Call
from kalmannorm._running.paths import Path
from kalmannorm._running.prior_bundles import PriorBundles
from kalmannorm._running.relay import Relay
from kalmannorm._running.wires import Wire
from kalmannorm._wiring.plan import Plan
from kalmannorm._wiring.program import Program
from kalmannorm._wiring.weak_modules import WeakModule


class RelayWithoutPriors(Relay):
    """Shared by all norms of a model that `convert` gave no priors."""

    compiles = False

    def __init__(self) -> None:
        super().__init__(Plan(Program(), {}, "weights"))

    def _bundles_of_part(self, faded: bool) -> PriorBundles:
        part = self.state.part
        assert part is not None
        if part not in self.bundles:
            found: list[Any] = [each for each in part.modules() if self._connects(each)]
            calls = [Call(norm.wire.calls[0], None, WeakModule(norm)) for norm in found]
            self.bundles[part] = PriorBundles(self.program, calls)
        return self.bundles[part]

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
