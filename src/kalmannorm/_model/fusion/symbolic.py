"""The graph of one forward, in which every child is one node.

Symbolic tracing runs the Python code of a forward once and records what it does with its arguments. It silently drops
what it cannot record, or makes it constant. Here that is an error: random numbers drawn in Python, tensors of unknown
origin, attributes that the forward assigns, and parts under another grad mode, autocast or checkpoint.
"""

from __future__ import annotations

import inspect
import operator
import random
import sys
import warnings
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx, nn

from kalmannorm._support.activation_checkpoints import segments
from kalmannorm._support.fused_modules import Argument
from kalmannorm._wiring.recording.untouched import untouched

IN_PLACE = tuple(name for name in dir(operator) if name.startswith("i") and hasattr(Tensor, f"__{name[1:]}__"))


class NotTraceableError(Exception):
    """The message is the reason. It follows the name of a module."""


def arguments_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Argument, ...]:
    """The arguments of a forward in this call."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    found = []
    for parameter in parameters:
        keyword_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD and not keyword_only:
            raise NotTraceableError("its forward takes any number of arguments")
        optional = parameter.default is not inspect.Parameter.empty
        default = parameter.default if optional else None
        value = bound.get(parameter.name, default)
        if isinstance(value, Tensor):
            found.append(Argument(parameter.name, "tensor", default, optional, keyword_only))
        elif isinstance(value, (list, tuple)) and value and all(isinstance(part, Tensor) for part in value):
            found.append(Argument(parameter.name, "sequence", default, optional, keyword_only))
        elif optional and value is default:
            found.append(Argument(parameter.name, "default", default, optional, keyword_only))
        else:
            raise NotTraceableError(f"an argument of its forward is a {type(value).__name__}")
    return tuple(found)


class _Proxy(fx.Proxy):
    """A proxy that records in-place writes. torch's own proxy would turn `a += b` into `a + b`."""


def _in_place(operation: Any) -> Any:
    def method(self: fx.Proxy, other: Any) -> fx.Proxy:
        made: fx.Proxy = self.tracer.create_proxy("call_function", operation, (self, other), {})
        return made

    return method


for _name in IN_PLACE:
    setattr(_Proxy, f"__{_name}__", _in_place(getattr(operator, _name)))


class _Tracer(fx.Tracer):
    """`inlined` are the names of children whose own forward becomes a part of the graph."""

    def __init__(self, arguments: tuple[Argument, ...], inlined: Collection[str]) -> None:
        super().__init__()
        self.arguments, self.inlined = arguments, inlined
        self.modes = _modes()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self.inlined

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        values: dict[str, Any] = {}
        for argument in self.arguments:
            given = argument.given != "default"
            values[argument.name] = self._placeholder(argument.name) if given else argument.default
        keywords = {a.name: values[a.name] for a in self.arguments if a.keyword_only}
        positional = [values[a.name] for a in self.arguments if not a.keyword_only]

        def call(root: nn.Module, *args: Any) -> Any:
            return root_fn(root, *args, **keywords)

        return call, [self.root, *positional]

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def _placeholder(self, name: str) -> fx.Proxy:
        proxy: fx.Proxy = self.create_proxy("placeholder", name, (), {})
        return proxy

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter):
            known = any(a is buffer for buffer in self.root.buffers()) or a in self.tensor_attrs
            if not known:
                raise NotTraceableError("its forward creates a tensor")
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self.modes:
            raise NotTraceableError("a part of its forward runs under another grad mode, autocast or checkpoint")
        return super().create_node(*args, **kwargs)


def _modes() -> tuple[Any, ...]:
    """State that changes the meaning of an operation but is not recorded in a graph."""
    autocast = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast, bool(segments())


def symbolic_graph(
    module: nn.Module, arguments: tuple[Argument, ...], inlined: Collection[str], *, training: bool
) -> fx.Graph:
    """The graph of a module's own forward in one mode. The module stays unchanged."""
    if isinstance(module, (fx.GraphModule, torch.jit.ScriptModule)) or "forward" in vars(module):
        raise NotTraceableError("its forward is not that of its class")
    with untouched(module, training=training), warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        attributes, numbers = _attributes(module), _random_numbers()
        tracer = _Tracer(arguments, inlined)
        try:
            graph = tracer.trace(module)
        except NotTraceableError:
            raise
        except Exception as error:  # any error: the user's code gets a proxy in place of a tensor
            first = next(iter(str(error).splitlines()), "")
            raise NotTraceableError(f"its forward cannot be traced: {first or type(error).__name__}") from error
        finally:
            vars(tracer).clear()  # torch leaves it in a reference cycle, which would keep the model
        if _attributes(module) != attributes:
            raise NotTraceableError("its forward assigns attributes")
        if _random_numbers() != numbers:
            raise NotTraceableError("its forward draws random numbers")
    for node in list(graph.nodes):
        node.type = None  # annotations name classes that the program does not need
        child = module.get_submodule(node.target) if node.op == "call_module" else None
        if type(child) is nn.Identity and not hooked(child) and len(node.args) == 1:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    return graph


def hooked(module: nn.Module) -> bool:
    """Whether a hook other than ours would see the inputs or outputs of the module."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [hook for table in tables for hook in getattr(module, table).values()]
    return any(not type(hook).__module__.startswith("kalmannorm.") for hook in hooks)


def _attributes(root: nn.Module) -> list[Any]:
    """The attributes of the modules, by identity, and the contents of their lists and dicts."""
    found: list[Any] = []
    for module in root.modules():
        for name, value in vars(module).items():
            inside = [*value, *value.values()] if isinstance(value, dict) else value
            held = tuple(map(id, inside)) if isinstance(value, (list, tuple, set, dict)) else ()
            found.append((name, id(value), held))
    return found


def _random_numbers() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    state = () if numpy is None else numpy.random.get_state()
    return random.getstate(), torch.get_rng_state().tolist(), *(str(part) for part in state[2:3])
