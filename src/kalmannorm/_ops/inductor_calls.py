"""Code that inductor compiles calls the ops of norms as Python functions, without torch's dispatcher.

A norm's op is one call of 15 to 20 µs, of which the dispatcher takes about half. A compiled step has two for each norm.
Only ops that take tensors of any layout can be called like this, because inductor would lay out inputs of the others.

Inductor is not imported for it. It is loaded when torch computes the shapes of an op for it, and then the op gets its
lowering. If this part of inductor has changed, its usual call of the op remains.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""What runs, by the name of the op. Compiled code calls it, also code from inductor's cache on disk."""
_WAITING: list[str] = []
_IMPORT = f"from {__name__} import FUNCTIONS as kalmannorm_ops"


def offer(name: str, run: Callable[..., Any]) -> None:
    """Let compiled code call `run` instead of the op `kalmannorm::name`."""
    FUNCTIONS[name] = run
    _WAITING.append(name)


def lower() -> None:
    """Register what was offered, if inductor is there."""
    if not _WAITING or "torch._inductor.lowering" not in sys.modules:
        return
    names = _WAITING.copy()
    _WAITING.clear()
    try:
        kernel = _kernel()
        for name in names:
            _register(getattr(torch.ops.kalmannorm, name).default, kernel)
    except (ImportError, AttributeError):  # another inductor: it calls ops as it calls any
        return


def _kernel() -> Any:
    """The node of inductor's graph that writes such a call."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    class DirectKernel(ir.FallbackKernel):
        def codegen(self, wrapper: Any) -> None:
            imports = getattr(_outermost(wrapper), "add_import_once", None)
            if imports is not None and not V.graph.cpp_wrapper:
                imports(_IMPORT)
                self.python_kernel_name = f"kalmannorm_ops[{_name(self.op_overload)!r}]"
            super().codegen(wrapper)

    return DirectKernel


def _name(op: Any) -> str:
    whole: str = op.name()
    return whole.removeprefix("kalmannorm::").removesuffix(".default")


def _outermost(wrapper: Any) -> Any:
    """The wrapper that writes imports. Those of parts of a graph do not."""
    while getattr(wrapper, "parent_wrapper", None) is not None:
        wrapper = wrapper.parent_wrapper
    return wrapper


def _register(op: Any, kernel: Any) -> None:
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V
    from torch.utils import _pytree as pytree

    def boxed(value: Any) -> Any:
        if not isinstance(value, ir.IRNode):
            return value
        # Inductor takes results for unaligned because rows, an input, are. But they are new memory. Kernels that read
        # them are faster if that is known.
        V.graph.unaligned_buffers.discard(value.get_name())
        return ir.TensorBox.create(value)

    def lowered(*args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map(boxed, kernel.create(op, *args, **kwargs))

    # As inductor does with an op that it does not know.
    lowering.make_fallback(op, warn=False)  # type: ignore[no-untyped-call]
    lowering.register_lowering(op, type_promotion_kind=None)(lowered)
