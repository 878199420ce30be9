"""Registers ops in torch so that compiled code calls them at little cost.

A differentiable op is two ops. Users call the first, whose autograd kernel calls the second below autograd. So the
graph of a compiler contains the second, for which no autograd kernel runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from kalmannorm._ops import inductor_calls

LIBRARY = torch.library.Library("kalmannorm", "FRAGMENT")  # it lives as long as the process
ANY_LAYOUT = tuple(tag for name, tag in torch.Tag.__members__.items() if name == "flexible_layout")
"""The tag of an op whose tensors may have other strides than in the traced model. Inductor then copies nothing, if it
runs a contiguous model in channels_last. Without the tag it copies x before every norm, and y behind it."""


def register(
    name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any], tags: tuple[torch.Tag, ...] = ()
) -> None:
    """An op that autograd does not see. `fake` computes shapes and layouts only."""
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"kalmannorm::{name}", _lowering_first(fake), lib=LIBRARY)
    if ANY_LAYOUT and tags == ANY_LAYOUT:
        inductor_calls.offer(name, run)


def _lowering_first(fake: Callable[..., Any]) -> Callable[..., Any]:
    """The fake of an op. It runs before inductor sees the op."""

    @functools.wraps(fake)
    def first(*args: Any) -> Any:
        inductor_calls.lower()
        return fake(*args)

    return first


Implementation = tuple[str, Callable[..., Any], Callable[..., Any]]
"""An op: its schema, what runs, and a fake that computes shapes and layouts only."""


def register_differentiable(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    apply: Callable[..., Any],
    below: Implementation | None = None,
    tags: tuple[torch.Tag, ...] = (),
) -> None:
    """The ops `name` and `name_forward`. `apply` applies an autograd function, whose forward calls `below_autograd`.

    `below` is the op `name_forward` if it differs from `name`.
    """
    register(f"{name}_forward", *(below or (schema, run, fake)), tags)
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    LIBRARY.impl(name, apply, "Autograd")
    torch.library.register_fake(f"kalmannorm::{name}", fake, lib=LIBRARY)


def below_autograd(name: str, *args: Any) -> Any:
    """Run the op `name_forward`."""
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.kalmannorm, f"{name}_forward")(*args)
