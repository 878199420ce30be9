"""`graphed`: a model that replays CUDA graphs.

The graphed model and the model itself are two objects with one `__dict__`. So parameters, buffers, children, hooks,
flags and attributes are the same, also if one of them changes. Only calls differ.
"""

from __future__ import annotations

import copy
import types
from typing import Any, TypeVar

import torch
from torch import nn

from kalmannorm._model.graphed.graphs import Graphs
from kalmannorm._model.graphed.recorder import CudaRecorder, Recorder
from kalmannorm._support.checks import positive_int

Model = TypeVar("Model", bound=nn.Module)
_WRAPPED = {"OptimizedModule": "torch.compile", "DistributedDataParallel": "DDP", "DataParallel": "DataParallel"}


class Graphed:
    """Mixin for the class of a graphed model."""

    cuda_graphs: Graphs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graphs = self.cuda_graphs
        if torch.compiler.is_compiling():
            return graphs.model(*args, **kwargs)
        return graphs(args, kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.cuda_graphs.model, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.cuda_graphs.model, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        graphs = self.cuda_graphs
        made = wrapped(copy.deepcopy(graphs.model, memo), graphs.limit, graphs.recorder)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _again, (self.cuda_graphs.model, self.cuda_graphs.limit)


def graphed(model: Model, *, limit: int = 8) -> Model:
    """The model with its forward and backward as CUDA graphs, for training loops in which the GPU waits for Python.

        model = kalmannorm.graphed(model)   # after convert and fuse, before DDP
        for x, labels in batches:
            optimizer.zero_grad()
            loss_of(model(x), labels).backward()
            optimizer.step()

    It can be used like the model itself. It shares all parameters, buffers, settings and hooks with the model, and has
    the same state dict. The model stays as it is, and runs eagerly if it is called. Any model can be graphed, also one
    without norms of this library.

    There is a graph for each kind of call: shapes, strides and dtypes of the inputs, other arguments, settings of the
    modules, training or evaluation, gradients, autocast. The first call of a kind runs eagerly, the second is captured.
    Capturing changes no statistics and no random numbers. Outputs and gradients never share memory with a graph.

    Calls that graphs cannot serve run eagerly: on a CPU, with hooks on modules, under inference mode, with statistics
    over several ranks, if the host has to wait for the device, and more than two forwards before their backwards.
    `print(model.cuda_graphs)` shows the reasons. Backwards with `create_graph` or `retain_graph` run the forward again.

    The Python code of the forward runs only while a graph is captured. So it must not depend on anything but arguments,
    modules and their attributes, such as a global variable, and must change nothing but buffers.

    Args:
        limit: the largest number of graphs. Each has inputs, outputs and gradients of its own. All other memory is
            shared. If there are more kinds of calls, graphs that were not used for long are dropped.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, Graphed):
        raise ValueError(f"{type(model).__name__} is already graphed")
    outside = _WRAPPED.get(type(model).__name__)
    if outside is not None:
        raise TypeError(f"model is wrapped by {outside}: pass the model inside it, then wrap the graphed model")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("model is a ScriptModule, whose forward is compiled: pass the Python model")
    return wrapped(model, positive_int("limit", limit), CudaRecorder())


def wrapped(model: Model, limit: int, recorder: Recorder) -> Model:
    base: Any = type(model)
    same = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    kind: Any = types.new_class(
        base.__name__, (Graphed, base), {}, lambda body: body.update({**same, "__slots__": ("cuda_graphs",)})
    )
    made: Model = object.__new__(kind)
    object.__setattr__(made, "__dict__", vars(model))
    object.__setattr__(made, "cuda_graphs", Graphs(model, limit, recorder))
    return made


def _again(model: nn.Module, limit: int) -> nn.Module:
    return wrapped(model, limit, CudaRecorder())
