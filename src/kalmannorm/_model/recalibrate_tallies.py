"""Tallies: what each norm of a model sees during `recalibrate`, in float64 and separate from the norm's buffers.

The buffers keep their values until the end, because Batch Renorm corrects towards them. Then they are written once.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from kalmannorm._norms.grouped import GroupedNorm
from kalmannorm._norms.kalman import BatchKalmanNorm
from kalmannorm._ops.normalize import exportable
from kalmannorm._ops.track.averages import precise_dtype, updated
from kalmannorm.moments import Moments

AVERAGES = ("running", "observed")
COUNTS = ("num_batches_tracked", "values_tracked", "skipped_batches")


class Tallied(NamedTuple):
    """A tally as numbers that can be sent to other ranks: counts, and the averages (C,) on the CPU, by kind."""

    batches: int
    values: int
    skipped: int
    averages: dict[str, Moments]


def change(stack: ExitStack, module: nn.Module, **attributes: object) -> None:
    """Set attributes of a module until the stack closes."""
    for name, value in attributes.items():
        old = getattr(module, name)
        if callable(old) and name not in vars(module):  # a method: deleting the attribute makes it visible again
            stack.callback(delattr, module, name)
        else:
            stack.callback(setattr, module, name, old)
        setattr(module, name, value)


class Tally:
    """The statistics that one norm has seen, named like its buffers. Nothing waits for the device before `state`."""

    def __init__(self, norm: _NormBase) -> None:
        self.norm = norm
        self.seen: dict[str, Tensor] = {}

    def attach(self, stack: ExitStack) -> None:
        """Run the norm as in training and observe it, until the stack closes."""
        raise NotImplementedError

    def updated(self, kind: str, average: Moments, batch: Moments, alpha: Tensor | float) -> Moments:
        """The average after a batch with weight α, by the law of total variance."""
        return updated(average.mean, average.var, batch, alpha, total_variance=True)

    def state(self) -> Tallied:
        if not self.seen:
            return Tallied(0, 0, 0, {})
        batches, values, skipped = (int(self.seen[name]) for name in COUNTS)
        averages = {
            kind: Moments(self.seen[f"{kind}_mean"].cpu(), self.seen[f"{kind}_var"].cpu())
            for kind in AVERAGES
            if f"{kind}_mean" in self.seen
        }
        return Tallied(batches, values, skipped, averages)

    def merged(self, states: list[Tallied]) -> Tallied:
        """The states of all ranks as one. All ranks get equal bits, because they add in the same order."""
        values = 0
        averages: dict[str, Moments] = {}
        for state in states:
            if not state.values:
                continue
            values += state.values
            averages = {
                kind: self.updated(kind, averages[kind], batch, state.values / values) if averages else batch
                for kind, batch in state.averages.items()
            }
        return Tallied(sum(state.batches for state in states), values, sum(state.skipped for state in states), averages)

    def write(self, state: Tallied) -> bool:
        """Write these statistics into the norm. False if there were no values or they overflow the buffers."""
        new = []
        for kind, average in state.averages.items():
            for part in ("mean", "var"):
                buffer = getattr(self.norm, f"{kind}_{part}")
                new.append((buffer, getattr(average, part).to(buffer.dtype)))
        if not state.values or not all(value.isfinite().all() for _, value in new):
            return False
        for buffer, value in new:
            buffer.copy_(value)
        return True


class GroupedTally(Tally):
    """A norm of this library tracks as usual, with `momentum=None`, but into the tally instead of its buffers."""

    norm: GroupedNorm

    def attach(self, stack: ExitStack) -> None:
        norm, track = self.norm, self.norm._track

        def track_apart(*args: Any, **kwargs: Any) -> None:
            if not self.seen:
                self.seen = {name: blank(buffer) for name, buffer in norm.named_buffers(recurse=False)}
            with ExitStack() as inside:
                change(inside, norm, momentum=None, _warned=True, **self.seen)
                track(*args, **kwargs)

        change(stack, norm, training=True, frozen=False, _track=track_apart)
        if norm.closes and norm.closing.settled and norm.total_variance:
            change(stack, norm, reestimates=True)
        if norm._pending is not None:
            change(stack, norm, _pending=None)
        if getattr(norm, "process_group", None) is not None:
            # Ranks may have different numbers of batches. A norm that waits for the others at each batch would wait
            # forever.
            change(stack, norm, process_group=None)
        if isinstance(norm, BatchKalmanNorm):
            stack.callback(norm.release)

    def updated(self, kind: str, average: Moments, batch: Moments, alpha: Tensor | float) -> Moments:
        if kind == "observed":
            return super().updated(kind, average, batch, alpha)
        with ExitStack() as inside:  # uses the norm's own rule, which reads its buffers
            change(inside, self.norm, running_mean=average.mean, running_var=average.var)
            return self.norm._updated(batch, alpha)

    def write(self, state: Tallied) -> bool:
        written = super().write(state)
        if written and self.norm.values_tracked is not None:
            # num_batches_tracked stays: it counts training steps, which the schedule of Batch Renorm's clips needs.
            self.norm.values_tracked.fill_(state.values)
        return written


class BatchNormTally(Tally):
    """torch's BatchNorm passes its input to the tally. By itself it would give all batches the same weight."""

    norm: _BatchNorm

    def attach(self, stack: ExitStack) -> None:
        norm, forward = self.norm, self.norm.forward

        def observe_then_forward(*args: Any, **kwargs: Any) -> Tensor:
            x = args[0] if args else kwargs["input"]
            if x.dim() > 1 and x.numel():
                self.observe(x)
            with ExitStack() as inside:
                if x.dim() > 1 and x.numel() > x.shape[1]:
                    # In eval mode and without buffers it uses the batch's statistics, updates nothing, and does not
                    # wait for other ranks, as a SyncBatchNorm in training does.
                    change(inside, norm, running_mean=None, running_var=None)
                # One value per channel has no variance. Then the old running statistics are used.
                return forward(*args, **kwargs)

        change(stack, norm, forward=observe_then_forward)

    def observe(self, x: Tensor) -> None:
        if not self.seen:
            average, count = blank(x.new_empty(x.shape[1])), x.new_zeros((), dtype=torch.long)
            self.seen = {name: average.clone() for name in ("running_mean", "running_var")}
            self.seen |= {name: count.clone() for name in COUNTS}
        mean, var, total = (self.seen[name] for name in ("running_mean", "running_var", "values_tracked"))
        values = x.numel() // x.shape[1]
        observation = exportable.observe_groups(x, x.shape[0])
        batch = Moments(observation.mean[0], observation.var[0])
        new = self.updated("running", Moments(mean, var), batch, values / (total + values).to(mean.dtype))
        finite = torch.isfinite(torch.stack([new.mean, new.var])).all()
        mean.copy_(torch.where(finite, new.mean, mean))
        var.copy_(torch.where(finite, new.var, var))
        total.add_(values * finite)
        self.seen["num_batches_tracked"].add_(finite)
        self.seen["skipped_batches"].add_(~finite)

    def write(self, state: Tallied) -> bool:
        written = super().write(state)
        if written and self.norm.num_batches_tracked is not None:
            self.norm.num_batches_tracked.fill_(state.batches)  # with `momentum=None` it is the weight of later batches
        return written


def blank(like: Tensor) -> Tensor:
    """Zeros of this shape on this device, in float64 if the device supports it."""
    if not like.is_floating_point():
        return torch.zeros_like(like)
    return torch.zeros_like(like, dtype=precise_dtype(like))


def tallies(model: nn.Module) -> dict[str, Tally]:
    """One tally for every norm with running statistics, by name."""
    return {
        name or "(the model itself)": (GroupedTally if isinstance(module, GroupedNorm) else BatchNormTally)(module)
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats and module.running_mean is not None
    }
