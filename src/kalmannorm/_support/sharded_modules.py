"""Modules that FSDP shards by themselves, as units inside of a model.

FSDP exchanges the gradients of a unit as soon as the backward has left the unit. So a gradient that comes later, from a
node that several units share, would be lost.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch import nn


def kinds_of_units() -> tuple[type, ...]:
    """The classes of units. Empty if FSDP was never imported."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return ()
    return tuple(vars(fsdp)[name] for name in ("FullyShardedDataParallel", "FSDPModule") if name in vars(fsdp))


def in_inner_units(model: nn.Module | None, modules: Iterable[nn.Module | None]) -> bool:
    """Whether one of these modules is in a unit inside of the model. The model itself may be a unit."""
    kinds = kinds_of_units()
    if not kinds or model is None:
        return False
    units = [unit for unit in model.modules() if unit is not model and isinstance(unit, kinds)]
    inside = {id(part) for unit in units for part in unit.modules()}
    return any(id(module) in inside for module in modules)
