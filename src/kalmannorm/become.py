"""How a norm becomes another: it changes its class in place, as `torch.nn.utils.parametrize` and FSDP do it.

So whoever holds the module still holds it, and its name, γ and β, its hooks, its children and the attributes that
others gave it are untouched.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from kalmannorm import baselines, norm
from kalmannorm.checkpoints import MANY
from kalmannorm.checks import positive_int
from kalmannorm.graph.plan import NormPlan
from kalmannorm.grouped import GroupedNorm
from kalmannorm.norm import BatchKalmanNorm
from kalmannorm.others import GroupNorm, InstanceNorm
from kalmannorm.registry import NormClass, plain_class

GROUPED = {
    "kalman": (norm.BatchKalmanNorm1d, norm.BatchKalmanNorm2d, norm.BatchKalmanNorm3d),
    "ghost": (baselines.GhostBatchNorm1d, baselines.GhostBatchNorm2d, baselines.GhostBatchNorm3d),
    "renorm": (baselines.BatchRenorm1d, baselines.BatchRenorm2d, baselines.BatchRenorm3d),
}

_MACHINERY = set(nn.Module().__dict__)
_BATCHNORM = {"num_features", "eps", "momentum", "affine", "track_running_stats", "process_group"}


def _become(module: nn.Module, fresh: nn.Module) -> None:
    """Make a module what `fresh` is, keeping γ, β, hooks, children and attributes of its own."""
    kept = {name: module._parameters.get(name) for name in ("weight", "bias")}
    children = dict(module._modules)
    for name in _BATCHNORM | set(vars(module)) & _ours():
        module.__dict__.pop(name, None)
    module.__class__ = fresh.__class__
    for name, value in fresh.__dict__.items():
        if name not in _MACHINERY:
            module.__dict__[name] = value
    module._parameters = {**fresh._parameters, **kept}
    module._buffers = fresh._buffers
    module._non_persistent_buffers_set = fresh._non_persistent_buffers_set
    module._modules = {**children, **fresh._modules}


def _ours() -> set[str]:
    """Attributes that only norms of this library have."""
    example = norm.BatchKalmanNorm1d(1, 1)
    return (set(vars(example)) | {"then", "converted_from", "input_dims", "gain_logit", "transition"}) - _MACHINERY


def _tensors_like(module: nn.Module) -> dict[str, Any]:
    """Device and dtype for a new norm in place of this one."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            return {"device": tensor.device, "dtype": tensor.dtype}
    return {}


def become_grouped(
    module: Any, kind: NormClass | None, to: str, size: int | None, options: dict[str, Any], plan: NormPlan | None
) -> None:
    assert kind is not None
    rank = plan.rank - 2 if plan is not None and plan.rank is not None else None
    dims = kind.dims or (max(rank, 1) if rank is not None else 2)
    settings = {"momentum": module.momentum, "statistics_batch_size": size, "eps": module.eps}
    settings |= {"affine": module.affine, "track_running_stats": module.track_running_stats}
    if isinstance(module, nn.SyncBatchNorm):
        settings["process_group"] = module.process_group or "world"
    filters = {"gain", "per_channel_gain", "rank", "covariance"}
    settings |= {name: value for name, value in options.items() if name not in filters}
    if "covariance" in options:
        settings["covariance"] = options["covariance"]
    fresh: GroupedNorm = GROUPED[to][dims - 1](module.num_features, **settings, **_tensors_like(module))
    if module.track_running_stats:
        _carry_statistics(module, fresh)
    if kind.dims is None and rank is None:
        fresh.input_dims = (2, 3, 4, 5)
    original = type(module)
    _become(module, fresh)
    module.then = kind.then
    module.converted_from = original


def _carry_statistics(old: Any, new: GroupedNorm) -> None:
    """The running statistics, which are also the best guess at the observed ones."""
    with torch.no_grad():
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            getattr(new, name).copy_(getattr(old, name))
        if new.observed_mean is not None and new.observed_var is not None:
            new.observed_mean.copy_(old.running_mean)
            new.observed_var.copy_(old.running_var)
        untrained = int(old.num_batches_tracked) == 0
        untrained = untrained and not old.running_mean.any() and bool((old.running_var == 1).all())
        # How many values a trained BatchNorm saw is not known; it only has to be many, lest the next batch count as the
        # first and wipe out what was carried over.
        if new.values_tracked is not None and new.momentum is not None and not untrained:
            new.values_tracked.fill_(MANY)


def become_other(module: Any, kind: NormClass | None, to: str, options: dict[str, Any]) -> None:
    assert kind is not None
    channels, settings = module.num_features, {"eps": module.eps, "affine": module.affine, **_tensors_like(module)}
    fresh: nn.Module
    if to == "instance":
        fresh = InstanceNorm(channels, **settings)
    else:
        most = 1 if to == "layer" else positive_int("num_groups", options.get("num_groups", 32))
        groups = next(count for count in range(min(most, channels), 0, -1) if channels % count == 0)
        fresh = GroupNorm(groups, channels, **settings)
    _become(module, fresh)
    module.then = kind.then


def become_batchnorm(module: GroupedNorm) -> None:
    dims = {(2, 3): 1, (4,): 2, (5,): 3}.get(tuple(module.input_dims))
    original: type[nn.Module] | None = getattr(module, "converted_from", None)
    target = plain_class(original or nn.SyncBatchNorm, dims)
    like = _tensors_like(module)
    base = next(kind for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) if issubclass(target, kind))
    fresh = base(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats, **like)
    with torch.no_grad():
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            if getattr(module, name) is not None:
                getattr(fresh, name).copy_(getattr(module, name))
    if isinstance(module, BatchKalmanNorm):
        module._modules.pop("transition", None)
    _become(module, fresh)
    cast(Any, module).__class__ = target
