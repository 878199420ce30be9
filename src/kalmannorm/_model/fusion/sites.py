"""Finds a norm, perhaps a sum, and a ReLU in a graph, with no other reader between them, and replaces them by one call.

The norm still runs at its old place. The sum and the ReLU move up to it. So the other summand has to be computed
before, and nothing in between may write into it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from kalmannorm._model.fusion.symbolic import IN_PLACE, hooked
from kalmannorm._norms.computed_weights import ComputedWeight
from kalmannorm._norms.grouped import GroupedNorm

_RELU_FUNCTIONS = {torch.relu, torch.relu_, F.relu, F.relu_}
_ADD_FUNCTIONS = {operator.add, operator.iadd, torch.add}
_IN_PLACE_ADDS = {operator.iadd, "add_"}
_IN_PLACE = {getattr(operator, name) for name in IN_PLACE}
_KNOWN = {"torch", "_operator", "operator", "math", "builtins", "None"}

NormOf = Callable[[nn.Module], "GroupedNorm | str | None"]
"""The norm whose result a module returns. A reason, if it cannot be fused. None for other modules."""


@dataclass(frozen=True)
class Site:
    """`last` is the node whose value the norm will return: a ReLU, or the norm itself if it applies one."""

    norm: fx.Node
    last: fx.Node
    add: fx.Node | None = None

    @property
    def kind(self) -> str:
        return "ReLU" if self.add is None else "sum and ReLU"


def is_relu(module: nn.Module) -> bool:
    return type(module) is nn.ReLU and not hooked(module)


class Finder:
    """The sites of one graph, and for every other norm in it the reason why it is not one."""

    def __init__(self, root: nn.Module, graph: fx.Graph, norm_of: NormOf) -> None:
        self.root, self.norm_of = root, norm_of
        self.order = {node: place for place, node in enumerate(graph.nodes)}
        self.sites: list[Site] = []
        self.left: dict[fx.Node, str] = {}
        for node in graph.nodes:
            found = self._norm(node)
            if found is not None:
                result = found if isinstance(found, str) else self._site(node, found)
                if isinstance(result, Site):
                    self.sites.append(result)
                else:
                    self.left[node] = result

    def _module(self, node: fx.Node) -> nn.Module | None:
        return self.root.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _norm(self, node: fx.Node) -> GroupedNorm | str | None:
        module = self._module(node)
        found = None if module is None else self.norm_of(module)
        if isinstance(module, GroupedNorm) and (len(node.args) != 1 or node.kwargs):
            return "it is called with more than x"
        return found

    def _site(self, node: fx.Node, norm: GroupedNorm) -> Site | str:
        after = [child for name in norm.then if type(child := getattr(norm, name)) is not nn.Identity or hooked(child)]
        if after:
            alone = len(after) == 1 and is_relu(after[0])
            return Site(node, node) if alone else f"followed by its own {type(after[-1]).__name__}"
        user = _only(node)
        if user is None:
            return "its result is used more than once"
        if self._is_relu(user):
            return Site(node, user)
        other = self._other_summand(user, node)
        if other is None:
            return f"followed by {self._name(user)}"
        relu = _only(user)
        if relu is None:
            return "the sum with its result is used more than once"
        if not self._is_relu(relu):
            return f"the sum with its result is followed by {self._name(relu)}"
        return self._hindrance(node, user, other) or Site(node, relu, user)

    def _hindrance(self, node: fx.Node, add: fx.Node, other: fx.Node) -> str | None:
        """Why the sum of a norm's result and another value cannot be computed when the norm runs."""
        start, end = self.order[node], self.order[add]
        if self.order[other] > start:
            takes = isinstance(self._norm(other), GroupedNorm)
            return "the norm it is added to computes the sum" if takes else "the other summand is computed after it"
        written = add.target in _IN_PLACE_ADDS and add.args[0] is other
        if written and not (_only(other) is add and self._is_new(other)):
            return "it is added in place to another tensor"
        if any(self._writes(between) for between, place in self.order.items() if start < place < end):
            return "a tensor may be written to between it and its sum"
        return None

    def _is_relu(self, node: fx.Node) -> bool:
        module = self._module(node)
        if module is not None:
            return is_relu(module)
        if node.op == "call_function":
            return node.target in _RELU_FUNCTIONS
        return node.op == "call_method" and node.target in ("relu", "relu_")

    def _other_summand(self, node: fx.Node, norm: fx.Node) -> fx.Node | None:
        adds = (node.op == "call_function" and node.target in _ADD_FUNCTIONS) or (
            node.op == "call_method" and node.target in ("add", "add_")
        )
        known = set(node.kwargs) <= {"alpha", "other", "input"} and node.kwargs.get("alpha", 1) == 1
        summands = [*node.args, *(node.kwargs[name] for name in ("input", "other") if name in node.kwargs)]
        others = [summand for summand in summands if summand is not norm]
        if not adds or not known or len(summands) != 2 or len(others) != 1:
            return None
        return others[0] if isinstance(others[0], fx.Node) else None

    def _is_new(self, node: fx.Node) -> bool:
        """Whether the value of a node is a tensor with no other reference."""
        return isinstance(self._norm(node) or self._module(node), (GroupedNorm, _ConvNd, nn.Linear))

    def _writes(self, node: fx.Node) -> bool:
        """Whether a node may write into one of its inputs."""
        module = self._module(node)
        if module is not None:
            known = isinstance(module, (GroupedNorm, ComputedWeight))
            known = known or type(module).__module__.startswith("torch.nn.modules.")
            return not known or any(module.children()) or bool(getattr(module, "inplace", False)) or hooked(module)
        if node.kwargs.get("inplace") or node.kwargs.get("out") is not None or node.target in _IN_PLACE:
            return True
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "_")
        ours = node.op != "call_function" or str(getattr(node.target, "__module__", "")).split(".")[0] in _KNOWN
        return node.op in ("call_function", "call_method") and (name.endswith("_") or name == "setitem" or not ours)

    def _name(self, node: fx.Node) -> str:
        module = self._module(node)
        if module is not None:
            return type(module).__name__ + (" with a hook" if hooked(module) else "")
        if node.op == "output":
            return "the end of its forward"
        return str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", "a function")


def _only(node: fx.Node) -> fx.Node | None:
    """The only node that uses the value of this one, and uses it once."""
    if len(node.users) != 1:
        return None
    user = next(iter(node.users))
    uses: list[Any] = []
    fx.node.map_arg((user.args, user.kwargs), lambda given: uses.append(given) if given is node else None)
    return user if len(uses) == 1 else None


def rewrite(graph: fx.Graph, sites: list[Site]) -> None:
    """Replace each site by one call of its norm."""
    for site in sites:
        # Read now, because the other summand may be the result of an earlier site.
        others = [] if site.add is None else [given for given in site.add.all_input_nodes if given is not site.norm]
        if site.last is not site.norm:
            site.last.replace_all_uses_with(site.norm)
            for node in (site.last, site.add):
                if node is not None:
                    graph.erase_node(node)
        site.norm.kwargs = {"residual": others[0], "relu": True} if others else {"relu": True}
    graph.lint()  # type: ignore[no-untyped-call]
