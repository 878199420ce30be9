"""`fuse`: the operations after a norm run in the norm's own pass.

    relu(norm(x))            ->  norm(x, relu=True)
    relu(norm(x) + residual) ->  norm(x, residual=residual, relu=True)

Each ReLU and each sum then needs one pass over memory less, in forward and backward, and one tensor less is stored for
the backward.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from kalmannorm._model.fusion.agreement import differing
from kalmannorm._model.fusion.saving import save_where_possible
from kalmannorm._model.fusion.symbolic import NotTraceableError, arguments_of
from kalmannorm._model.fusion.units import Units, find_units
from kalmannorm._model.settings import norms, require_norms
from kalmannorm._ops.plain import without_kernels
from kalmannorm._support.fused_modules import REPORT, Argument, fuse_module, unfuse
from kalmannorm._wiring.recording.trace import arguments
from kalmannorm._wiring.recording.untouched import untouched


@dataclass(frozen=True)
class Fusion:
    """The result of `fuse`: for each norm, by name, what it is fused with, or why it is not fused.

    With `save_memory`, `saved` names the layers that keep no output of the norm, and `kept` says why other outputs are
    kept.
    """

    fused: dict[str, str]
    left: dict[str, str]
    saved: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = Counter(self.fused.values())
        kinds = ", ".join(f"{count} with {kind}" for kind, count in sorted(counts.items()))
        total = len(self.fused) + len(self.left)
        lines = [f"{len(self.fused)} of {total} norms fused" + (f": {kinds}" if kinds else "")]
        lines += [f"left {name}: {reason}" for name, reason in self.left.items()]
        if self.saved or self.kept:
            lines.append(f"outputs of {len(self.saved)} of {total} norms computed again in the backward")
        return "\n".join(lines + [f"kept of {name}: {reason}" for name, reason in self.kept.items()])


def fuse(model: nn.Module, example_input: Any, *, save_memory: bool = False, inplace: bool = False) -> nn.Module:
    """Run norm and ReLU, or norm, sum and ReLU, in one pass where this is safe. The results stay the same.

    These stay the same: classes (a fused module gets a subclass of its class), names, parameters, buffers, state dict,
    children, hooks, wiring, training and inference. The model can be trained, copied, pickled and compiled as before.
    `model.fusion` shows which norms are fused and why others are not.

    A norm of this library is fused if only a ReLU reads its result, or only a sum whose result only a ReLU reads,
    inside the forward of one module. If two norms are added, the one that runs last is fused. These are not fused:
    norms with hooks, results that are used twice or broadcast, and forwards that symbolic tracing cannot follow. Before
    anything changes, outputs, gradients and buffers are compared on the example, in training and inference. A module
    with different results is not fused.

    Fuse last, but before you build the optimizer, because the current forward is recorded. Hooks that are added later
    to a fused ReLU or shortcut are not called. If the attributes or children of a module change, or if it is called
    with other kinds of arguments, it uses its own forward. `to_batchnorm` and `fold` undo the fusion.

    Args:
        model: a converted model, or one with ghost or renorm norms.
        example_input: the model's input, as for `convert`.
        save_memory: outputs of norms that convolutions, linear layers and max pools read are not kept for the backward.
            They are computed again from the inputs of the norms, with the same bits. `model.fusion` shows where. A
            compiled model keeps them.
        inplace: fuse this model instead of a copy.
    """
    _check(model)
    with torch.inference_mode(False):
        if not inplace:
            model = copy.deepcopy(model)
        unfuse(model)
        calls = _calls(model, example_input)
        excluded: dict[str, str] = {}
        while True:
            units = find_units(model, calls, excluded)
            refused = _unlike(model, example_input, units) or _other_numbers(model, example_input, units)
            if not refused:
                break
            excluded |= refused
        for unit in units.found:
            fuse_module(unit.module, unit.program)
        report = _report(model, units, calls)
        if save_memory:
            saving = save_where_possible(model, example_input)
            report = replace(report, saved=saving.saved, kept=saving.kept)
        vars(model)[REPORT] = report
    return model


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"model must be a torch.nn.Module written in Python, got {type(model).__name__}")
    wrapped = {"OptimizedModule": "torch.compile", "DistributedDataParallel": "DDP", "DataParallel": "DataParallel"}
    if type(model).__name__ in wrapped:
        raise TypeError(f"model is wrapped by {wrapped[type(model).__name__]}: fuse first, then wrap the fused model")
    require_norms(model, "fuse")


def _run(model: nn.Module, example_input: Any, training: bool, watch: Callable[..., None]) -> None:
    """Run the example, and call `watch` before every call of a module."""
    args, kwargs = arguments(example_input)
    handles = [m.register_forward_pre_hook(watch, with_kwargs=True) for m in model.modules()]
    try:
        with untouched(model, training=training), torch.no_grad(), without_kernels():
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()


def _calls(model: nn.Module, example_input: Any) -> dict[int, tuple[Argument, ...] | str]:
    """The arguments of each module's calls, in either mode."""
    found: dict[int, tuple[Argument, ...] | str] = {}

    def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if id(module) not in found and next(norms(module), None) is not None:
            try:
                found[id(module)] = arguments_of(module, args, kwargs)
            except NotTraceableError as error:
                found[id(module)] = str(error)

    failures = []
    for training in (False, True):
        try:
            _run(model, example_input, training, watch)
        except Exception as error:  # any error: this is the user's model, and a batch may be too small for training
            failures.append(error)
    if len(failures) == 2:
        first = next(iter(str(failures[0]).splitlines()), "")
        message = f"example_input: {type(model).__name__} does not run on it: {type(failures[0]).__name__}: {first}"
        raise ValueError(message) from failures[0]
    return found


def _unlike(model: nn.Module, example_input: Any, units: Units) -> dict[str, str]:
    """Norms whose result would be added to a tensor of another shape or dtype."""
    names = {id(norm): name for name, norm in norms(model)}
    found: dict[str, str] = {}

    def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        residual = kwargs.get("residual")
        if id(module) in names and residual is not None:
            alike = isinstance(residual, torch.Tensor) and (residual.shape, residual.dtype) == (
                args[0].shape,
                args[0].dtype,
            )
            if not alike:
                found[names[id(module)]] = "the tensor that it is added to has another shape or dtype"

    if "sum and ReLU" not in units.fused().values():
        return found
    for unit in units.found:
        fuse_module(unit.module, unit.program)
    try:
        for training in (False, True):
            with suppress(Exception):  # any error: it shows later, when the results are compared
                _run(model, example_input, training, watch)
    finally:
        unfuse(model)
    return found


def _other_numbers(model: nn.Module, example_input: Any, units: Units) -> dict[str, str]:
    """Norms of modules whose results would differ after fusion."""
    reasons = differing(model, example_input, [(unit.name, unit.program) for unit in units.found])
    return {norm: reasons[unit.name] for unit in units.found if unit.name in reasons for norm in unit.norms}


def _report(model: nn.Module, units: Units, calls: dict[int, Any]) -> Fusion:
    fused = units.fused()
    reason = partial(_reason, model, units, calls)
    return Fusion(
        {name: fused[name] for name, _ in norms(model) if name in fused},
        {name: units.left.get(name) or reason(name) for name, _ in norms(model) if name not in fused},
    )


def _reason(model: nn.Module, units: Units, calls: dict[int, Any], name: str) -> str:
    """Why no graph contains this norm."""
    if id(model.get_submodule(name)) not in calls:
        return "it did not run on the example input"
    holder = name
    while holder:
        holder = holder.rpartition(".")[0]
        if holder in units.untraced:
            return f"{holder or type(model).__name__}: {units.untraced[holder]}"
    return "no forward that calls it was found"
