"""Counts changes of norms' settings, so that decisions which depend on settings are made once and not in every step."""

from __future__ import annotations

import functools

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook


class Changes:
    """`count` increases whenever an attribute of a norm is set or deleted, and when a norm moves to another device.

    `replacements` increases when a module replaces another one, in any model.
    """

    count = 0
    replacements = 0


@functools.cache
def watch_replacements() -> None:
    """From now on, count replaced modules. Priors may still read the old ones."""
    register_module_module_registration_hook(_replace)


def _replace(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    before = parent._modules.get(name)
    if before is not None and before is not module:
        Changes.replacements += 1
