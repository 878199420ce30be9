"""Classes of converted norms that stay instances of the class they had, such as timm's BatchNormAct2d.

`BatchKalmanNorm2d` is a `nn.BatchNorm2d`, so code that looks for batch norms finds it. Some code knows more: timm's
`freeze_batch_norm_2d` keeps the activation inside a BatchNormAct2d, but not inside other batch norms. So a norm of such
a class gets a class that has both bases. Its methods are those of the Kalman norm.
"""

from __future__ import annotations

import copyreg
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

from kalmannorm._norms.grouped import GroupedNorm

_CLASSES: WeakValueDictionary[tuple[type, type], type] = WeakValueDictionary()


class _Kept(type):
    """The type of such classes. They have no name in any module, so they are pickled by their two bases."""


def kept_class(kind: type[GroupedNorm], original: type[nn.Module]) -> Any:
    """A class with the methods of `kind` that is a subclass of `original` too, or `kind` if it is one already.

    A SyncBatchNorm is not kept: DDP refuses modules of this class on a CPU. The norm joins ranks by `process_group`.
    """
    if issubclass(kind, original) or issubclass(original, nn.SyncBatchNorm) or type(original) is not type:
        return kind
    made: Any = _CLASSES.get((kind, original))
    if made is None:
        same = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
        made = _Kept(kind.__name__, (kind, original), same)
        _CLASSES[kind, original] = made
    return made


def _reduced(made: type) -> tuple[Any, ...]:
    return kept_class, made.__bases__


copyreg.pickle(_Kept, _reduced)
