"""Changes a norm into another one: the module changes its class in place, as `torch.nn.utils.parametrize` and FSDP do.

So references to the module stay valid. Its name, γ and β, hooks, children and additional attributes are unchanged.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import nn

from kalmannorm._model.kept_classes import kept_class
from kalmannorm._model.norm_classes import NormClass, plain_class
from kalmannorm._norms import baselines, kalman, moving_average
from kalmannorm._norms.batchnorm_checkpoints import MANY
from kalmannorm._norms.group_norm import GroupNorm, InstanceNorm
from kalmannorm._norms.grouped import GroupedNorm
from kalmannorm._norms.online import OnlineNorm
from kalmannorm._support.checks import positive_int
from kalmannorm._wiring.plan import NormPlan

GROUPED = {
    "kalman": (kalman.BatchKalmanNorm1d, kalman.BatchKalmanNorm2d, kalman.BatchKalmanNorm3d),
    "ghost": (baselines.GhostBatchNorm1d, baselines.GhostBatchNorm2d, baselines.GhostBatchNorm3d),
    "renorm": (baselines.BatchRenorm1d, baselines.BatchRenorm2d, baselines.BatchRenorm3d),
    "moving-average": (
        moving_average.MovingAverageBatchNorm1d,
        moving_average.MovingAverageBatchNorm2d,
        moving_average.MovingAverageBatchNorm3d,
    ),
}

_MACHINERY = set(nn.Module().__dict__)
_BATCHNORM = {"num_features", "eps", "momentum", "affine", "track_running_stats", "process_group"}
_BUFFERS = {"running_mean", "running_var", "num_batches_tracked"}
_AFFINE = {"weight", "bias"}
_TABLES = ("_parameters", "_buffers", "_modules")


def check_norm(name: str, module: nn.Module) -> None:
    """Raise an error for a norm that would lose something if its class changed."""
    for affine in sorted(_AFFINE - set(module._parameters)):
        raise TypeError(
            f"{name!r}: its {affine} is computed (pruned or weight-normed) and is not a Parameter; make it one "
            f"first, for example by torch.nn.utils.prune.remove(module, {affine!r})"
        )
    held = {"forward"} & set(vars(module)) | _held(module) & _library_names() - _BATCHNORM - _BUFFERS - _AFFINE
    if held:
        raise TypeError(
            f"{name!r}: it has {', '.join(map(repr, sorted(held)))} of its own, which a norm of kalmannorm would "
            "overwrite; rename or remove it first"
        )


def _held(module: nn.Module) -> set[str]:
    """Names of the attributes, parameters, buffers and children of a module."""
    return set(vars(module)).union(*(getattr(module, table) for table in _TABLES)) - _MACHINERY


@functools.cache
def _library_names() -> set[str]:
    """Names of the attributes that norms of this library have."""
    examples = (
        kalman.BatchKalmanNorm1d(1, 1),
        baselines.BatchRenorm1d(1),
        moving_average.MovingAverageBatchNorm1d(1),
    )
    added = {"then", "converted_from", "input_dims", "_arrived", "_pending", "calibrated", "prior_scale", "prior_shift"}
    added |= {"phase", "reestimates"}
    return added.union(*map(_held, examples))


def swap_class(module: nn.Module, fresh: nn.Module) -> None:
    """Give a module the class and state of `fresh`. γ, β, hooks and additional attributes are kept."""
    ours = _library_names() if isinstance(module, GroupedNorm) else set()
    gone = (ours | _BATCHNORM | _BUFFERS) - _AFFINE
    for name in gone:
        module.__dict__.pop(name, None)
    module.__class__ = fresh.__class__
    module.__dict__.update({name: value for name, value in vars(fresh).items() if name not in _MACHINERY})
    parameters, buffers, children = (
        {name: value for name, value in getattr(module, table).items() if name not in gone} for table in _TABLES
    )
    new = {name: value for name, value in fresh._parameters.items() if name not in _AFFINE}
    module._parameters = {**parameters, **new}
    module._buffers = {**fresh._buffers, **buffers}
    module._modules = {**children, **fresh._modules}
    transient = module._non_persistent_buffers_set & set(buffers)
    module._non_persistent_buffers_set = fresh._non_persistent_buffers_set | transient


def _tensors_like(module: nn.Module) -> dict[str, Any]:
    """Device and dtype for a new norm that replaces this one."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            return {"device": tensor.device, "dtype": tensor.dtype}
    return {}


FILTER_OPTIONS = {"centre_weights", "weight_standardization"}
"""Options of `convert` that concern convolutions, not norms."""


def _tracks(module: Any) -> bool:
    """Whether there are running statistics. `track_running_stats` may have been set for another purpose."""
    return module.running_mean is not None and module.running_var is not None


def fresh_grouped(
    module: Any, kind: NormClass, to: str, size: int | None, options: dict[str, Any], plan: NormPlan | None
) -> GroupedNorm:
    """The new norm for this one, with its running statistics."""
    rank = plan.rank - 2 if plan is not None and plan.rank is not None else None
    dims = kind.dims or (max(rank, 1) if rank is not None else 2)
    settings = {"momentum": module.momentum, "statistics_batch_size": size, "eps": module.eps}
    settings |= {"affine": module.affine, "track_running_stats": _tracks(module)}
    if isinstance(module, nn.SyncBatchNorm):
        settings["process_group"] = module.process_group or "world"
    if to == "moving-average":
        del settings["momentum"]  # the paper's, not that of the batch norm
    others = {"gain", "per_channel_gain", "rank", *FILTER_OPTIONS}
    settings |= {name: value for name, value in options.items() if name not in others}
    fresh: GroupedNorm = GROUPED[to][dims - 1](module.num_features, **settings, **_tensors_like(module))
    fresh.__class__ = kept_class(type(fresh), type(module))
    if _tracks(module):
        _carry_statistics(module, fresh)
        if isinstance(fresh, moving_average.MovingAverageBatchNorm):
            fresh.take_batchnorm()
    if kind.dims is None and rank is None:
        fresh.input_dims = (2, 3, 4, 5)
    fresh.then = kind.then
    vars(fresh)["converted_from"] = type(module)
    return fresh


def _carry_statistics(old: Any, new: GroupedNorm) -> None:
    """Copy the running statistics. They are also the best estimate of the observed statistics."""
    with torch.no_grad():
        for name in _BUFFERS:
            if getattr(old, name) is not None:
                getattr(new, name).copy_(getattr(old, name))
        if new.observed_mean is not None and new.observed_var is not None:
            new.observed_mean.copy_(old.running_mean)
            new.observed_var.copy_(old.running_var)
        untrained = old.num_batches_tracked is None or int(old.num_batches_tracked) == 0
        untrained = untrained and not old.running_mean.any() and bool((old.running_var == 1).all())
        # It is not known how many values a trained BatchNorm has seen. The number only has to be large. Otherwise the
        # next batch would count as the first and replace the statistics.
        if new.values_tracked is not None and new.momentum is not None and not untrained:
            new.values_tracked.fill_(MANY)


def fresh_other(
    module: Any, kind: NormClass, to: str, options: dict[str, Any]
) -> GroupNorm | InstanceNorm | OnlineNorm:
    channels, settings = module.num_features, {"eps": module.eps, "affine": module.affine, **_tensors_like(module)}
    fresh: GroupNorm | InstanceNorm | OnlineNorm
    if to == "online":
        fresh = OnlineNorm(channels, **settings, **options)
        if _tracks(module):
            with torch.no_grad():
                fresh.running_mean.copy_(module.running_mean)
                fresh.running_var.copy_(module.running_var)
    elif to == "instance":
        fresh = InstanceNorm(channels, **settings)
    else:
        most = 1 if to == "layer" else positive_int("num_groups", options.get("num_groups", 32))
        groups = next(count for count in range(min(most, channels), 0, -1) if channels % count == 0)
        fresh = GroupNorm(groups, channels, **settings)
    fresh.then = kind.then
    return fresh


def swap_to_batchnorm(module: GroupedNorm) -> None:
    module.end_closing()  # its state is a child, and children stay
    dims = {(2, 3): 1, (4,): 2, (5,): 3}.get(tuple(module.input_dims))
    original: type[nn.Module] | None = getattr(module, "converted_from", None)
    target = plain_class(original or nn.SyncBatchNorm, dims)
    like = _tensors_like(module)
    base = next(kind for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) if issubclass(target, kind))
    fresh = base(module.num_features, module.eps, module.momentum, module.affine, _tracks(module), **like)
    with torch.no_grad():
        for name in _BUFFERS:
            if _tracks(module) and getattr(module, name) is not None:
                getattr(fresh, name).copy_(getattr(module, name))
    swap_class(module, fresh)
    cast(Any, module).__class__ = target
