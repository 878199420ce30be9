"""Moving Average Batch Normalization (Yan et al., "Towards Stabilizing Batch Statistics in Backward Propagation of
Batch Normalization", 2020), a baseline for comparisons. With the mean square x̄² of a group and K = real batch / m:

    forward   v = average of x̄² over this group and the K - 1 groups before it      ρ = 1 / sqrt(v + eps)
              r = clip(1 / (ρ σ), 1/5, 5)        σ² = running second moment + eps; in the first 99 forwards r = 1
              z = ρ x                            y = γ r z + β
    backward  g = γ r dL/dy                      c = average of the means of g z over the same K groups
              dx = ρ (g - c z)

Nothing is subtracted in the forward. The weights of the convolutions are centred instead (`computed_weights.py`). Until
K groups have been seen, and in the first forward, a group uses its own v and c. Groups of a batch follow each other, as
micro-batches do, and the window also contains the last groups of the batch before. The running second moment follows
the average of v over groups, once per forward. So the population statistics are a running variance, and a mean of 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.fx import Proxy

from kalmannorm._norms.distributed import ProcessGroupChoice
from kalmannorm._norms.grouped import GroupedNorm, Inference, recomputing
from kalmannorm._ops.dispatch import moving_kernels_for, on_device_of, transformed
from kalmannorm._ops.moving.arguments import History, Rows, Settings
from kalmannorm._ops.normalize import exportable
from kalmannorm._ops.normalize.registered import dense, memory_format_of, watched
from kalmannorm._ops.snapshot import snapshot
from kalmannorm._ops.track.request import Kind
from kalmannorm._support.activation_checkpoints import first_seen
from kalmannorm._support.checks import positive_int
from kalmannorm._support.tracing import leaf
from kalmannorm.functional import observe
from kalmannorm.moments import Moments


class MovingAverageBatchNorm(GroupedNorm):
    """Moving Average Batch Normalization on groups of `statistics_batch_size` examples, with `population` inference.

    Args:
        real_batch_size: the batch that it imitates. Statistics are averages over `real_batch_size //
            statistics_batch_size` groups, at least one. Without a statistics batch each batch uses its own.
        warmup_steps: the forward from which r corrects.
        momentum: that of the running second moment, 0.02 in the paper. The first batch sets it.

    It fits layers whose output has a mean of 0, which `convert(model, to="moving-average")` makes of convolutions. It
    has no closing phase, because its statistics are moving averages from the start. The units of the averaged gradients
    are those of the loss: do not change a loss scale. Each rank has averages of its own.
    Other arguments are those of `BatchKalmanNorm`.
    """

    inference_modes: tuple[Inference, ...] = ("population",)
    past_squares: Tensor
    """x̄² of the last K - 1 groups."""
    past_gradients: Tensor
    """The means of g z in these groups."""
    groups_seen: Tensor

    def __init__(
        self,
        num_features: int,
        *,
        statistics_batch_size: int | None = None,
        real_batch_size: int = 32,
        warmup_steps: int = 100,
        inference: Inference = "population",
        eps: float = 1e-5,
        momentum: float | None = 0.02,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: ProcessGroupChoice = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not track_running_stats:
            raise ValueError("track_running_stats must be True: moving averages are what this norm uses")
        self.real_batch_size = positive_int("real_batch_size", real_batch_size)
        self.warmup_steps = positive_int("warmup_steps", warmup_steps)
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
        self.window = max(self.real_batch_size // statistics_batch_size, 1) if statistics_batch_size else 1
        like = torch.zeros(self.window - 1, num_features, device=device, dtype=self.filter_dtype(dtype))
        self.register_buffer("past_squares", like)
        self.register_buffer("past_gradients", like.clone())
        self.register_buffer("groups_seen", torch.zeros((), device=device, dtype=torch.long))

    def forward(self, x: Tensor, *, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Normalize x. `residual` and `relu` are those of `BatchKalmanNorm`."""
        if type(x) is not Tensor and isinstance(x, Proxy):
            return leaf(self, x, residual=residual, relu=relu)  # type: ignore[no-any-return]
        return self._finish(self._forward(x, None, residual, relu)[0], residual is not None or relu)

    def check_closing(self) -> None:
        raise ValueError("MovingAverageBatchNorm uses moving averages from the start, and has no closing phase")

    def check_process_group(self, choice: ProcessGroupChoice) -> None:
        if choice is not None:
            raise ValueError(f"process_group must be None: each rank has moving averages of its own, got {choice!r}")

    def take_batchnorm(self) -> None:
        """Make the statistics of a batch norm, which this norm has got, statistics of its own: nothing is subtracted.

        The function of a trained network changes here, because centred weights change it too.
        """
        assert self.running_mean is not None and self.running_var is not None
        self.running_var.add_(self.running_mean.square())
        self.running_mean.zero_()

    def reset_running_stats(self) -> None:
        super().reset_running_stats()
        for name in ("past_squares", "past_gradients", "groups_seen"):
            if name in self._buffers:  # they do not exist yet while torch's own __init__ runs
                getattr(self, name).zero_()

    def _normalize(
        self, x: Tensor, prior: Moments | None, gain: Tensor | None, residual: Tensor | None, relu: bool
    ) -> tuple[Tensor, Moments, Moments]:
        if transformed():
            raise RuntimeError("MovingAverageBatchNorm has a backward that torch.func cannot transform; call eval()")
        size = self.statistics_batch_size
        settings = Settings(size or 0, self.eps, self.warmup_steps)
        x = dense(x)
        with torch.no_grad():
            seen = observe(x, size, join_last=False)
            # This forward changes what it reads. Its recomputation must read the old values.
            history = History(*snapshot(first_seen(self, self._history)))
            kernels = moving_kernels_for(x, settings.size, *history[:2], self.past_gradients)
        y, mean, moving = _Normalized.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, kernels, seen, history, self.past_gradients, settings
        )
        if not recomputing() and "_track" not in vars(self):  # `recalibrate` replaces `_track`
            with torch.no_grad(), on_device_of(x):
                kernels.append(self.past_squares, self.groups_seen, seen)
        moments = Moments(mean, moving)
        return exportable.finish(y, residual, relu), moments, moments

    def _history(self) -> tuple[Tensor, ...]:
        running, batches = self.running_var, self.num_batches_tracked
        assert running is not None and batches is not None
        return self.past_squares, running, self.groups_seen, batches

    def _averages(self) -> Kind:
        return "first"

    def _updated(self, population: Moments, alpha: Tensor | float) -> Moments:
        assert self.num_batches_tracked is not None and self.running_mean is not None
        first = (self.num_batches_tracked == 0).to(self.running_mean.dtype)
        return super()._updated(population, first + (1 - first) * alpha)

    def _float32_tensors(self) -> list[Tensor | None]:
        return [*super()._float32_tensors(), self.past_squares, self.past_gradients]

    def _repr_parts(self) -> list[str]:
        return [f"real_batch_size={self.real_batch_size}"]


class _Normalized(torch.autograd.Function):
    """y, and the rows of the posterior, with the gradient of the definition. The backward changes `past`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, kernels: Any, seen: Moments, history: History,
        past: Tensor, settings: Settings,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        with on_device_of(x):
            y, rows = kernels.forward(x, weight, bias, seen, history, settings)
        ctx.save_for_backward(x, weight, bias, *rows)
        ctx.kernels, ctx.past, ctx.settings = kernels, past, settings
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(rows.mean, rows.moving)
        return y, rows.mean, rows.moving

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 8
        x, weight, bias, *rows = ctx.saved_tensors
        kernels = moving_kernels_for(x, ctx.settings.size, ctx.past) if watched(x) else ctx.kernels
        grad = grad.contiguous(memory_format=memory_format_of(x))
        with on_device_of(x):
            found = kernels.backward(grad, x, weight, bias, Rows(*rows), ctx.past, ctx.settings)
        return *found, None, None, None, None, None


class MovingAverageBatchNorm1d(MovingAverageBatchNorm, nn.BatchNorm1d):
    """`MovingAverageBatchNorm` for x of shape (N, C) or (N, C, L)."""

    input_dims = (2, 3)


class MovingAverageBatchNorm2d(MovingAverageBatchNorm, nn.BatchNorm2d):
    """`MovingAverageBatchNorm` for x of shape (N, C, H, W)."""

    input_dims = (4,)


class MovingAverageBatchNorm3d(MovingAverageBatchNorm, nn.BatchNorm3d):
    """`MovingAverageBatchNorm` for x of shape (N, C, D, H, W)."""

    input_dims = (5,)
