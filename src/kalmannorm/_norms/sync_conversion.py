"""`convert_sync_batchnorm` of torch and timm: a norm of this library stays, and joins its statistics over ranks.

These functions replace each batch norm by a SyncBatchNorm, which has no prior. Lightning's `sync_batchnorm=True` calls
the one of torch. They walk over the children of every module. So a norm notices the walk when its children are asked
for. It sets its process group, and puts itself in the place of the SyncBatchNorm when that is added to the model.
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

_REPLACED: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
"""By SyncBatchNorm: the norm that it was made for."""


def _stay(parent: nn.Module, name: str, added: nn.Module | None) -> nn.Module | None:
    return None if added is None else _REPLACED.get(added)


def notice_conversion(norm: Any) -> None:
    """Called when the children of a norm are asked for, by the function that asks for them."""
    if torch.compiler.is_compiling():
        return
    caller = sys._getframe(2)
    if caller.f_code.co_name != "convert_sync_batchnorm":
        return
    replacement, group = (caller.f_locals.get(name) for name in ("module_output", "process_group"))
    if not isinstance(replacement, nn.SyncBatchNorm):
        return
    if norm.process_group is None:
        norm.process_group = group or "world"
    _watch()
    _REPLACED[replacement] = norm


def _watch() -> None:
    global _watching
    if not _watching:
        hook: Any = _stay  # returns the module to add instead, which torch's type does not say
        register_module_module_registration_hook(hook)
        _watching = True


_watching = False
