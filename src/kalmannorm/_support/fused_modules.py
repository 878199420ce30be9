"""Fused modules: they run norms, sums and ReLUs in one pass. `fuse` gives each a subclass of its own class.

The module keeps its parameters, children, hooks and names. Only its forward is replaced. The original forward runs if
the module is called in a way that `fuse` did not see. It is restored if an attribute of the module is set. A child
that is replaced in `_modules` directly is not noticed.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakValueDictionary

from torch import Tensor, nn

REPORT = "fusion"
"""The attribute of a fused model with the report of `fuse`."""

Given = Literal["tensor", "sequence", "default"]
# Attributes on which no forward depends, or which a fused forward reads when it runs.
# Importing Lightning makes torch.compile store its arguments in the model, as `_compile_kwargs`.
_FREE = {*vars(nn.Module()), REPORT, "__dict__", "__class__", "_compile_kwargs"}


@dataclass(frozen=True)
class Code:
    """The source of `def forward(self, …)`, and the objects of the names in it."""

    source: str
    names: dict[str, Any]

    def function(self) -> types.FunctionType:
        namespace = dict(self.names)
        exec(compile(self.source, "<kalmannorm.fuse>", "exec"), namespace)
        made: types.FunctionType = namespace["forward"]
        return made


@dataclass(frozen=True)
class Argument:
    """An argument of a forward. `given`: whether it was a tensor, a list of tensors or left out in the example."""

    name: str
    given: Given
    default: Any = None
    optional: bool = False
    keyword_only: bool = False


@dataclass(frozen=True)
class FusedForward:
    """A forward in training and evaluation mode, for calls like that of the example."""

    arguments: tuple[Argument, ...]
    training: Code
    evaluation: Code
    key: tuple[Any, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        codes = [(code.source, *((name, id(o)) for name, o in code.names.items())) for code in self._codes()]
        arguments = [(a.name, a.given, id(a.default), a.optional, a.keyword_only) for a in self.arguments]
        object.__setattr__(self, "key", (*codes, *arguments))

    def _codes(self) -> tuple[Code, Code]:
        return self.training, self.evaluation

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedForward:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _fused_forward, (self.arguments, *((code.source, _by_name(code.names)) for code in self._codes()))

    def forward(self, own: Any) -> types.FunctionType:
        """The forward of a fused module. It calls `own`, the original forward, if the arguments differ in kind."""
        conditions = {
            "tensor": "isinstance({0}, _Tensor)",
            "sequence": "isinstance({0}, (list, tuple))",
            "default": "{0} is _default_{0}",
        }
        conditions_met = " and ".join(conditions[a.given].format(a.name) for a in self.arguments)
        signature, passed = ["self"], ["self"]
        for argument in self.arguments:
            if argument.keyword_only and "*" not in signature:
                signature.append("*")
            name = argument.name
            signature.append(f"{name}=_default_{name}" if argument.optional else name)
            passed.append(f"{name}={name}" if argument.keyword_only else name)
        given = ["self", *(a.name for a in self.arguments if a.given != "default")]
        training, evaluation = (code.function() for code in self._codes())
        one = self.training == self.evaluation
        run = "_training" if one else "(_training if self.training else _evaluation)"
        source = (
            f"def forward({', '.join(signature)}):\n"
            f"    if {conditions_met or 'True'}:\n"
            f"        return {run}({', '.join(given)})\n"
            f"    return _own({', '.join(passed)})\n"
        )
        names = {"_own": own, "_Tensor": Tensor, "_training": training, "_evaluation": evaluation}
        return Code(source, names | {f"_default_{a.name}": a.default for a in self.arguments}).function()


def _by_name(names: dict[str, Any]) -> dict[str, Any]:
    """`names` with modules replaced by their names, because modules cannot be pickled."""
    return {n: _Module(o.__name__) if isinstance(o, types.ModuleType) else o for n, o in names.items()}


@dataclass(frozen=True)
class _Module:
    name: str


def _fused_forward(arguments: tuple[Argument, ...], *codes: tuple[str, dict[str, Any]]) -> FusedForward:
    made = []
    for source, names in codes:
        found = {n: importlib.import_module(o.name) if isinstance(o, _Module) else o for n, o in names.items()}
        made.append(Code(source, found))
    return FusedForward(arguments, *made)


class Fused:
    """Mixin for the class of a fused module."""

    _fused_from: type[nn.Module]
    _fused_forward: FusedForward

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        function, args, *state = reduced
        if function is copyreg.__newobj__ and args == (type(self),):  # type: ignore[attr-defined]
            return _blank, (self._fused_from, self._fused_forward), *state
        return function, args, *state

    def __setattr__(self, name: str, value: Any) -> None:
        missing = object()
        before = missing if name in _FREE or isinstance(value, Tensor) else getattr(self, name, missing)
        super().__setattr__(name, value)
        if before is not missing and not _equal(before, value):
            _give_up(self, name)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        _give_up(self, name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        super().add_module(name, module)  # type: ignore[misc]
        _give_up(self, name)

    def insert(self, *args: Any) -> Any:
        base: Any = self._fused_from
        _give_up(self, "children")
        return base.insert(self, *args)


def _equal(before: Any, value: Any) -> bool:
    simple = (bool, int, float, str, tuple, type(None))
    return before is value or (type(before) is type(value) and isinstance(value, simple) and bool(before == value))


def _give_up(module: Any, name: str) -> None:
    """Restore the module's own forward, because it may read the changed attribute."""
    if is_fused(module):
        warnings.warn(
            f"kalmannorm: {name!r} of a fused {module._fused_from.__name__} was changed, so the module now runs "
            "unfused; call kalmannorm.fuse again",
            UserWarning,
            stacklevel=3,
        )
        module.__class__ = module._fused_from


@functools.cache
def _metaclass(kind: type) -> type:
    """Calling a fused class builds an unfused module. A slice of a Sequential does this, with other children."""

    def call(cls: type[Fused], *args: Any, **kwargs: Any) -> nn.Module:
        return cls._fused_from(*args, **kwargs)

    return type("Fusing", (kind,), {"__call__": call})


_CLASSES: WeakValueDictionary[tuple[Any, ...], type] = WeakValueDictionary()


def _class(base: type[nn.Module], program: FusedForward) -> Any:
    """The fused class. Modules of one class with equal forwards share it, so that compiled code is shared too."""
    key = (base, program.key)
    made: Any = _CLASSES.get(key)
    if made is None:
        body = {"_fused_from": base, "_fused_forward": program, "forward": program.forward(base.forward)}
        same = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
        kind: Any = type(base)
        made = _metaclass(kind)(base.__name__, (Fused, base), body | same)
        _CLASSES[key] = made
    return made


def _blank(base: type[nn.Module], program: FusedForward) -> Any:
    return object.__new__(_class(base, program))


def is_fused(module: nn.Module) -> bool:
    return isinstance(module, Fused) and "_fused_forward" in vars(type(module))


def fuse_module(module: nn.Module, program: FusedForward) -> None:
    module.__class__ = _class(type(module), program)


def unfuse(model: nn.Module) -> None:
    """Restore the own forward of every module."""
    for module in model.modules():
        if is_fused(module):
            module.__class__ = module._fused_from  # type: ignore[assignment]
        for name in (REPORT, "rebuilds"):
            vars(module).pop(name, None)


@contextmanager
def unfused(model: nn.Module) -> Iterator[None]:
    """Inside this context every module runs its own forward."""
    classes = [(module, type(module)) for module in model.modules() if is_fused(module)]
    try:
        for module, kind in classes:
            module.__class__ = kind._fused_from  # type: ignore[attr-defined]
        yield
    finally:
        for module, kind in classes:
            module.__class__ = kind
