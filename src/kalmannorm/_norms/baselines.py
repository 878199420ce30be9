"""Baseline norms for comparisons. They use the same op, groups, statistics and inference as `BatchKalmanNorm`.

`GhostBatchNorm` is batch norm on groups of m examples, as on each device of a data-parallel run.
`BatchRenorm` (Ioffe, "Batch Renormalization", 2017) corrects a group's statistics towards the moving averages:

    y = γ (r (x - μ_B) / σ_B + d) + β,   r = clip(σ_B / σ, 1/r_max, r_max),   d = clip((μ_B - μ) / σ, -d_max, d_max)

r and d are constants in the backward. Updates are μ ← μ + α (μ_B - μ) and σ ← σ + α (σ_B - σ).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from kalmannorm._groups import cast, group_size
from kalmannorm._norms.distributed import ProcessGroupChoice
from kalmannorm._norms.grouped import GroupedNorm, Inference, has_steps_of
from kalmannorm._ops.normalize import exportable
from kalmannorm._ops.track.averages import Groups
from kalmannorm._ops.track.request import Kind
from kalmannorm._support.activation_checkpoints import first_seen
from kalmannorm._support.tracing import leaf
from kalmannorm.functional import normalize, observe
from kalmannorm.moments import Moments


class GhostBatchNorm(GroupedNorm):
    """Batch norm on groups of `statistics_batch_size` neighbouring examples, with all three inference modes.

    Arguments are those of `BatchKalmanNorm`, without the arguments of the filter.
    """

    # As in a Kalman norm without a prior: see `takes_short_way`.
    gain_logit = None
    prior_features = None
    compiles_alone = True

    def forward(self, x: Tensor, *, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Normalize x. `residual` and `relu` are those of `BatchKalmanNorm`."""
        if type(x) is not Tensor and isinstance(x, Proxy):
            return leaf(self, x, residual=residual, relu=relu)  # type: ignore[no-any-return]
        if self.training and not torch.compiler.is_compiling() and self.wire is not None:
            short: Tensor | None = self.wire.normalize(self, x, residual, relu)
            if short is not None:
                return short
            self.wire.begin()
        return self._finish(self._forward(x, None, residual, relu)[0], residual is not None or relu)

    def __copy__(self) -> GhostBatchNorm:
        """A shallow copy shares tensors, as torch's do. It has no wire: rows and moments belong to one norm."""
        create, arguments, state = self.__reduce_ex__(4)[:3]  # type: ignore[misc]
        copied: GhostBatchNorm = create(*arguments)
        copied.__setstate__(state)
        copied.wire = None
        return copied

    def takes_short_way(self, predicts: bool = False, settled: bool = False) -> bool:
        trains = self.training and not self.frozen and not self.reestimates
        return trains and self.closes == settled and not self._unused()

    def has_usual_steps(self) -> bool:
        return has_steps_of(self, GhostBatchNorm)


class BatchRenorm(GroupedNorm):
    """Batch Renormalization on groups of `statistics_batch_size` examples, with `population` and `batch` inference.

    Args:
        r_max, d_max: the clips at the end of their schedule.
        warmup_steps: batches that run as plain batch norm (r_max = 1, d_max = 0).
        r_steps, d_steps: the batch at which each clip reaches its end. Clips grow linearly after the warm-up.

    The schedule counts training forwards (`num_batches_tracked`). The defaults are those of the paper, for 160,000
    steps. Shorter runs should scale them. `batch` inference normalizes as in training, with r and d.
    Other arguments are those of `BatchKalmanNorm`.
    """

    inference_modes = ("population", "batch")

    def __init__(
        self,
        num_features: int,
        *,
        statistics_batch_size: int | None = None,
        r_max: float = 3.0,
        d_max: float = 5.0,
        warmup_steps: int = 5_000,
        r_steps: int = 40_000,
        d_steps: int = 25_000,
        inference: Inference = "population",
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: ProcessGroupChoice = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not track_running_stats:
            raise ValueError("track_running_stats must be True: Batch Renorm corrects towards the running statistics")
        if r_max < 1:
            raise ValueError(f"r_max must be at least 1, got {r_max}")
        if d_max < 0:
            raise ValueError(f"d_max must be at least 0, got {d_max}")
        for name, steps in (("r_steps", r_steps), ("d_steps", d_steps)):
            if steps < warmup_steps:
                raise ValueError(f"{name} must be at least warmup_steps = {warmup_steps}, got {steps}")
        super().__init__(
            num_features,
            statistics_batch_size=statistics_batch_size,
            inference=inference,
            eps=eps,
            momentum=momentum,
            affine=affine,
            process_group=process_group,
            device=device,
            dtype=dtype,
        )
        self.r_max, self.d_max = r_max, d_max
        self.warmup_steps, self.r_steps, self.d_steps = warmup_steps, r_steps, d_steps

    def forward(self, x: Tensor, *, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Normalize x. `residual` and `relu` are those of `BatchKalmanNorm`."""
        if type(x) is not Tensor and isinstance(x, Proxy):
            return leaf(self, x, residual=residual, relu=relu)  # type: ignore[no-any-return]
        return self._finish(self._forward(x, None, residual, relu)[0], residual is not None or relu)

    def clips(self, batches: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """r_max and d_max after `batches` training batches, on the device. None: after those tracked so far."""
        batches = self.num_batches_tracked if batches is None else batches
        assert batches is not None and self.running_mean is not None
        steps = batches.to(self.running_mean.dtype) - self.warmup_steps

        def progress(end: int) -> Tensor:
            return (steps / max(end - self.warmup_steps, 1)).clamp(0, 1)

        return 1 + (self.r_max - 1) * progress(self.r_steps), self.d_max * progress(self.d_steps)

    def check_closing(self) -> None:
        raise ValueError("BatchRenorm has a schedule of its own, r_steps and d_steps, and no closing phase")

    def _affine(self, observation: Moments) -> tuple[Tensor, Tensor]:
        """γ r and γ d + β of each group, (G, C). r and d have no gradient."""
        with torch.no_grad():
            # This forward updates the statistics. Its recomputation must read the old values.
            mean, var, batches = first_seen(self, self._towards)
            r_max, d_max = self.clips(batches)
            sigma = torch.sqrt(var + self.eps)
            r = torch.sqrt(observation.var + self.eps) / sigma
            r = torch.minimum(torch.maximum(r, 1 / r_max), r_max)
            d = (observation.mean - mean) / sigma
            d = torch.minimum(torch.maximum(d, -d_max), d_max)
        if self.weight is None or self.bias is None:
            return r, d
        # Cast γ once, before its two uses. Otherwise each use would round its gradient to half precision separately.
        weight, bias = cast(self.weight, r.dtype), cast(self.bias, r.dtype)
        return weight * r, weight * d + bias

    def _towards(self) -> tuple[Tensor, Tensor, Tensor]:
        """The running statistics that a forward corrects towards, and the batch number for the schedule."""
        mean, var, batches = self.running_mean, self.running_var, self.num_batches_tracked
        assert mean is not None and var is not None and batches is not None
        return mean, var, batches

    def _normalize(
        self, x: Tensor, prior: Moments | None, gain: Tensor | None, residual: Tensor | None, relu: bool
    ) -> tuple[Tensor, Moments, Moments]:
        with torch.no_grad():
            observation = observe(x, self.statistics_batch_size, join_last=True)
        affine, size = self._affine(observation), self.statistics_batch_size
        return normalize(
            x, None, None, *affine, statistics_batch_size=size, eps=self.eps,
            residual=residual, relu=relu, region=self._region(),
        )  # fmt: skip

    def _normalize_plainly(
        self, x: Tensor, prior: Moments | None, gain: Tensor | None
    ) -> tuple[Tensor, Moments, Moments]:
        size = group_size(x.shape[0], self.statistics_batch_size)
        observation = exportable.observe_joined(x, size)
        return exportable.apply(x, observation, *self._affine(observation), size, self.eps), observation, observation

    def _averages(self) -> Kind:
        return "sigma"

    def _pool(self, posterior: Groups) -> Moments:
        mean, var, _ = posterior.moments
        sigma = posterior.average(torch.sqrt(var + self.eps))
        return Moments(posterior.average(mean), sigma.square() - self.eps)

    def _updated(self, population: Moments, alpha: Tensor | float) -> Moments:
        assert self.running_mean is not None and self.running_var is not None
        sigma, batch_sigma = (torch.sqrt(var + self.eps) for var in (self.running_var, population.var))
        mean = self.running_mean + alpha * (population.mean - self.running_mean)
        return Moments(mean, ((sigma + alpha * (batch_sigma - sigma)).square() - self.eps).clamp(min=0))

    def _repr_parts(self) -> list[str]:
        return [f"r_max={self.r_max}", f"d_max={self.d_max}"]


class GhostBatchNorm1d(GhostBatchNorm, nn.BatchNorm1d):
    """`GhostBatchNorm` for x of shape (N, C) or (N, C, L)."""

    input_dims = (2, 3)


class GhostBatchNorm2d(GhostBatchNorm, nn.BatchNorm2d):
    """`GhostBatchNorm` for x of shape (N, C, H, W)."""

    input_dims = (4,)


class GhostBatchNorm3d(GhostBatchNorm, nn.BatchNorm3d):
    """`GhostBatchNorm` for x of shape (N, C, D, H, W)."""

    input_dims = (5,)


class BatchRenorm1d(BatchRenorm, nn.BatchNorm1d):
    """`BatchRenorm` for x of shape (N, C) or (N, C, L)."""

    input_dims = (2, 3)


class BatchRenorm2d(BatchRenorm, nn.BatchNorm2d):
    """`BatchRenorm` for x of shape (N, C, H, W)."""

    input_dims = (4,)


class BatchRenorm3d(BatchRenorm, nn.BatchNorm3d):
    """`BatchRenorm` for x of shape (N, C, D, H, W)."""

    input_dims = (5,)
