"""`convert` replaces a model's batch norms by Kalman norms, or by those of a baseline, and keeps the model.

`class_swap.py` changes the norms. `_wiring/` finds which norms feed which.
"""

from __future__ import annotations

import difflib
import gc
import warnings
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from kalmannorm._model.calibration import calibrate as calibrate_norms
from kalmannorm._model.calibration import has_trained_statistics
from kalmannorm._model.class_swap import (
    FILTER_OPTIONS,
    GROUPED,
    check_norm,
    fresh_grouped,
    fresh_other,
    swap_class,
    swap_to_batchnorm,
)
from kalmannorm._model.closing import leave_order
from kalmannorm._model.norm_classes import batch_norms, known
from kalmannorm._model.norm_layer import KalmanNorm
from kalmannorm._model.optimization import watch_weight_decay
from kalmannorm._model.statistics_batch import StatisticsBatch, check_statistics_batch, statistics_batches
from kalmannorm._model.wiring_report import Wiring, report
from kalmannorm._norms.baselines import GhostBatchNorm
from kalmannorm._norms.computed_weights import (
    Computation,
    check_convolutions,
    compute_weights,
    plain_weights,
    without_computation,
)
from kalmannorm._norms.distributed import LayerName
from kalmannorm._norms.grouped import GroupedNorm
from kalmannorm._norms.kalman import BatchKalmanNorm
from kalmannorm._norms.online import OnlineNorm
from kalmannorm._norms.transition import LearnedTransition
from kalmannorm._running.hooks import Begin, End
from kalmannorm._running.paths import Path
from kalmannorm._running.relay import Relay
from kalmannorm._running.wires import Wire, keepable
from kalmannorm._running.without_priors import connect_without_priors
from kalmannorm._support.changes import Changes, watch_replacements
from kalmannorm._support.checks import positive_int
from kalmannorm._support.copying import Detached, copied, copied_with
from kalmannorm._support.fused_modules import unfuse
from kalmannorm._wiring.plan import CallPlan, Plan, Transition, find_normalized, make_plan
from kalmannorm._wiring.recording.frozen import is_frozen

Target = Literal["kalman", "ghost", "renorm", "moving-average", "online", "group", "layer", "instance", "batch"]
TARGETS: tuple[Target, ...] = get_args(Target)

GAINS = {"weights": 0.5, "learned": 0.9}
"""The initial gain of each transition. A learned transition starts at A = 0 and has to learn before it helps."""

_STATISTICS = {"inference", "momentum", "process_group"}
_AVERAGES = {"total_variance", "observation_momentum"}
_OPTIONS: dict[str, set[str]] = {
    "kalman": _STATISTICS | _AVERAGES | {"gain", "per_channel_gain", "rank", "covariance", "weight_standardization"},
    "ghost": _STATISTICS | _AVERAGES | {"weight_standardization"},
    "renorm": _STATISTICS | {"r_max", "d_max", "warmup_steps", "r_steps", "d_steps"},
    "moving-average": {"inference", "momentum", "real_batch_size", "warmup_steps", "centre_weights"},
    "online": {"forward_decay", "backward_decay", "layer_scaling", "clamp"},
    "group": {"num_groups", "weight_standardization"},
    "layer": set(),
    "instance": set(),
    "batch": set(),
}


def convert(
    model: nn.Module,
    example_input: Any = None,
    *,
    to: Target = "kalman",
    statistics_batch_size: StatisticsBatch = None,
    transition: Literal["weights", "learned"] = "weights",
    inplace: bool = False,
    more_examples: Sequence[Any] = (),
    calibrate: bool | None = None,
    **options: Any,
) -> nn.Module:
    """Replace every batch norm of a model and return the converted model. Its class stays the same.

    Convert before you build the optimizer and before you wrap the model in DDP or `torch.compile`. Weights, running
    statistics, eps, momentum, devices, dtypes, training flags, `requires_grad`, hooks and state-dict names stay the
    same. A BatchNorm checkpoint still loads. `kalmannorm.wiring(model)` shows which norms feed which.

    Args:
        model: contains BatchNorm1d, 2d, 3d, SyncBatchNorm, timm's BatchNormAct2d or classes given to `register_norm`.
        example_input: the model's input: a tensor (or a list: one argument), a tuple of positional arguments or a dict
            of keyword arguments, on the model's device. Needed for "kalman", and for "ghost" with
            `weight_standardization`. The model runs on it twice, without gradients, and stays unchanged. Its spatial
            size should be that of training: see `rewire`.
        to: "kalman"; "ghost" (batch norm on groups), "renorm" (Batch Renorm), "moving-average" (Moving Average Batch
            Norm, with centred weights), "online" (Online Normalization), "group" (GroupNorm with the largest divisor of
            the channels up to `num_groups`), "layer" (GroupNorm with one group), "instance"; "batch" turns norms of
            this library back, as `to_batchnorm` does.
        statistics_batch_size: m, the number of examples in a group. None takes the whole batch as one group. m counts
            the rows of each norm's own input: a box head gets one row per box, and frames may be folded into the batch.
            A dict sets m by layer, as in {"roi_heads": 512, nn.BatchNorm1d: None, "": 2}. A key is the name of a
            module (all norms inside it), a class of norms or of modules, or "" for all other norms (default None). The
            most specific key counts; names count before classes.
        transition: "weights" predicts a norm's statistics from the parameters between it and the norms before it.
            "learned" is the paper's transition, a learned matrix on their posteriors. It adds parameters.
        inplace: convert this model instead of a copy.
        more_examples: inputs that take other paths through the model, as in a mixture of experts. Each is an example
            as `example_input` is. A norm with several paths uses the prior of the one that ran. If none of them ran,
            it uses the observation alone, with one warning.
        calibrate: scale and shift the priors of `weights` so that they meet the running statistics of now, by two
            constants per channel. None: in norms whose statistics were trained. See `calibrate_priors`.
        **options: options of the norms: `inference`, `momentum`, `process_group`; for kalman also `gain` (0.5 at the
            start for weights, 0.9 for learned), `per_channel_gain`, `rank` and `covariance` (learned),
            `total_variance`, `observation_momentum`; for group `num_groups`; for renorm its schedule; for
            moving-average `real_batch_size`, `warmup_steps` and `centre_weights`; for online `forward_decay`,
            `backward_decay`, `layer_scaling` and `clamp`. `momentum` and `process_group` default to those of each norm.
            For kalman, ghost and group `weight_standardization=True` standardizes filters of convolutions: for group
            all of them, for the others those with a norm after them, except depthwise ones. The others also divide
            them by the square root of their number of inputs, so outputs are about as large as inputs.
    """
    _check_arguments(model, example_input, to, statistics_batch_size, transition, options)
    if calibrate and (to != "kalman" or transition != "weights"):
        raise ValueError(
            f"calibrate must be None or False for to={to!r}, transition={transition!r}: it calibrates the "
            "priors of to='kalman', transition='weights'"
        )
    if to == "batch":
        return to_batchnorm(model, inplace=inplace)
    _check_convertible(model)
    computation = _computation(to, options)
    chooses = computation is not None and to in ("kalman", "ghost")  # only convolutions with a norm after them
    if computation is not None and not chooses:
        check_convolutions(model)
    _warn_of_optimizers(model, inplace)
    with torch.inference_mode(False):  # tensors made under inference mode could not be trained
        computed: Detached = {}
        if not inplace:
            model, computed = copied_with(model)
        found = {name: (module, kind) for name, module in batch_norms(model).items() if (kind := known(module))}
        sizes = statistics_batches(model, {name: module for name, (module, _) in found.items()}, statistics_batch_size)
        plan, normalized = None, None
        if to == "kalman":
            plan = make_plan(model, example_input, _traced(model), transition, computed, more_examples)
            normalized = [layer for each in plan.normalized if (layer := each.module()) is not None]
        elif chooses:
            normalized = find_normalized(model, example_input, _traced(model), computed, more_examples)
        if chooses:
            _check_standardized(model, normalized, [module for module, _ in found.values()])
        fresh: dict[str, nn.Module] = {}
        for name, (module, kind) in found.items():  # check all of them before changing any
            try:
                if to in GROUPED:
                    norm_plan = plan.norms[name] if plan else None
                    fresh[name] = fresh_grouped(module, kind, to, sizes[name], options, norm_plan)
                    vars(fresh[name])["_layer_name"] = LayerName.of(f"layer {name!r}")
                else:
                    fresh[name] = fresh_other(module, kind, to, options)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{name!r}: {error}") from error
        if plan is not None:
            _add_filters(fresh, plan, options)
        for name, (module, _) in found.items():
            swap_class(module, fresh[name])
        if computation is not None:
            compute_weights(model, computation, normalized if chooses else None)
            if plan is not None and normalized is not None:
                plan.read_filters(normalized)
        if to == "ghost":
            norms = [module for module, _ in found.values()]
            _add_hooks(model, connect_without_priors(norms), norms)
        if plan is not None:
            _connect(model, plan)
            if calibrate is not False:
                norms = [model.get_submodule(name) for name in found]
                calibrate_norms([norm for norm in norms if calibrate or has_trained_statistics(norm)])  # type: ignore[misc]
            watch_weight_decay()
            watch_replacements()
    return model


def _computation(to: Target, options: dict[str, Any]) -> Computation | None:
    """How convolutions compute their weights for this norm."""
    if to == "moving-average":
        return "centred" if options.get("centre_weights", True) else None
    if not options.get("weight_standardization", False):
        return None
    return "standardized" if to == "group" else "scaled"


def _check_standardized(model: nn.Module, normalized: Sequence[nn.Module] | None, norms: Sequence[nn.Module]) -> None:
    if not normalized:
        raise ValueError(
            f"weight_standardization: {type(model).__name__} has no plain convolution with a norm after it; leave the "
            "option out"
        )
    if any(has_trained_statistics(norm) for norm in norms):
        warnings.warn(
            "convert: weight_standardization changes what trained convolutions compute: their filters lose their "
            "means. Use it for training from scratch, and convert a trained model without it",
            UserWarning,
            stacklevel=3,
        )


def _traced(model: nn.Module) -> dict[str, tuple[nn.Module, tuple[str, ...]]]:
    """The norms to trace, each with the children that it applies to its result."""
    found = {}
    for name, module in model.named_modules():
        kind = known(module)
        if kind is not None:
            found[name] = (module, kind.then)
        elif isinstance(module, BatchKalmanNorm):
            found[name] = (module, module.then)
    return found


def rewire(model: nn.Module, example_input: Any, *, more_examples: Sequence[Any] = ()) -> Wiring:
    """Wire a model: one built with `norm_layer`, or a converted one again for another input. Parameters stay the same.

    The prior of `weights` depends on the share of a map that lies at its padded edge, and so on the size of the example
    input. Batch norms that are left in a model built with `norm_layer` stay as they are. They are sources of priors.
    `more_examples` is that of `convert`.
    """
    norms = {name: module for name, module in model.named_modules() if isinstance(module, BatchKalmanNorm)}
    wired = [module for module in norms.values() if module.wire is not None]
    waiting = {name: module for name, module in norms.items() if isinstance(module, KalmanNorm)}
    if not wired and not waiting:
        raise ValueError(f"rewire: {type(model).__name__} was not converted; call kalmannorm.convert first")
    transition: Transition = wired[0].wire.relay.plan.transition if wired else "weights"
    if waiting and transition != "weights":
        raise ValueError(
            f"rewire: {next(iter(waiting))!r} was built by norm_layer, which needs transition='weights', but this "
            f"model was converted with transition={transition!r}"
        )
    for norm in wired:
        norm.wire.relay.replacements = Changes.replacements  # this call is what the warning would advise
    traced = {name: (norm, norm.then) for name, norm in norms.items()}
    with torch.inference_mode(False), without_computation(model) as computed:
        plan = make_plan(model, example_input, traced, transition, more_examples=more_examples)
    plan.read_filters(computed)
    for name, now in plan.norms.items():
        features = norms[name].prior_features
        sizes = {path.size for call in now.calls for path in (call, *call.others) if path.size is not None}
        if sizes and sizes != {features}:
            raise ValueError(
                f"rewire: with this input {name!r} gets {sizes.pop()} posterior entries, but was built for {features}; "
                "convert the BatchNorm model with this input instead, or with both: convert(model, example_input, "
                "more_examples=[other_input])"
            )
    for name, norm in waiting.items():
        paths = (path for call in plan.norms[name].calls for path in (call, *call.others))
        norm.settle(any(path.target is not None for path in paths))
        vars(norm)["_layer_name"] = LayerName.of(f"layer {name!r}")
    _connect(model, plan)
    for norm in norms.values():
        if norm.calibrated and norm.wire is not None:
            norm.wire.calibrate()
    calibrate_norms([norm for norm in waiting.values() if has_trained_statistics(norm)])
    watch_weight_decay()
    watch_replacements()
    return wiring(model)


def wiring(model: nn.Module) -> Wiring:
    """The sources of every norm of a converted model. The result prints as a table, draws as SVG and contains the data.

    `model` may also be a part of a converted model, or contain several. Sources outside of a part keep their old names.
    """
    wires = [module.wire for module in model.modules() if isinstance(module, BatchKalmanNorm) and module.wire]
    if not wires:
        raise ValueError(
            f"wiring: {type(model).__name__} contains no norm wired by kalmannorm.convert(model, example_input, "
            "to='kalman')"
        )
    return report(list({id(wire.relay): wire.relay for wire in wires}.values()), model)


def to_batchnorm(model: nn.Module, *, inplace: bool = False) -> nn.Module:
    """Turn every norm of this library back into its original class, with the current population statistics.

    The outputs in `population` inference stay exactly the same, and the model contains nothing of this library. A
    SyncBatchNorm becomes the BatchNorm of its rank. So does a hand-built norm, if its model passes no `previous` to it.
    """
    found = [module for module in model.modules() if isinstance(module, GroupedNorm)]
    if not found and not batch_norms(model):
        raise ValueError(f"to_batchnorm: {type(model).__name__} contains no norm of kalmannorm and no batch norm")
    for name, module in model.named_modules():
        by_hand = isinstance(module, BatchKalmanNorm) and not hasattr(module, "converted_from")
        if by_hand and module.prior_features is not None:
            raise ValueError(
                f"to_batchnorm: the model's own code passes `previous` to {name!r}, which a plain norm does not "
                "accept; build the model with BatchNorm and load the state dict with strict=False"
            )
    with torch.inference_mode(False):
        if not inplace:
            model = copied(model)
        unfuse(model)
        plain_weights(model)
        for module in list(model.modules()):
            if isinstance(module, GroupedNorm):
                swap_to_batchnorm(module)
        _disconnect(model)
        leave_order(model)
    return model


def _check_arguments(
    model: nn.Module, example_input: Any, to: str, size: StatisticsBatch, transition: str, options: dict[str, Any]
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if to not in TARGETS:
        raise ValueError(f"to must be one of {', '.join(map(repr, TARGETS))}, got {to!r}")
    if transition not in ("weights", "learned"):
        raise ValueError(f"transition must be 'weights' or 'learned', got {transition!r}")
    if to == "kalman" and example_input is None:
        raise ValueError(
            "example_input must be given for to='kalman': the model's input, such as "
            "torch.randn(2, 3, 224, 224); the model runs on it to find the prior of each norm"
        )
    if to == "ghost" and options.get("weight_standardization") and example_input is None:
        raise ValueError(
            "example_input must be given for weight_standardization: the model's input, such as torch.randn(2, 3, 224, "
            "224); the model runs on it to find the convolutions with a norm after them"
        )
    if isinstance(example_input, (list, tuple)) and example_input and all(type(n) is int for n in example_input):
        raise TypeError(f"example_input must be the model's input, not a shape: torch.randn({example_input})")
    if not isinstance(options.get("weight_standardization", False), bool):
        raise TypeError(f"weight_standardization must be True or False, got {options['weight_standardization']!r}")
    sizes = check_statistics_batch(size)
    if size is not None and to not in GROUPED:
        raise ValueError(f"statistics_batch_size has no meaning for to={to!r}; 'ghost' is batch norm on groups")
    unknown = sorted(set(options) - _OPTIONS[to])
    if unknown:
        allowed = ["statistics_batch_size", "transition", "inplace", *sorted(_OPTIONS[to])]
        close = [match for name in unknown for match in difflib.get_close_matches(name, allowed, 1)]
        meant = f"did you mean {', '.join(close)}? " if close else ""
        raise TypeError(f"convert(to={to!r}) does not take {', '.join(unknown)}; {meant}options: {', '.join(allowed)}")
    learned = sorted({"rank", "covariance"} & set(options))
    if to == "kalman" and transition == "weights" and learned:
        raise ValueError(f"{', '.join(learned)} belongs to transition='learned', got transition='weights'")
    # The constructor of the norm checks the options before anything changes.
    if to in GROUPED:
        settings = {name: value for name, value in options.items() if name not in FILTER_OPTIONS}
        for each in sizes or [None]:
            if to == "kalman":
                GROUPED[to][0](1, 1, transition=transition, statistics_batch_size=each, **settings)
            else:
                GROUPED[to][0](1, statistics_batch_size=each, **settings)
    elif to == "online":
        OnlineNorm(1, **options)
    elif "num_groups" in options:
        positive_int("num_groups", options["num_groups"])


def _check_convertible(model: nn.Module) -> None:
    wrapped = {"OptimizedModule": "torch.compile", "DistributedDataParallel": "DDP", "DataParallel": "DataParallel"}
    if type(model).__name__ in wrapped:
        outside = wrapped[type(model).__name__]
        raise TypeError(f"model is wrapped by {outside}: convert first, then wrap the converted model")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("model is a ScriptModule, whose forward is compiled: convert the Python model, then script it")
    if any(isinstance(module, GroupedNorm) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} is already converted. For another input size call kalmannorm.rewire(model, "
            "example_input); for another norm start from kalmannorm.to_batchnorm(model)"
        )
    _check_tensors(model)
    if known(model) is not None:
        raise ValueError(f"model is itself a {type(model).__name__}; build kalmannorm.BatchKalmanNorm2d instead")
    found = batch_norms(model)
    if not found:
        frozen = {name: type(module).__name__ for name, module in model.named_modules() if is_frozen(module)}
        if frozen:
            shown = ", ".join(map(repr, list(frozen)[:3])) + (f", … {len(frozen)} in all" if len(frozen) > 3 else "")
            raise ValueError(
                f"{type(model).__name__} contains frozen batch norms only ({', '.join(sorted(set(frozen.values())))}: "
                f"{shown}). They use fixed statistics, so there is nothing to convert; build the model with BatchNorm "
                "to train its norms"
            )
        raise ValueError(f"{type(model).__name__} contains no batch norm, so there is nothing to convert")
    for name, module in found.items():
        check_norm(name, module)


def _check_tensors(model: nn.Module) -> None:
    for name, module in model.named_modules():
        for part, tensor in (*module._parameters.items(), *module._buffers.items()):
            if is_lazy(tensor):
                raise TypeError(
                    f"{name!r} is a {type(module).__name__} whose {part} has no size yet: run the model once first"
                )
            if tensor is not None and tensor.is_inference():
                raise TypeError(
                    f"{name!r}: its {part} was made under torch.inference_mode() and cannot be trained; build the "
                    "model outside of that mode"
                )


def _warn_of_optimizers(model: nn.Module, inplace: bool) -> None:
    """Warn of an optimizer that was built before. It lacks the gains and, for a copy, all parameters of the model."""
    parameters = {id(p) for p in model.parameters()}
    objects = gc.get_objects()
    # By type, not by isinstance: objects may lie about their class, and a process holds a million of them.
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.optim.Optimizer)}
    for candidate in [each for each in objects if type(each) in kinds] if kinds else []:
        if any(id(p) in parameters for group in getattr(candidate, "param_groups", ()) for p in group["params"]):
            lacks = "the parameters that conversion adds" if inplace else "any parameter of the converted copy"
            warnings.warn(
                f"convert: a {type(candidate).__name__} built before conversion has parameters of this model, but "
                f"not {lacks}; build the optimizer from the converted model",
                UserWarning,
                stacklevel=3,
            )
            return


def _add_filters(fresh: dict[str, nn.Module], plan: Plan, options: dict[str, Any]) -> None:
    """Add gain and transition to every norm that has a prior. The first norm owns the noise of all."""
    lender: LearnedTransition | None = None
    settings = {name: options[name] for name in ("gain", "per_channel_gain", "rank") if name in options}
    settings.setdefault("gain", GAINS[plan.transition])
    for name, wired in plan.norms.items():
        paths = [path for call in wired.calls for path in (call, *call.others)]
        size = next((path.size for path in paths if path.target is not None), None)
        module = fresh[name]
        assert isinstance(module, BatchKalmanNorm)
        module.transition_kind = plan.transition
        if size is not None:
            noise = lender if plan.transition == "learned" else None
            module.add_filter(size, noise=noise, **settings)
            lender = lender or module.transition


def _connect(model: nn.Module, plan: Plan) -> None:
    """Connect every norm of a plan to a new relay."""
    _disconnect(model)
    for owner in plan.program.owned():
        owner.hold()  # the norm got other tensors after it was traced
    relay, kept = Relay(plan, model), keepable(plan)
    for name, wired in plan.norms.items():
        calls = wired.calls
        if calls:
            wire = Wire(
                relay,
                calls=tuple(call.identity for call in calls),
                paths=tuple(map(_paths, calls)),
                first=tuple(call.first for call in calls),
                last=tuple(call.last for call in calls),
                kept=kept[name],
            )
            setattr(model.get_submodule(name), "wire", wire)  # noqa: B010
    _add_hooks(model, relay, [model.get_submodule(name) for name in plan.norms])


def _add_hooks(model: nn.Module, relay: Relay, norms: Sequence[nn.Module]) -> None:
    """Add the hooks that begin and end a forward of the model, or of a part that is called by itself."""
    known = set(map(id, norms))
    parts = [child for child in model.children() if any(id(module) in known for module in child.modules())]
    for part in (model, *parts):
        if id(part) not in known:
            part.register_forward_pre_hook(Begin(relay, part is model))
            part.register_forward_hook(End(relay, part is model), always_call=True)


def _paths(call: CallPlan) -> tuple[Path, ...]:
    # A posterior that did not arrive is noticed without `needs`. They are needed to choose one of several paths.
    chosen = not call.posteriors or bool(call.others)
    paths = (call, *call.others)
    return tuple(Path(p.identity, p.target, p.posteriors, frozenset(p.needs if chosen else ())) for p in paths)


def _disconnect(model: nn.Module) -> None:
    """Remove our hooks and the wires of Kalman norms. A part of the model may be of ghost norms, and keeps its own."""
    modules = list(model.modules())
    kept = [module.wire.relay for module in modules if isinstance(module, GhostBatchNorm) and module.wire is not None]
    for module in modules:
        if isinstance(module, BatchKalmanNorm):
            module.wire = None
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            ours = [key for key, hook in hooks.items() if isinstance(hook, (Begin, End)) and hook.relay not in kept]
            for key in ours:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)
