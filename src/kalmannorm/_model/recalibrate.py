"""Population statistics from data: one pass over a loader replaces the running averages by statistics of all its data.

A running average lags behind the weights, forgets all but the last batches, and gives a small last batch the weight of
a full one. Here every value counts once: with n_i values in batch i and N = Σ n_i,

    μ = Σ n_i mean_i / N        Σ = Σ n_i (var_i + (mean_i - μ)²) / N

for every split of the data into batches or over ranks. Sums are float64 and separate from the buffers. The buffers are
written once, at the end, so an interrupted pass changes nothing.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.hub import tqdm  # type: ignore[attr-defined]  # the real one where it is installed, else torch's own

from kalmannorm._model.recalibrate_tallies import Tallied, Tally, change, tallies
from kalmannorm._model.settings import freeze_statistics, named, norms, require_norms, set_inference
from kalmannorm._norms.kalman import BatchKalmanNorm
from kalmannorm._support.checks import positive_int

Forward = Callable[[nn.Module, Any], object]


class Recalibration(NamedTuple):
    """The result of `recalibrate`, over all ranks.

    batches: number of batches of the loaders.
    values: values per channel in each norm's statistics, by name; 0 if the old statistics were kept.
    skipped: number of batches with NaN or Inf statistics, for each norm that had any.
    """

    batches: int
    values: dict[str, int]
    skipped: dict[str, int]


def recalibrate(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    max_batches: int | None = None,
    forward: Forward | None = None,
    progress: bool = True,
) -> Recalibration:
    """Re-estimate the population statistics of every norm of this library, and of every torch BatchNorm, from data.

    The norms run as in training: each group of m examples is normalized with its own posterior. So use batches of whole
    groups, shuffled as in training. All other layers, such as dropout or stochastic depth, run as in `eval()`. Their
    noise does not exist at inference and would increase the variances of all norms after them.

    After a closing phase (λ = 1) recalibration is not necessary. If you call it anyway, each batch is normalized with
    the statistics of the whole batch instead of its groups. So use large batches.

    Each norm gets the kind of statistics that it keeps in training. These are the pooled moments of its posteriors, or
    for batch norms the pooled moments of its input, with biased variance, because a fixed normalizer meets that
    variance. With `total_variance=False` they are the plain average of variances, in Batch Renorm that of σ. Frozen
    norms and norms in eval mode are estimated too, and stay frozen or in eval mode. Norms without running statistics
    stay unchanged. Flags, momentum, parameters, gradients and the counters of training do not change. After an error
    the statistics do not change either. A model compiled by `torch.compile` runs uncompiled here.

    With `torch.distributed` every rank calls this function with its own data and any number of batches. All ranks get
    the statistics of all data. Norms that synchronise in training take their groups from one rank here, because ranks
    may have different numbers of batches. (A sharded model, as in FSDP, needs equal numbers.)

    Args:
        loader: yields batches. A tensor is the model's input. Of a tuple or list, the model gets the first elements: as
            many as the example of `convert` had, else as many as its forward requires. So (images, labels) works. Of a
            dict, the model gets the entries that its forward has arguments for, by keyword. If a required argument is
            missing, the first entry is its input.
        max_batches: the most batches on each rank; None takes all.
        forward: runs the model on batches of another kind, `forward(model, batch)`. Its result is not used. To
            re-estimate a part of a model only, pass that part, and a `forward` that runs the whole model in `eval()`.
        progress: show a progress bar, on rank 0 and if stderr is a terminal.

    Tensors in a batch are moved to the model's device. Batches with NaN or Inf statistics are skipped. Norms that never
    run keep their statistics. A warning names the norms in both cases.
    """
    if max_batches is not None:
        max_batches = positive_int("max_batches", max_batches)
    if isinstance(loader, Tensor):
        raise TypeError("loader must yield batches, got a tensor; for a single batch pass [tensor]")
    if isinstance(model, nn.DataParallel):
        model = model.module  # each replica would keep its statistics to itself
    found = tallies(model)
    if not found:
        raise ValueError(f"recalibrate: {type(model).__name__} contains no norm with running statistics")
    batches, failure = 0, None
    try:
        batches = _run(model, loader, found.values(), max_batches, forward or _run_batch, progress)
    except Exception as error:
        failure = error  # the other ranks wait for this one, so it must not leave yet
    own = {} if failure else {name: tally.state() for name, tally in found.items()}
    batches, states = _joined(batches, own, failure)
    if not batches:
        raise ValueError("recalibrate: loader yielded no batch; an iterator can be used only once")
    merged = {name: tally.merged(states[name]) for name, tally in found.items()}
    kept = {name for name, tally in found.items() if not tally.write(merged[name])}
    if _rank() == 0:
        _report(merged, kept)
    return Recalibration(
        batches,
        {name: 0 if name in kept else state.values for name, state in merged.items()},
        {name: state.skipped for name, state in merged.items() if state.skipped},
    )


def finish_on_population(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    max_batches: int | None = None,
    forward: Forward | None = None,
    progress: bool = True,
) -> Recalibration:
    """`recalibrate`, then freeze the statistics: the last phase of training uses the statistics of inference.

    Call it before the last epochs, then continue training. The weights, γ and β adapt to the fixed statistics.
    `.train()` does not undo this, `freeze_statistics(model, False)` does. Call it when the learning rate is low, about
    a twentieth of its peak, because a network with frozen statistics diverges sooner. Every norm is set to `population`
    inference, because frozen norms run in training as they do in `eval()`. A warning names norms that had another mode.
    torch's own BatchNorm layers cannot be frozen, and a warning names them. Arguments and result are those of
    `recalibrate`.
    """
    found = require_norms(model, "finish_on_population")
    result = recalibrate(model, loader, max_batches=max_batches, forward=forward, progress=progress)
    others = [name for name, norm in found if norm.inference != "population" and norm.track_running_stats]
    set_inference(model, "population")
    freeze_statistics(model)
    if others:
        warnings.warn(
            f"finish_on_population: {len(others)} norms had another inference mode and are now set to 'population', "
            f"which the last phase of training needs: {named(others)}",
            UserWarning,
            stacklevel=2,
        )
    return result


def _run(
    model: nn.Module,
    loader: Iterable[Any],
    found: Iterable[Tally],
    max_batches: int | None,
    forward: Forward,
    progress: bool,
) -> int:
    """Run every batch through the norms. The model is restored afterwards, even after an error."""
    tensor = next(itertools.chain(model.parameters(), model.buffers()))
    batches = 0
    with torch.no_grad(), _uncompiled(), ExitStack() as stack:
        for module in model.modules():
            change(stack, module, training=False)
            if isinstance(module, nn.parallel.DistributedDataParallel):
                # DDP would broadcast the buffers, and wait forever for a rank without a batch.
                change(stack, module, require_forward_param_sync=False)
        for tally in found:
            tally.attach(stack)
        bar = stack.enter_context(_bar(loader, max_batches, progress))
        for batch in itertools.islice(loader, max_batches):
            forward(model, to_device(batch, tensor.device))
            batches += 1
            bar.update(1)
    return batches


def _uncompiled() -> AbstractContextManager[object]:
    # Compiled code would not see what is changed for this pass, and compiling again would not pay off.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _bar(loader: Iterable[Any], max_batches: int | None, progress: bool) -> Any:
    total: int | None
    try:
        total = len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        total = max_batches
    if total is not None and max_batches is not None:
        total = min(total, max_batches)
    # No bar in a file or a pipe. torch's replacement for tqdm shows no label and counts in bytes.
    shown = progress and _rank() == 0 and sys.stderr is not None and sys.stderr.isatty()
    if stand_in := tqdm.__module__ == "torch.hub":
        shown = shown and total is not None
    bar = tqdm(total=total, unit="batch", desc="recalibrate", disable=not shown)
    if stand_in and shown:
        bar.write(f"recalibrate, {total} batches:")
    return bar


def _run_batch(model: nn.Module, batch: Any) -> object:
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, Mapping):
        named_here = _named_arguments(model, batch)
        if named_here:
            return model(**named_here)
    elements = list(batch.values()) if isinstance(batch, Mapping) else batch
    if isinstance(elements, (tuple, list)) and len(elements):
        return model(*elements[: 1 if isinstance(batch, Mapping) else _positional(model)])
    raise TypeError(
        "loader must yield tensors, or tuples, lists or dicts that start with the model's input; got "
        f"{'an empty' if isinstance(elements, (tuple, list)) else 'a'} {type(batch).__name__}. For other batches pass "
        "forward, a function of (model, batch) that runs the model"
    )


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DDP, `torch.compile` or `AveragedModel`. Their forwards take anything."""
    inside = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module", "AveragedModel": "module"}
    while type(model).__name__ in inside:
        model = getattr(model, inside[type(model).__name__])
    return model


def _named_arguments(model: nn.Module, batch: Mapping[Any, Any]) -> dict[str, Any]:
    """The entries of a batch for which the forward of the model has arguments."""
    arguments = inspect.signature(_unwrapped(model).forward).parameters.values()
    if any(argument.kind is argument.VAR_KEYWORD for argument in arguments):
        return {name: value for name, value in batch.items() if isinstance(name, str)}
    known = {a.name: a.default for a in arguments if a.kind in (a.POSITIONAL_OR_KEYWORD, a.KEYWORD_ONLY)}
    found = {name: value for name, value in batch.items() if name in known}
    missing = [name for name, default in known.items() if default is inspect.Parameter.empty and name not in found]
    return {} if missing else found


def _positional(model: nn.Module) -> int:
    """How many elements of a tuple or list the model gets."""
    model = _unwrapped(model)
    for _, norm in norms(model):
        if isinstance(norm, BatchKalmanNorm) and norm.wire is not None and norm.wire.relay.model.module() is model:
            return max(int(norm.wire.relay.plan.arguments), 1)
    required = [
        argument
        for argument in inspect.signature(model.forward).parameters.values()
        if argument.default is argument.empty
        and argument.kind in (argument.POSITIONAL_ONLY, argument.POSITIONAL_OR_KEYWORD)
    ]
    return max(len(required), 1)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in its tuples, lists and dicts on the device. Other objects are unchanged."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(part, device) for part in batch))
    if type(batch) in (tuple, list):
        return type(batch)(to_device(part, device) for part in batch)
    if isinstance(batch, MutableMapping):
        updated = copy.copy(batch)  # keeps the class: some dicts of batches have attributes
        updated.update({key: to_device(part, device) for key, part in batch.items()})
        return updated
    return batch


def _ranks() -> int:
    ready = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if ready else 1


def _rank() -> int:
    return distributed.get_rank() if _ranks() > 1 else 0


def _joined(
    batches: int, states: dict[str, Tallied], failure: Exception | None
) -> tuple[int, dict[str, list[Tallied]]]:
    """The number of all batches, and the states of all ranks in order. Ranks communicate only here.

    A rank that failed also comes here, so that the others get its error instead of waiting for it.
    """
    ranks = [(batches, states, failure and f"{type(failure).__name__}: {failure}")]
    if _ranks() > 1:
        ranks *= _ranks()
        distributed.all_gather_object(ranks, (batches, states, ranks[0][2]))
    if failure is not None:
        raise failure
    for rank, (_, theirs, error) in enumerate(ranks):
        if error:
            raise RuntimeError(f"recalibrate: rank {rank} failed, so no statistics were changed: {error}")
        if theirs.keys() != states.keys():
            raise RuntimeError(
                f"recalibrate: rank {rank} has other norms than rank {_rank()}; all ranks need the same model"
            )
    return sum(rank[0] for rank in ranks), {name: [rank[1][name] for rank in ranks] for name in states}


def _report(merged: dict[str, Tallied], kept: set[str]) -> None:
    skipped = [name for name, state in merged.items() if state.skipped or (name in kept and state.batches)]
    unseen = [name for name in merged if name in kept and name not in skipped]
    if skipped:
        counts = [f"{n} ({merged[n].skipped} skipped{', statistics kept' * (n in kept)})" for n in skipped]
        text = f"recalibrate: {len(skipped)} norms had batches with NaN or Inf statistics: {named(counts)}"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    if unseen:
        text = f"recalibrate: {len(unseen)} norms never ran and keep their statistics: {named(unseen)}"
        warnings.warn(text, UserWarning, stacklevel=3)
