"""Outputs of norms that the backward computes again, from tensors that are kept anyway.

    y = relu(norm(x) + residual)

A norm keeps x. The layer that reads y needs y for the gradient of its weight. If the layer keeps the recipe of y, it
keeps x and the moments, which the norm keeps too, so y itself is freed. A recipe consists of tensors, which autograd
saves like any others, and of a plan, which holds no tensors and computes y from them.

The residual is another such output, or a tensor that is kept for another reason. So the outputs of a chain of residual
blocks are computed one from the other. Every output is computed once in a backward. If several readers need it, it
stays until the backward of its norm, which is the last reader. At most `DEEPEST` sums depend on one another, because
all of them exist at once. The next one is kept.

A tensor carries its recipe as an attribute. The recipe holds for one version of the tensor, and for layers in the same
segment of an activation checkpoint: see `region` in `_support/activation_checkpoints.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

DEEPEST = 4
_RECIPE = "_kalmannorm_recipe"

Tensors = tuple[Tensor | None, ...]


class Formula(Protocol):
    """How a norm computes y from its own tensors and a residual."""

    def again(self, tensors: Sequence[Any], residual: Tensor | None) -> Tensor:
        """y, without a graph."""

    def attached(self, tensors: Sequence[Any], residual: Tensor | None) -> Tensor:
        """y with the graph of all tensors, for double backwards."""


class Plan:
    """How y is computed from the tensors of its recipe: first `own` tensors of the norm, then those of the residual.

    `inner` is the plan of the residual. If it is None although the norm `adds`, the residual is the last tensor.
    """

    __slots__ = ("adds", "depth", "formula", "inner", "own", "readers", "stream", "value")

    def __init__(self, formula: Formula, own: int, inner: Plan | None, adds: bool) -> None:
        self.formula, self.own, self.inner, self.adds = formula, own, inner, adds
        self.depth: int = int(adds) + (0 if inner is None else inner.depth)
        self.readers = 0
        self.value: Tensor | None = None
        self.stream = -1

    def take(self, tensors: Sequence[Any]) -> Tensor:
        """y. It is kept if there are several readers."""
        stream = _stream(tensors[0])
        if self.value is not None and self.stream == stream:
            return self.value
        residual = None
        if self.adds:
            rest = tensors[self.own :]
            residual = rest[0] if self.inner is None else self.inner.take(rest)
        with torch.no_grad():
            y = self.formula.again(tensors[: self.own], residual)
        if self.readers > 1:
            self.value, self.stream = y, stream
        return y

    def attached(self, tensors: Sequence[Any]) -> Tensor:
        residual = None
        if self.adds:
            rest = tensors[self.own :]
            residual = rest[0] if self.inner is None else self.inner.attached(rest)
        return self.formula.attached(tensors[: self.own], residual)

    def release(self) -> None:
        """The last reader is done."""
        self.value = None


class Recipe:
    """The recipe of one output. Without a plan it says that the tensor itself is kept."""

    __slots__ = ("plan", "region", "tensors", "version")

    def __init__(self, plan: Plan | None, tensors: Tensors, region: Any, version: int) -> None:
        self.plan, self.tensors, self.region, self.version = plan, tensors, region, version

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a tensor is another tensor, without a recipe."""

    def __reduce__(self) -> tuple[Any, ...]:
        """The same for a pickled tensor. `torch.load` knows this class."""
        return OrderedDict, ()


def recipe_of(y: Tensor, region: Any) -> Recipe | None:
    """The recipe of a tensor for readers in this region."""
    recipe = getattr(y, _RECIPE, None)
    if type(recipe) is not Recipe or recipe.region is not region or recipe.version != y._version:
        return None
    return recipe


def give(y: Tensor, plan: Plan, tensors: Tensors, region: Any) -> None:
    setattr(y, _RECIPE, Recipe(plan, tensors, region, y._version))


def keep(y: Tensor, region: Any) -> None:
    """Note that autograd keeps this tensor, for whatever reason."""
    if y.requires_grad and recipe_of(y, region) is None:
        setattr(y, _RECIPE, Recipe(None, (), region, y._version))


def plan_of(formula: Formula, own: int, residual: Tensor | None, region: Any) -> tuple[Plan, Tensors] | None:
    """The plan of an output, and the tensors of its residual. None if the output has to be kept."""
    if residual is None:
        return Plan(formula, own, None, False), ()
    recipe = recipe_of(residual, region)
    if recipe is None:
        return None
    if recipe.plan is None:
        return Plan(formula, own, None, True), (residual,)
    if recipe.plan.depth >= DEEPEST:
        return None
    recipe.plan.readers += 1
    return Plan(formula, own, recipe.plan, True), recipe.tensors


def _stream(x: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(x.device.index) if x.device.type == "cuda" else 0
