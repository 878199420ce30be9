"""Which modules of a model call norms, and the program of each: its own forward, with norms fused.

A unit is a module whose forward calls norms. It is traced with its children as single nodes, so every container is
still called as a module, with its hooks. There is one exception: a child that returns a norm's result, such as the
shortcut of a residual block. It becomes a part of its parent's program if the parent adds to that result or applies a
ReLU.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from kalmannorm._model.fusion.sites import Finder, Site, rewrite
from kalmannorm._model.fusion.symbolic import NotTraceableError, hooked, symbolic_graph
from kalmannorm._norms.baselines import BatchRenorm, GhostBatchNorm
from kalmannorm._norms.grouped import GroupedNorm
from kalmannorm._norms.kalman import BatchKalmanNorm
from kalmannorm._norms.moving_average import MovingAverageBatchNorm
from kalmannorm._support.fused_modules import Argument, Code, FusedForward

_FORWARDS = {
    BatchKalmanNorm.forward,
    GhostBatchNorm.forward,
    BatchRenorm.forward,
    MovingAverageBatchNorm.forward,
}

Calls = Mapping[int, "tuple[Argument, ...] | str"]
"""The arguments of each module's call, by identity. A reason, if its call cannot be traced."""


@dataclass
class Unit:
    """A module and its new forward. `norms` says what each norm is fused with."""

    name: str
    module: nn.Module
    program: FusedForward
    norms: dict[str, str]


@dataclass
class Units:
    """The units of a model, why other norms are not fused, and why modules that call norms could not be traced."""

    found: list[Unit] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    untraced: dict[str, str] = field(default_factory=dict)

    def fused(self) -> dict[str, str]:
        return {name: kind for unit in self.found for name, kind in unit.norms.items()}


def find_units(model: nn.Module, calls: Calls, excluded: Mapping[str, str]) -> Units:
    """The units of a model, inner ones first. `excluded` are norms that must not be fused, with the reason."""
    return _Search(model, calls, excluded).units


class _Search:
    def __init__(self, model: nn.Module, calls: Calls, excluded: Mapping[str, str]) -> None:
        self.calls, self.excluded, self.units = calls, excluded, Units()
        self.names = {module: name for name, module in model.named_modules()}
        self.endings: dict[nn.Module, GroupedNorm] = {}
        for module, name in reversed(self.names.items()):  # children come before their parents
            if not isinstance(module, GroupedNorm) and any(isinstance(part, GroupedNorm) for part in module.modules()):
                try:
                    self._look_into(name, module)
                except NotTraceableError as error:
                    self.units.untraced[name] = str(error)

    def _norm_of(self, module: nn.Module) -> GroupedNorm | str | None:
        if not isinstance(module, GroupedNorm):
            return self.endings.get(module)
        if self.names[module] in self.excluded:
            return self.excluded[self.names[module]]
        if type(module).forward not in _FORWARDS or "forward" in vars(module):
            return f"its class, {type(module).__name__}, has a forward of its own"
        return "it has a hook" if hooked(module) else module

    def _look_into(self, name: str, module: nn.Module) -> None:
        arguments = self.calls.get(id(module))
        if arguments is None:  # a list of modules, or a module that the example does not reach
            return
        if isinstance(arguments, str):
            raise NotTraceableError(arguments)
        graphs = self._graphs(module, arguments, ())
        same = _code(graphs[0]) == _code(graphs[1])
        self._note_ending(module, graphs[0], same)
        inlined: set[str] = set()
        finders = [Finder(module, graph, self._norm_of) for graph in graphs]
        while children := {str(site.norm.target) for f in finders for site in f.sites if self._is_child(module, site)}:
            inlined |= children
            graphs = self._graphs(module, arguments, inlined)
            finders = [Finder(module, graph, self._norm_of) for graph in graphs]
        norms: dict[str, str] = {}
        for finder in finders:
            for node, reason in finder.left.items():
                called = module.get_submodule(str(node.target))
                if isinstance(called, GroupedNorm):
                    self.units.left[self.names[called]] = reason
            norms |= {self.names[module.get_submodule(str(s.norm.target))]: s.kind for s in finder.sites}
        if norms:
            for finder, graph in zip(finders, graphs, strict=True):
                rewrite(graph, finder.sites)
            program = FusedForward(arguments, *(_code(graph) for graph in graphs))
            self.units.found.append(Unit(name, module, program, norms))

    def _graphs(self, module: nn.Module, arguments: tuple[Argument, ...], inlined: Collection[str]) -> list[fx.Graph]:
        return [symbolic_graph(module, arguments, inlined, training=training) for training in (True, False)]

    def _is_child(self, module: nn.Module, site: Site) -> bool:
        return not isinstance(module.get_submodule(str(site.norm.target)), GroupedNorm)

    def _note_ending(self, module: nn.Module, graph: fx.Graph, same: bool) -> None:
        """Note whether the module returns a norm's result. It does not count if its forward reads its training flag."""
        result = next(node for node in graph.nodes if node.op == "output").args[0]
        if same and not hooked(module) and isinstance(result, fx.Node) and result.op == "call_module":
            norm = self._norm_of(module.get_submodule(str(result.target)))
            if isinstance(norm, GroupedNorm) and len(result.users) == 1:
                self.endings[module] = norm


def _code(graph: fx.Graph) -> Code:
    made = graph.python_code("self")
    used = compile(made.src, "<kalmannorm.fuse>", "exec").co_consts
    code: Any = next(const for const in used if hasattr(const, "co_names"))
    names = {name: value for name, value in made.globals.items() if name in code.co_names}
    return Code(made.src, names)
