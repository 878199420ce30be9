"""Which classes are batch norms, and what each does besides: the one place that `convert` asks.

A class that only inherits from BatchNorm may do anything in its forward, and converting it would drop that silently.
So exact classes are known here, others are refused by name, and `register_norm` teaches more.
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
    """What is known of a batch-norm class.

    `dims`: the rank it is for, 1, 2 or 3 spatial dimensions; None for any. `then`: children applied to the normalized
    result, in order. `plain`: the qualified name of the class it becomes outside distributed training.
    """

    dims: int | None
    then: tuple[str, ...] = ()
    plain: str | None = None


_BUILT_IN = {nn.BatchNorm1d: NormClass(1), nn.BatchNorm2d: NormClass(2), nn.BatchNorm3d: NormClass(3),
             nn.SyncBatchNorm: NormClass(None)}  # fmt: skip
_REGISTERED: dict[type[nn.Module], NormClass] = dict(_BUILT_IN)
# By name, so that no library is imported for the sake of those who do not use it.
_BY_NAME = {
    "timm.layers.norm_act.BatchNormAct2d": NormClass(2, ("drop", "act")),
    "timm.layers.norm_act.SyncBatchNormAct": NormClass(2, ("drop", "act"), "timm.layers.norm_act.BatchNormAct2d"),
}


def register_norm(kind: type[nn.Module], *, then: tuple[str, ...] = ()) -> None:
    """Teach `convert` a subclass of BatchNorm1d, 2d, 3d or SyncBatchNorm.

    `then` names the children (activation, dropout) that its forward applies to the normalized result, in that order.
    A class whose forward does anything else does not fit, and should stay what it is.
    """
    for base, known in _BUILT_IN.items():
        if isinstance(kind, type) and issubclass(kind, base):
            if isinstance(then, str):
                raise TypeError(f"register_norm: then must be a tuple of names of children, got {then!r}")
            _REGISTERED[kind] = NormClass(known.dims, tuple(then))
            return
    raise TypeError(
        f"register_norm: kind must be a subclass of torch.nn.BatchNorm1d, 2d, 3d or SyncBatchNorm, got {kind!r}"
    )


def known(module: nn.Module) -> NormClass | None:
    """What is known of this module's class; None where it is no batch norm that can be converted."""
    kind = type(module)
    return _REGISTERED.get(kind) or _BY_NAME.get(f"{kind.__module__}.{kind.__qualname__}")


def batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Every batch norm of the model by name, one name each; raises for one whose class is not known."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if known(module) is not None:
            found[name] = module
        elif isinstance(module, _LazyNormBase):
            raise TypeError(f"{name!r} is a {type(module).__name__}: run the model once, so that it knows its channels")
        elif isinstance(module, _BatchNorm) and is_parametrized(module):
            raise TypeError(
                f"{name!r} is parametrized: its weight or bias is computed. Make it a Parameter first, by "
                "torch.nn.utils.parametrize.remove_parametrizations"
            )
        elif isinstance(module, _BatchNorm) and not isinstance(module, (GroupedNorm, _InstanceNorm)):
            kind = type(module)
            raise TypeError(
                f"{name!r} is a {kind.__module__}.{kind.__qualname__}, a subclass of BatchNorm that kalmannorm does "
                "not know and will not guess at. If it normalizes as BatchNorm does and then at most applies some of "
                f"its children, say so first: kalmannorm.register_norm({kind.__qualname__}, then=('act',))"
            )
    return found


def plain_class(kind: type[nn.Module], dims: int | None) -> type[nn.Module]:
    """The class a norm goes back to: its own, and for a SyncBatchNorm the BatchNorm of its rank."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    target = _BY_NAME[name].plain if name in _BY_NAME else None
    if target is not None:
        module, _, attribute = target.rpartition(".")
        plain: type[nn.Module] = getattr(sys.modules[module], attribute)
        return plain
    if issubclass(kind, nn.SyncBatchNorm):
        return {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims or 2]
    return kind
