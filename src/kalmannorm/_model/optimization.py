"""For the optimizer and the log: which parameters weight decay must not change, and the gain of each layer."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from kalmannorm._norms.kalman import BatchKalmanNorm
from kalmannorm._norms.transition import LearnedTransition

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


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
