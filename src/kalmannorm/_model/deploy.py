"""Models for deployment. `fold` folds norms into the convolutions and linear layers before them and returns a plain
torch model. `freeze_priors` turns the priors of a model in `example` inference into constants.

In population inference a norm is y = scale · x + shift per channel, with

    scale = γ / sqrt(var + eps)      shift = β - scale · mean

After a layer x = W u + b, both together are one layer with weight scale · W and bias scale · b + shift.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from kalmannorm._model.convert import to_batchnorm
from kalmannorm._model.norm_classes import batch_norms, known
from kalmannorm._model.settings import norms
from kalmannorm._norms.computed_weights import ComputedWeight, plain_weights
from kalmannorm._norms.grouped import GroupedNorm
from kalmannorm._norms.kalman import BatchKalmanNorm
from kalmannorm._support.copying import copied
from kalmannorm._support.fused_modules import unfuse
from kalmannorm._wiring.foldable import foldable
from kalmannorm._wiring.program import Fixed, Program
from kalmannorm._wiring.recording.trace import trace
from kalmannorm.moments import Moments

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Norms = dict[str, tuple[nn.Module, tuple[str, ...]]]
"""By name: the norm, and the children that it applies to its result."""


def fold(model: nn.Module, example_input: Any = None, *, inplace: bool = False) -> nn.Module:
    """A plain torch model for inference, of the same class and in eval mode, with norms folded where possible.

    A norm can be folded into a Conv1d, 2d, 3d, ConvTranspose1d, 2d, 3d or Linear layer if it alone reads the layer's
    output and both run once. The layer's weight must not be tied, and no hook may see the tensor between them. The norm
    becomes an Identity under its old name, or a Sequential of the children that it applied afterwards (timm's
    BatchNormAct2d: `drop`, `act`). Every other norm becomes a BatchNorm, as by `to_batchnorm`. The model then contains
    nothing of this library. Centred and standardized weights become plain weights, also before a norm that cannot be
    folded, such as GroupNorm.

    Args:
        model: a converted model, or one with plain, ghost, renorm or moving-average norms. All norms are in population
            inference.
        example_input: the model's input, as for `convert`. A converted model does not need it. Any other model runs
            on it once, without gradients, to find the input of each norm.
        inplace: fold this model instead of a copy.
    """
    found = _checked_norms(model)
    if not inplace:
        model = copied(model)
        found = _norms(model)
    unfuse(model)
    if plain_weights(model) and not found:
        return model.eval()
    layers = _layers_of_plan(found) if example_input is None else _layers_of_run(model, example_input, found)
    pairs = _undisturbed(model, found, layers)
    pairs = {name: layer for name, layer in pairs.items() if _folds(*found[name], layer)}
    if not pairs:
        kinds = (_ConvNd, nn.Linear)
        computed = [m for m in model.modules() if isinstance(m, kinds) and m._parameters.get("weight") is None]
        plain = (
            f" with a plain weight; the weights of {len(computed)} layers are computed (pruned, parametrized), and can "
            "be made plain, for example by torch.nn.utils.prune.remove(layer, 'weight')"
        )
        raise ValueError(
            f"fold: none of the {len(found)} norms of {type(model).__name__} alone reads the output of a convolution "
            f"or linear layer{plain if computed else ''}; kalmannorm.to_batchnorm(model) also returns a plain model"
        )
    affine = {name: scale_and_shift(found[name][0]) for name in pairs}  # BatchNorms in half precision would round them
    if any(isinstance(norm, GroupedNorm) for norm, _ in found.values()):
        to_batchnorm(model, inplace=True)
    for name, layer in pairs.items():
        _fold_into(layer, found[name][0], *affine[name])
        _become_what_follows(*found[name])
    return model.eval()


def freeze_priors(model: nn.Module, *, inplace: bool = False) -> nn.Module:
    """Turn the priors of `transition="weights"` into constants for inference. They depend on parameters alone.

    A forward in `example` or `batch` inference then does not propagate beliefs through the weights, and an exported
    program does not contain these operations. The outputs stay the same. If parameters change afterwards, convert again
    or call `rewire`. Priors of `learned` depend on the input and stay as they are.
    """
    if not inplace:
        model = copied(model)
    wired = [norm for _, norm in norms(model) if isinstance(norm, BatchKalmanNorm) and norm.wire is not None]
    if not wired:
        raise ValueError(
            f"freeze_priors: {type(model).__name__} contains no norm wired by kalmannorm.convert(model, example_input)"
        )
    memos: dict[tuple[int, torch.device, torch.dtype], Any] = {}
    fixed: list[tuple[Program, int, Moments]] = []
    with torch.no_grad():
        for norm in wired:
            relay = norm.wire.relay
            like = next(t for t in (norm.gain_logit, norm.running_mean, torch.empty(0)) if t is not None)
            key = id(relay), like.device, like.dtype
            if key not in memos:
                memos[key] = relay.constant_priors(like)
            for call, target, sources, _ in (path for paths in norm.wire.paths for path in paths):
                if target is not None and not sources:
                    fixed.append((relay.program, target, memos[key](call, target)))
    for program, target, prior in fixed:
        program.steps[target] = Fixed((), prior)
    return model


def scale_and_shift(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """The scale and shift of a norm in population inference, per channel, in float64."""
    mean, var = (cast(Tensor, getattr(norm, name)).detach().double() for name in ("running_mean", "running_var"))
    gamma, beta = (None if t is None else cast(Tensor, t).detach().double() for t in (norm.weight, norm.bias))
    scale = torch.rsqrt(var + cast(float, norm.eps))
    if gamma is not None:
        scale = scale * gamma
    shift = -scale * mean
    return scale, shift if beta is None else shift + beta


def fold_weights(
    weight: Tensor, bias: Tensor | None, scale: Tensor, shift: Tensor, *, groups: int = 1, transposed: bool = False
) -> tuple[Tensor, Tensor]:
    """Weight and bias of the layer that computes scale · (W u + b) + shift, in float64, returned in the weight's dtype.

    The weight is (outputs, inputs / groups, *taps). A linear layer has no taps. If `transposed`, it is (inputs, outputs
    / groups, *taps), and the outputs are ordered by the groups of the inputs.
    """
    dtype, shape = weight.dtype, weight.shape
    weight, scale, shift = weight.detach().double(), scale.double(), shift.double()
    if transposed:
        taps = (1,) * (len(shape) - 2)
        by_group = weight.reshape(groups, shape[0] // groups, *shape[1:])
        weight = (by_group * scale.reshape(groups, 1, shape[1], *taps)).reshape(shape)
    else:
        weight = weight * scale.reshape(-1, *(1,) * (len(shape) - 1))
    if bias is not None:
        shift = shift + scale * bias.detach().double()
    return weight.to(dtype), shift.to(dtype)


def _norms(model: nn.Module) -> Norms:
    found: Norms = {name: (norm, norm.then) for name, norm in norms(model)}
    for name, module in model.named_modules():
        kind = known(module)
        if kind is not None:
            found[name] = (module, kind.then)
    return found


def _checked_norms(model: nn.Module) -> Norms:
    wrapped = {"OptimizedModule": "model._orig_mod", "DistributedDataParallel": "model.module"}
    if type(model).__name__ in wrapped:
        raise TypeError(f"model is wrapped, in {type(model).__name__}: fold {wrapped[type(model).__name__]} instead")
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"model must be a torch.nn.Module written in Python, got {type(model).__name__}")
    found = _norms(model)
    if not found and not any(isinstance(module, ComputedWeight) for module in model.modules()):
        batch_norms(model)  # raises an error for an unknown class
        raise ValueError(f"fold: {type(model).__name__} contains no batch norm and no norm of kalmannorm")
    for name, (norm, _) in found.items():
        if not isinstance(norm, GroupedNorm):
            continue
        if norm.inference != "population":
            raise ValueError(
                f"fold: {name!r} is in {norm.inference!r} inference; only population statistics can be folded: call "
                "kalmannorm.set_inference(model, 'population') first"
            )
        if norm.running_mean is None:
            raise ValueError(f"fold: {name!r} has track_running_stats=False, so there are no statistics to fold")
        if isinstance(norm, BatchKalmanNorm) and norm.wire is None and norm.prior_features is not None:
            raise ValueError(
                f"fold: {name!r} gets `previous` from the model's own code, which a plain norm does not accept; build "
                "the model with BatchNorm, load the state dict with strict=False and fold that"
            )
    return found


def _layers_of_plan(found: Norms) -> dict[str, nn.Module]:
    """The layer before each norm that `convert` wired."""
    layers, wired = {}, False
    for name, (norm, _) in found.items():
        if isinstance(norm, BatchKalmanNorm) and norm.wire is not None:
            wired = True
            # Not by name, because the model may be a part of the converted model, or contain it.
            plans = norm.wire.relay.plan.norms.values()
            fold = next(plan.fold for plan in plans if plan.calls and plan.calls[0].identity == norm.wire.calls[0])
            layer = fold.module()
            if layer is not None:
                layers[name] = layer
    if not wired:
        raise ValueError(
            "example_input must be given for a model that kalmannorm.convert did not wire: the model's input, "
            "such as torch.randn(2, 3, 224, 224); the model runs on it to find the input of each norm"
        )
    return layers


def _layers_of_run(model: nn.Module, example_input: Any, found: Norms) -> dict[str, nn.Module]:
    try:
        run = trace(model, example_input, found, training=False)
    except Exception as error:
        name = type(model).__name__
        message = f"example_input: {name} does not run on it in eval mode: {type(error).__name__}: {error}"
        raise ValueError(message) from error
    return foldable(model, run)


def _folds(norm: nn.Module, then: tuple[str, ...], layer: nn.Module) -> bool:
    """Whether one layer can replace the layer and the norm."""
    # A computed weight (parametrized, weight-normed, pruned) is not a parameter of the layer.
    own = layer._parameters
    if norm.running_mean is None or own.get("weight") is None or "bias" not in own:
        return False
    if len(set(then)) < len(then) or any(name not in norm._modules for name in then):
        return False
    return own["bias"] is not None or _adds_bias(layer)


def _adds_bias(layer: nn.Module) -> bool:
    """Whether a layer without a bias would use one, which a subclass may not.

    If it does, its output for an input of zeros is the bias.
    """
    assert isinstance(layer, (_ConvNd, nn.Linear))
    weight, taps = layer.weight, cast(tuple[int, ...], ())
    if isinstance(layer, _ConvNd):
        taps = tuple((k - 1) * d + 1 for k, d in zip(layer.kernel_size, layer.dilation, strict=True))
    inputs, outputs = _channels(layer)
    bias = torch.arange(1, outputs + 1).to(weight) / outputs
    try:
        with torch.no_grad():
            layer.bias = nn.Parameter(bias)
            y = layer(weight.new_zeros(1, inputs, *taps))
        return torch.equal(y, bias.reshape(1, -1, *(1,) * len(taps)).expand_as(y))
    except Exception:  # it needs other arguments than one tensor
        return False
    finally:
        layer.bias = None


def _channels(layer: _ConvNd | nn.Linear) -> tuple[int, int]:
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return layer.in_channels, layer.out_channels


def _undisturbed(model: nn.Module, found: Norms, pairs: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Pairs whose layer is in the model and shares no parameter, with no hook between layer and norm."""
    modules = list(model.modules())
    holders = Counter(id(p) for module in modules for p in module._parameters.values() if p is not None)
    inside = {id(module): {id(part) for part in module.modules()} for module in modules if _hooked(module)}
    kept = {}
    for name, layer in pairs.items():
        norm = found[name][0]
        alone = all(holders[id(p)] == 1 for p in layer.parameters())  # 0 if the layer was replaced
        # A hook of a module that contains both does not see the tensor between them.
        unseen = all((id(layer) in parts) == (id(norm) in parts) for parts in inside.values())
        if alone and unseen:
            kept[name] = layer
    return kept


def _hooked(module: nn.Module) -> bool:
    """Whether a hook other than ours would see the inputs or outputs of the module."""
    hooks = [hook for table in _HOOKS for hook in getattr(module, table).values()]
    return any(not type(hook).__module__.startswith("kalmannorm.") for hook in hooks)


@torch.no_grad()
def _fold_into(layer: nn.Module, norm: nn.Module, scale: Tensor, shift: Tensor) -> None:
    assert isinstance(layer, (_ConvNd, nn.Linear))
    groups = layer.groups if isinstance(layer, _ConvNd) else 1
    transposed = isinstance(layer, _ConvTransposeNd)
    weight, bias = fold_weights(layer.weight, layer.bias, scale, shift, groups=groups, transposed=transposed)
    layer.weight.copy_(weight)
    if layer.bias is not None:
        layer.bias.copy_(bias)
    else:
        learns = layer.weight if norm.bias is None else cast(Tensor, norm.bias)
        layer.bias = nn.Parameter(bias, requires_grad=learns.requires_grad)


def _become_what_follows(norm: nn.Module, then: tuple[str, ...]) -> None:
    """Change the norm itself, so that references to it stay valid."""
    fresh = nn.Sequential() if then else nn.Identity()
    for name in then:
        fresh.add_module(name, norm._modules[name])
    norm.__dict__.clear()
    norm.__class__ = fresh.__class__
    norm.__dict__.update(fresh.__dict__)
