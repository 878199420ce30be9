"""Norms in graphs that `torch.fx` and `torch.jit.trace` record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx import Proxy


def leaf(norm: nn.Module, x: Proxy, **options: Any) -> Any:
    """A node that calls the norm, as if `torch.fx` knew that the norm is a leaf. Its forward cannot run on a Proxy."""
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    tracer: Any = x.tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(norm), (x,), given)


def jit_traces() -> bool:
    """Whether `torch.jit.trace`, or the older ONNX exporter, records this forward."""
    return not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None


@contextmanager
def untraced() -> Iterator[None]:
    """Inside this context `torch.jit.trace` records nothing. Results are constants of its graph."""
    state = torch._C._get_tracing_state()
    interpreter: Any = torch._C  # its types lack the setter
    interpreter._set_tracing_state(None)
    try:
        yield
    finally:
        interpreter._set_tracing_state(state)
