"""For the optimizer and the log: which parameters weight decay must not change, and the gain of each layer."""

from __future__ import annotations

import functools
import warnings
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from kalmannorm._norms.group_norm import InstanceNorm
from kalmannorm._norms.kalman import BatchKalmanNorm
from kalmannorm._norms.online import OnlineNorm
from kalmannorm._norms.transition import LearnedTransition
from kalmannorm._support.compiling import NORMS

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, InstanceNorm, OnlineNorm)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimizer groups: weight decay applies to all parameters except γ and β of any norm, and the filter's q, A
    and r.

    Weight decay would pull q towards ½, and A, r and γ towards 0, regardless of the data.
    """
    spared = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, (*_NORMS, LearnedTransition))
        for parameter in module.parameters(recurse=False)
    }
    decayed = [p for p in model.parameters() if id(p) not in spared]
    undecayed = [p for p in model.parameters() if id(p) in spared]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def gains(model: nn.Module) -> dict[str, float]:
    """The gain q of every layer that has a prior, by name. If q is per channel, its mean over channels."""
    found = {name: m.gain for name, m in model.named_modules() if isinstance(m, BatchKalmanNorm)}
    return {name: float(gain.detach().mean()) for name, gain in found.items() if gain is not None}


@functools.cache
def watch_weight_decay() -> None:
    """From now on, look once at every optimizer, at its first step. Hugging Face's Trainer builds its own, for example.

    Called by `convert`, and only then: without a converted model there is nothing to look for.
    """
    register_optimizer_step_pre_hook(_Watch())


class _Watch:
    """Warns if an optimizer applies weight decay to a parameter of the filter."""

    def __init__(self) -> None:
        self.seen: WeakSet[Optimizer] = WeakSet()

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or optimizer in self.seen:
            return
        self.seen.add(optimizer)
        decayed = {id(p) for group in optimizer.param_groups if group.get("weight_decay") for p in group["params"]}
        # A norm may have several names, and may have become a BatchNorm again.
        norms = {id(norm): norm for norm in NORMS.known.values() if isinstance(norm, BatchKalmanNorm)}.values()
        found = sum(not decayed.isdisjoint(map(id, _filter_parameters(norm))) for norm in norms)
        if found:
            warnings.warn(
                f"kalmannorm: {type(optimizer).__name__} applies weight decay to the filter of {found} "
                f"norm{'s' * (found > 1)}, which pulls the gain towards 1/2 regardless of the data; build it from "
                "kalmannorm.parameter_groups(model, weight_decay). For Hugging Face's Trainer, override "
                "get_decay_parameter_names (docs/integrations.md)",
                UserWarning,
                stacklevel=2,
            )


def _filter_parameters(norm: BatchKalmanNorm) -> list[nn.Parameter]:
    own = [] if norm.gain_logit is None else [norm.gain_logit]
    return own if norm.transition is None else [*own, *norm.transition.parameters()]
