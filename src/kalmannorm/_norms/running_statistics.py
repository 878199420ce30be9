"""Tracking: the statistics buffers of a norm, and how training forwards update them.

Running statistics have the names of BatchNorm's, so its checkpoints can be loaded. Observed statistics are stored in
addition. Batches with NaN statistics are skipped. Buffers stay float32 in half-precision models. How a group is
normalized is not part of this file.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from kalmannorm._norms.batchnorm_checkpoints import fill_from_batchnorm
from kalmannorm._ops.dispatch import on_device_of, tracking_for, transformed
from kalmannorm._ops.track.averages import Groups, Pending, groups_of, hastened, updated, values_seen
from kalmannorm._ops.track.request import Kind, TrackingRequest
from kalmannorm._support.changes import Changes
from kalmannorm._support.pickles import check_complete, check_known
from kalmannorm.moments import Moments

SKIPPED_WARNING = (
    "kalmannorm: a batch had NaN or Inf statistics; the running statistics stay unchanged. "
    "kalmannorm.check_statistics(model) lists the layers and their skipped batches."
)


_SETTINGS = {
    "training", "frozen", "eps", "momentum", "observation_momentum", "total_variance", "track_running_stats",
    "statistics_batch_size", "inference", "_ranks", "covariance", "transition_kind", "prior_features", "num_features",
    "affine",
}  # fmt: skip


class TrackedNorm(_BatchNorm):
    """Base of `GroupedNorm`: its statistics. Each training forward updates them once.

    It is a batch norm, so that code which looks for batch norms finds it.
    """

    _version = 101
    """The version of a norm in state dicts (torch's mechanism) and in pickles. Increase it when either changes, and
    upgrade older ones when they are loaded. Torch's batch norms and our oldest norms have version 2."""
    inference_modes: tuple[str, ...] = ()
    total_variance: bool
    observation_momentum: float
    values_tracked: Tensor | None
    skipped_batches: Tensor | None
    observed_mean: Tensor | None
    observed_var: Tensor | None
    _warned: bool
    wire: Any = None
    """Set by `convert`: connects the norm to the model's relay, from which it gets its prior."""
    compiles_alone: bool = False
    """Whether compiled code does not use the wire."""
    _pending: Pending | None = None
    """Collects the statistics of forwards inside `accumulate_statistics`. The buffers do not change there."""
    closes: bool = False
    """Whether a closing phase has begun (`_norms/closing.py`). Its forward reads the statistics that it updates."""
    phase: Any = None
    """A weak reference to the `ClosingPhase` of this norm, which wants to know of `eval()` and `state_dict()`."""
    _arrived: Tensor | None = None
    """Counts the programs of one launch that have finished. It is zero between launches."""

    @staticmethod
    def filter_dtype(dtype: torch.dtype | None) -> torch.dtype:
        """Buffers and filter parameters are float32, also in half-precision models; float64 in float64 ones."""
        return torch.float64 if (dtype or torch.get_default_dtype()) == torch.float64 else torch.float32

    def _register_statistics(self, device: torch.device | str | None, dtype: torch.dtype) -> None:
        shape = (self.num_features,)
        observes = self.track_running_stats and "example" in self.inference_modes
        for name, exists, fill in (("observed_mean", observes, 0.0), ("observed_var", observes, 1.0)):
            self.register_buffer(name, torch.full(shape, fill, device=device, dtype=dtype) if exists else None)
        for name in ("values_tracked", "skipped_batches"):
            count = torch.zeros((), device=device, dtype=torch.long) if self.track_running_stats else None
            self.register_buffer(name, count)
        for name in ("running_mean", "running_var"):
            buffer = getattr(self, name)
            if buffer is not None:
                setattr(self, name, buffer.to(dtype))

    def reset_running_stats(self) -> None:
        super().reset_running_stats()
        self._warned = False
        for name, fill in (("observed_mean", 0), ("observed_var", 1), ("values_tracked", 0), ("skipped_batches", 0)):
            buffer = self._buffers.get(name)  # does not exist yet while torch's own __init__ runs
            if buffer is not None:
                buffer.fill_(fill)

    def _track_batch(self, posterior: Moments, observation: Moments, x: Tensor, size: int) -> None:
        """Update every buffer with the statistics of a forward on x, in groups of `size` examples."""
        examples, values = x.shape[0], x.numel() // x.shape[1]
        compiled = torch.compiler.is_compiling()
        wire: Any = None if compiled and self.compiles_alone else self.wire
        if wire is not None:
            wire.track_first_run()
        kernels = self._launch(posterior.mean)
        if kernels is None:
            waits = compiled and wire is not None and self._pending is None and not self.closes
            if waits and wire.postpone_compiled(posterior, observation, x, size):
                return
            with torch.no_grad():
                self._track(groups_of(posterior, examples, size), groups_of(observation, examples, size), values)
            return
        # Detached: a request may wait for the end of the forward, and would keep the graph alive until then.
        posterior = Moments(posterior.mean.detach(), posterior.var.detach())
        observation = Moments(observation.mean.detach(), observation.var.detach())
        request = self._tracking_request(posterior, observation, examples, size, values)
        if wire is None or not wire.postpone(request, kernels):
            with torch.no_grad(), on_device_of(posterior.mean):
                kernels.track(request)

    def _tracking_request(
        self, posterior: Moments, observation: Moments, examples: int, size: int, values: int
    ) -> TrackingRequest:
        own: dict[str, Any] = self._buffers  # faster than attributes: each `self.` access costs as much as a view
        observed = own["observed_mean"], own["observed_var"]
        if self._arrived is None or self._arrived.device != posterior.mean.device:
            self._arrived = torch.zeros((), device=posterior.mean.device, dtype=torch.int32)
        return TrackingRequest(
            posterior,
            None if observed[0] is None else observation,
            (own["running_mean"], own["running_var"]),
            None if observed[0] is None else observed,
            (own["values_tracked"], own["num_batches_tracked"], own["skipped_batches"]),
            self._arrived,
            examples=examples,
            size=size,
            values=values,
            momentum=self.momentum,
            observation_momentum=self.observation_momentum,
            eps=self.eps,
            kind=self._averages(),
        )

    def _launch(self, rows: Tensor) -> ModuleType | None:
        """Kernels that update the buffers in one launch.

        None if the device has none, or if the norm accumulates or is observed.
        """
        if torch.compiler.is_compiling():
            return None
        return tracking_for(rows) if self.tracks_by_itself(rows) and not transformed() else None

    def tracks_by_itself(self, rows: Tensor) -> bool:
        """Whether the buffers fit these rows, and nobody else collects the statistics."""
        mean = self.running_mean
        fits = mean is not None and (mean.dtype, mean.device) == (rows.dtype, rows.device)
        return fits and self._pending is None and "_track" not in vars(self)  # `recalibrate` replaces `_track`

    def _averages(self) -> Kind:
        """Which kind of average `_pool` and `_updated` compute."""
        return "total" if self.total_variance else "plain"

    def _track(self, posterior: Groups, observation: Groups, values: Tensor | int) -> None:
        """Update every buffer, or add to the pending statistics while accumulating. No value leaves the device."""
        population = self._pool(posterior)
        seen = None if self.observed_mean is None else observation.pooled(total_variance=True)
        if self._pending is None:
            self._update_statistics(population, seen, values)
        else:
            self._pending.add(population, seen, values, self._pool)

    def _update_statistics(self, population: Moments, observation: Moments | None, values: Tensor | int) -> None:
        """Update every buffer. If a new statistic is not finite or `values` is 0, update none."""
        assert self.running_mean is not None and self.running_var is not None
        assert self.values_tracked is not None and self.num_batches_tracked is not None
        assert self.skipped_batches is not None
        total = values_seen(self.values_tracked, self.num_batches_tracked, values) + values
        cumulative = values / total.to(self.running_mean.dtype)
        alpha = cumulative if self.momentum is None else self.momentum

        requests = [(self.running_mean, self.running_var, self._updated(population, alpha))]
        if observation is not None and self.observed_mean is not None and self.observed_var is not None:
            alpha = cumulative if self.momentum is None else hastened(cumulative, self.observation_momentum)
            new = updated(self.observed_mean, self.observed_var, observation, alpha, total_variance=True)
            requests.append((self.observed_mean, self.observed_var, new))
        # Check the new averages, not the batch: a finite but huge batch overflows only in the averages.
        finite = torch.isfinite(torch.stack([part for _, _, new in requests for part in (new.mean, new.var)])).all()
        skip = ~finite
        if isinstance(values, Tensor):  # from other ranks or accumulated forwards; may be 0
            finite, skip = finite & (values > 0), skip & (values > 0)
        for mean, var, new in requests:
            mean.copy_(torch.where(finite, new.mean, mean))
            var.copy_(torch.where(finite, new.var, var))
        self.values_tracked.copy_(torch.where(finite, total, self.values_tracked))
        self.num_batches_tracked.add_(finite)
        self.skipped_batches.add_(skip)
        if skip.device.type == "cpu" and not torch.compiler.is_compiling() and type(skip) is Tensor and skip:
            self._warn_skipped()

    def _pool(self, posterior: Groups) -> Moments:
        return posterior.pooled(total_variance=self.total_variance)

    def _updated(self, population: Moments, alpha: Tensor | float) -> Moments:
        assert self.running_mean is not None and self.running_var is not None
        return updated(self.running_mean, self.running_var, population, alpha, total_variance=self.total_variance)

    def skipped(self) -> int:
        """Number of batches with NaN or Inf statistics. Warns once per layer if there are any. Waits for the device."""
        count = self.skipped_batches
        if count is None or count.is_meta or type(count) is not Tensor or torch.compiler.is_compiling():
            return 0
        if self.wire is not None:  # in the middle of a forward, postponed updates count too
            self.wire.track_postponed()
        skipped = int(count)
        if skipped:
            self._warn_skipped()
        return skipped

    def _look(self) -> None:
        """Let the closing phase notice that its step was forgotten."""
        phase = None if self.phase is None or torch.compiler.is_compiling() else self.phase()
        if phase is not None:
            phase.look()

    def _warn_skipped(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(SKIPPED_WARNING, RuntimeWarning, stacklevel=2)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._matters(name) and not _same(self.__dict__.get(name, Changes), value):
            self._expire()
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._expire()
        super().__delattr__(name)

    def _matters(self, name: str) -> bool:
        """Whether an attribute is a setting, a method, a tensor or a module. Attributes that users add are not."""
        if name in ("_posterior", "_arrived", "phase"):
            return False
        own = self.__dict__
        stored = any(name in own.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))
        return stored or name in _SETTINGS or hasattr(type(self), name)

    def _expire(self) -> None:
        """A setting changes. Updates of this forward that still wait are made with the old one."""
        Changes.count += 1
        wire = self.__dict__.get("wire")
        if wire is not None:
            wire.track_first_run()

    def train(self, mode: bool = True) -> TrackedNorm:
        if self.training and not mode:
            self.skipped()
            self._look()
        super().train(mode)
        return self

    def _float32_tensors(self) -> list[Tensor | None]:
        """The tensors that stay float32 in a half-precision model: the statistics."""
        return [self.running_mean, self.running_var, self.observed_mean, self.observed_var]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TrackedNorm:
        Changes.count += 1
        kept = [t for t in self._float32_tensors() if t is not None]
        kept += [t.grad for t in kept if t.grad is not None]
        identities = {id(t) for t in kept}

        def keep_float32(t: Tensor) -> Tensor:
            out = fn(t)
            if id(t) in identities and out.dtype in (torch.float16, torch.bfloat16):
                return t.to(out.device)  # from t, not from out: out was rounded to half precision
            return out

        super()._apply(keep_float32, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        for name in ("_pending", "_arrived", "phase"):
            state.pop(name, None)
        return {**state, "_version": self._version}

    def __setstate__(self, state: dict[str, Any]) -> None:
        check_known(self, state.get("_version", 0), self._version)
        super().__setstate__({name: value for name, value in state.items() if name != "_version"})  # type: ignore[no-untyped-call]
        own = (base for base in type(self).__mro__ if base.__module__.startswith("kalmannorm."))
        # Not a class that `fuse` or `convert` made, with the name of another one.
        kind: Any = next(base for base in own if getattr(sys.modules[base.__module__], base.__name__, None) is base)
        check_complete(self, _attributes(kind))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.skipped()
        self._look()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        version = local_metadata.get("version") or 0
        if version > self._version:
            error_msgs.append(
                f"{prefix.removesuffix('.')!r} was saved with version {version} of its norm, and this kalmannorm knows "
                f"versions up to {self._version}: update kalmannorm."
            )
            return
        fill_from_batchnorm(self, state_dict, prefix)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _same(old: Any, new: Any) -> bool:
    """Whether a setting keeps its value. Many loops call `model.train()` before every step."""
    return old is new or (type(old) is type(new) and isinstance(new, (bool, int, float, str)) and old == new)


@functools.cache
def _attributes(kind: Any) -> frozenset[str]:
    """The attributes that every norm of this class has."""
    example = kind(1)
    names = {*vars(example), *example._parameters, *example._buffers, *example._modules}
    return frozenset(names - vars(nn.Module()).keys())
