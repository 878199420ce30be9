"""Which classes are batch norms, and what else each of them does. `convert` asks only this module.

A subclass of BatchNorm may do anything in its forward, and conversion would silently drop that. So exact classes are
listed here, others are refused with an error that names them, and `register_norm` adds more.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import is_parametrized

from kalmannorm._norms.grouped import GroupedNorm


@dataclass(frozen=True)
class NormClass:
    """Facts about a batch-norm class.

    `dims`: the number of spatial dimensions, 1, 2 or 3; None for any. `then`: children applied to the normalized
    result, in order. `plain`: the qualified name of the class that it becomes outside distributed training.
    """

    dims: int | None
    then: tuple[str, ...] = ()
    plain: str | None = None


_BUILT_IN = {nn.BatchNorm1d: NormClass(1), nn.BatchNorm2d: NormClass(2), nn.BatchNorm3d: NormClass(3),
             nn.SyncBatchNorm: NormClass(None)}  # fmt: skip
_REGISTERED: dict[type[nn.Module], NormClass] = dict(_BUILT_IN)
# By name, so that a library is not imported for users who do not need it.
_BY_NAME = {
    "timm.layers.norm_act.BatchNormAct2d": NormClass(2, ("drop", "act")),
    "timm.layers.norm_act.SyncBatchNormAct": NormClass(2, ("drop", "act"), "timm.layers.norm_act.BatchNormAct2d"),
}


def register_norm(kind: type[nn.Module], *, then: tuple[str, ...] = ()) -> None:
    """Make `convert` accept a subclass of BatchNorm1d, 2d, 3d or SyncBatchNorm.

    `then` names the children (activation, dropout) that its forward applies to the normalized result, in that order. Do
    not register a class whose forward does anything else.
    """
    for base, known in _BUILT_IN.items():
        if isinstance(kind, type) and issubclass(kind, base) and not issubclass(kind, GroupedNorm):
            if isinstance(then, str):
                raise TypeError(f"register_norm: then must be a tuple of child names, got {then!r}")
            _REGISTERED[kind] = NormClass(known.dims, tuple(then))
            return
    raise TypeError(
        f"register_norm: kind must be a subclass of torch.nn.BatchNorm1d, 2d, 3d or SyncBatchNorm, got {kind!r}"
    )


def known(module: nn.Module) -> NormClass | None:
    """Facts about this module's class. None if it is not a batch norm that can be converted."""
    kind = type(module)
    return _REGISTERED.get(kind) or _BY_NAME.get(f"{kind.__module__}.{kind.__qualname__}")


def batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Every batch norm of the model, with one name each. Raises an error if a class is unknown."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if known(module) is not None:
            found[name] = module
        elif isinstance(module, _LazyNormBase):
            raise TypeError(f"{name!r} is a {type(module).__name__}: run the model once to set its channels")
        elif isinstance(module, _BatchNorm) and not isinstance(module, GroupedNorm) and is_parametrized(module):
            raise TypeError(
                f"{name!r} is parametrized: its weight or bias is computed. Make it a Parameter first, by "
                "torch.nn.utils.parametrize.remove_parametrizations"
            )
        elif isinstance(module, _BatchNorm) and not isinstance(module, (GroupedNorm, _InstanceNorm)):
            kind = type(module)
            raise TypeError(
                f"{name!r} is a {kind.__module__}.{kind.__qualname__}, a subclass of BatchNorm that kalmannorm does "
                "not know. If its forward normalizes like BatchNorm and then applies at most some of "
                f"its children, register it first: kalmannorm.register_norm({kind.__qualname__}, then=('act',))"
            )
    return found


def plain_class(kind: type[nn.Module], dims: int | None) -> type[nn.Module]:
    """The class that a norm is turned back into: its own, or for a SyncBatchNorm the BatchNorm of its rank."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    target = _BY_NAME[name].plain if name in _BY_NAME else None
    if target is not None:
        module, _, attribute = target.rpartition(".")
        plain: type[nn.Module] = getattr(sys.modules[module], attribute)
        return plain
    if issubclass(kind, nn.SyncBatchNorm):
        return {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims or 2]
    return kind
