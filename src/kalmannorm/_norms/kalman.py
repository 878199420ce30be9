"""Batch Kalman Normalization (Wang et al., "Batch Kalman Normalization: Towards Training Deep Neural Networks with
Micro-Batches"): predict a layer's statistics from the layer before, then update them with the mini-batch.

    prior       mean_p = A mean_prev               var_p = (A∘A) var_prev + r
    posterior   mean = p mean_p + q x̄              var = p var_p + q S + p q (x̄ - mean_p)²
    output      y = γ (x - mean) / sqrt(var + eps) + β
"""

from __future__ import annotations

import inspect
import math
import warnings
from typing import Any, Literal, overload
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.fx import Proxy

from kalmannorm._filter import GAIN_MARGIN, gain_of
from kalmannorm._norms.compiled import name_with_settings, normalize_compiled
from kalmannorm._norms.distributed import ProcessGroupChoice
from kalmannorm._norms.grouped import GroupedNorm, Inference, exporting, has_steps_of, recomputing
from kalmannorm._norms.transition import TRANSITIONS, LearnedTransition, give_dimension
from kalmannorm._ops.normalize import exportable
from kalmannorm._support.activation_checkpoints import first_seen, noted
from kalmannorm._support.checks import check_previous, open_unit_interval, positive_int
from kalmannorm._support.compiling import name_of_norm
from kalmannorm._support.tracing import jit_traces, leaf
from kalmannorm.moments import Moments

Transition = Literal["learned", "identity", "weights"]
Covariance = Literal["diagonal", "full"]

# Posteriors of layers under torch.export. They may not be stored on the layers themselves.
_TRACED: WeakKeyDictionary[nn.Module, Moments] = WeakKeyDictionary()


MOST_FADED = 0.999
"""The largest λ by which a prior fades before it is left out. A prior with a weight of 0 would divide 0 by 0."""

SCALES = 1e-2, 1e2
"""Limits of `prior_scale`. A channel beyond them has almost no variance, in the prior or in the data."""


class BatchKalmanNorm(GroupedNorm):
    """Batch norm with a prior from the layer before. The posterior combines prior and observation, and normalizes x.

    Use `BatchKalmanNorm1d`, `2d` or `3d`. Without `prior_features`, or without `previous` in a call, it is batch norm
    on groups of `statistics_batch_size` examples. To chain layers, pass the posterior of one to the next:

        y = self.norm1(self.conv1(x))
        z = self.norm2(self.conv2(y.relu()), self.norm1.posterior)

    If features are concatenated or added, concatenate or add the posteriors too, with
    `kalmannorm.moments.concatenate([a, b])` or `add(a, b)`. With `transition="weights"`, propagate the prior through
    the layers between two norms instead:

        belief = moments.relu(moments.belief(self.norm1.weight, self.norm1.bias))
        prior = moments.convolution(belief, self.conv2.weight, padding=1, input_size=y.shape[2:])
        z = self.norm2(self.conv2(y.relu()), prior)

    Args:
        num_features: channels C of x.
        prior_features: channels P of the layer before. None: there is no layer before, and A, q and r do not exist.
        statistics_batch_size: m, the number of neighbouring examples in a group. None: the whole batch is one group.
            The last group may be smaller. Without a prior, a last group of one value per channel joins the group before
            it.
        transition: "learned" computes the prior from `previous` with A and r. "identity" and "weights" use `previous`
            as the prior itself, so P = C. For "weights" it is a belief, propagated with `kalmannorm.moments`.
        gain: initial q in (0, 1), the weight of the observation. q is learned. A sigmoid keeps it inside (0, 1).
        per_channel_gain: one q per channel instead of one per layer.
        rank: rank of a low-rank A. None: A is dense.
        noise: the Parameter r that layers share, or the `transition` of the layer that owns it. In the second case
            only the owner has r in its state dict. None: this layer gets its own r, initially 1.
        covariance: "full" keeps (G, C, C) covariances. Normalization still uses their diagonal.
        inference: the statistics that `eval()` normalizes with. See `set_inference`.
        total_variance: add the variance of the group means to the running variance, because a fixed normalizer also
            meets this variance. False: the plain moving average of the paper's Algorithm 1.
        momentum: α of the running statistics. None: all values have the same weight.
        observation_momentum: α of the observed statistics, which `example` inference needs. It is larger at first.
        process_group: the ranks whose observations are joined in training. Groups with the same number on all ranks
            form one group. None: this process alone. "world": all processes. Or a ProcessGroup: a deep copy shares
            it, and a pickle contains "world" instead. The layer runs alone if torch.distributed is not initialised,
            in `eval()`, and while it is frozen.
        eps, affine, track_running_stats, device, dtype: as in `torch.nn.BatchNorm2d`. Buffers and filter parameters
            stay float32 (float64 for float64), even with another `dtype` or after `.half()`.
    """

    calibrated: bool = False
    """Whether the prior is scaled by `prior_scale`, (C, 1, 1), and shifted by `prior_shift`, (C,)."""
    prior_scale: Tensor
    prior_shift: Tensor

    def __init__(
        self,
        num_features: int,
        prior_features: int | None = None,
        *,
        statistics_batch_size: int | None = None,
        transition: Transition = "learned",
        gain: float = 0.5,
        per_channel_gain: bool = False,
        rank: int | None = None,
        covariance: Covariance = "diagonal",
        inference: Inference = "population",
        total_variance: bool = True,
        noise: nn.Parameter | LearnedTransition | None = None,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        observation_momentum: float = 0.02,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: ProcessGroupChoice = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if covariance not in ("diagonal", "full"):
            raise ValueError(f"covariance must be 'diagonal' or 'full', got {covariance!r}")
        self.covariance: Covariance = covariance
        super().__init__(
            num_features,
            statistics_batch_size=statistics_batch_size,
            inference=inference,
            total_variance=total_variance,
            eps=eps,
            momentum=momentum,
            observation_momentum=observation_momentum,
            affine=affine,
            track_running_stats=track_running_stats,
            process_group=process_group,
            device=device,
            dtype=dtype,
        )
        if prior_features is not None:
            prior_features = positive_int("prior_features", prior_features)
        self._check_options(prior_features, transition, per_channel_gain, rank, noise)
        self.prior_features = prior_features
        self.initial_gain = open_unit_interval("gain", gain)
        self._missed_previous = False
        self.wire: Any = None  # set by `convert`: gives `previous` and takes the posterior
        self._posterior: Moments | None = None
        self.transition_kind: Transition = transition
        self.transition: LearnedTransition | None = None
        self.gain_logit: nn.Parameter | None = None
        if prior_features is not None:
            like = torch.empty(0, device=device, dtype=dtype)
            self.add_filter(prior_features, per_channel_gain=per_channel_gain, rank=rank, noise=noise, like=like)

    def add_filter(
        self,
        prior_features: int,
        *,
        gain: float | None = None,
        per_channel_gain: bool = False,
        rank: int | None = None,
        noise: nn.Parameter | LearnedTransition | None = None,
        like: Tensor | None = None,
    ) -> None:
        """Add gain and transition to a norm without a prior, for a `previous` with `prior_features` channels.

        They are created on the device of `like`, in float64 if `like` is float64. The default of `like` is γ or the
        running mean.
        """
        self._check_options(prior_features, self.transition_kind, per_channel_gain, rank, noise)
        self.prior_features = prior_features
        if gain is not None:
            self.initial_gain = open_unit_interval("gain", gain)
        if like is None:
            like = next(t for t in (self.weight, self.running_mean, torch.empty(0)) if t is not None)
        device, dtype = like.device, self.filter_dtype(like.dtype)
        size = self.num_features if per_channel_gain else 1  # one dimension, because FSDP cannot divide a number
        self.gain_logit = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self._reset_gain()
        if self.transition_kind == "learned":
            self.transition = LearnedTransition(
                self.num_features, prior_features, rank=rank and int(rank), noise=noise, device=device, dtype=dtype
            )

    def add_calibration(self) -> None:
        """Add the constants that scale and shift the prior of a converted norm, with 1 and 0."""
        if not self.calibrated:
            assert self.gain_logit is not None
            like = self.gain_logit.detach()
            self.register_buffer("prior_scale", like.new_ones(self.num_features, 1, 1))
            self.register_buffer("prior_shift", like.new_zeros(self.num_features))
            self.calibrated = True
            if self.wire is not None:
                self.wire.calibrate()

    @torch.no_grad()
    def calibrate(self, prior: Moments) -> None:
        """Set the constants so that this prior, (1, C), becomes the running statistics."""
        assert self.running_mean is not None and self.running_var is not None
        scale = ((self.running_var + self.eps) / (prior.var[0] + self.eps)).sqrt().clamp(*SCALES)
        self.prior_scale.copy_(scale.view_as(self.prior_scale))
        self.prior_shift.copy_(self.running_mean - scale * prior.mean[0])

    def _check_options(
        self,
        prior_features: int | None,
        transition: str,
        per_channel_gain: bool,
        rank: int | None,
        noise: nn.Parameter | LearnedTransition | None,
    ) -> None:
        if transition not in TRANSITIONS:
            raise ValueError(f"transition must be one of {', '.join(map(repr, TRANSITIONS))}, got {transition!r}")
        if transition != "learned" and prior_features not in (None, self.num_features):
            raise ValueError(
                f"prior_features must equal num_features = {self.num_features} with transition={transition!r}, "
                f"which takes `previous` as the prior itself; got {prior_features}"
            )
        for name, value in (("rank", rank), ("noise", noise)):
            if value is not None and transition != "learned":
                raise ValueError(f"{name} belongs to transition='learned'; transition={transition!r} has no A and no r")
        if rank is not None:
            positive_int("rank", rank)
        if per_channel_gain and self.covariance == "full":
            raise ValueError("per_channel_gain must be False with covariance='full': a full covariance needs one q")
        if noise is not None:
            if isinstance(noise, LearnedTransition):
                return
            if not isinstance(noise, nn.Parameter):
                raise TypeError(
                    "noise must be a torch.nn.Parameter that layers share, or the transition of the layer that owns "
                    f"it, got {type(noise).__name__}"
                )
            if noise.shape not in ((), (1,), (self.num_features,)):
                given = tuple(noise.shape)
                raise ValueError(f"noise must be one number or ({self.num_features},), got shape {given}")

    def check_process_group(self, choice: ProcessGroupChoice) -> None:
        if choice is not None and self.covariance == "full":
            raise ValueError("process_group must be None with covariance='full'; join ranks with covariance='diagonal'")

    def check_closing(self) -> None:
        super().check_closing()
        if self.covariance == "full":
            raise ValueError("a closing phase needs covariance='diagonal', got covariance='full'")

    def check_inference(self, mode: str, statistics_batch_size: int | None = None) -> None:
        super().check_inference(mode, statistics_batch_size)
        if mode == "example" and self.covariance == "full":
            raise ValueError(
                "inference='example' needs covariance='diagonal', got covariance='full'; use the diagonal, or 'batch' "
                "or 'population' inference"
            )

    def reset_parameters(self) -> None:
        """Reset to γ = 1, β = 0, A = 0, r = 1 (for all layers that share r), initial q and statistics."""
        super().reset_parameters()
        if "gain_logit" in self._parameters:  # torch's own __init__ calls this before the filter exists
            self._reset_gain()
        transition = self._modules.get("transition")
        if isinstance(transition, LearnedTransition):
            transition.reset_parameters()
        if self.calibrated:
            nn.init.ones_(self.prior_scale)
            nn.init.zeros_(self.prior_shift)

    def _reset_gain(self) -> None:
        if self.gain_logit is not None:
            share = (self.initial_gain - GAIN_MARGIN) / (1 - 2 * GAIN_MARGIN)
            share = min(max(share, GAIN_MARGIN), 1 - GAIN_MARGIN)
            nn.init.constant_(self.gain_logit, math.log(share / (1 - share)))

    @property
    def gain(self) -> Tensor | None:
        """q in (0, 1), (1,) or (C,), with its gradient. None for a layer without a prior."""
        if self.gain_logit is None:
            return None
        return gain_of(self.gain_logit)

    @property
    def posterior(self) -> Moments | None:
        """The posterior of the last forward, with its gradient. The next forward or `release()` removes it.

        It is never copied, pickled or saved. It keeps the graph of that forward alive. If this matters, for example
        before capturing a CUDA graph, call `release()` after the backward, or use `return_posterior=True`.
        """
        return _TRACED.get(self) if exporting() else self._posterior

    def release(self) -> None:
        """Drop the posterior, and with it the graph of its forward."""
        self._posterior = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name != "__class__":  # it may be no Kalman norm any more
            self._rename(name)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self._rename(name)

    def _rename(self, changed: str) -> None:
        """An attribute has changed. Compiled code knows the norm by a name that contains its settings."""
        own = self.__dict__
        wired = own.get("wire") is not None
        if changed == "wire":
            own["_compiled_number"] = name_of_norm(self) if wired else ""
            own["_compiled_name"] = ""
        if wired and self._matters(changed):
            own["_compiled_name"] = name_with_settings(self, own["_compiled_number"])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        give_dimension(state_dict, prefix + "gain_logit")
        if prefix + "prior_scale" in state_dict and self.wire is not None and self.gain_logit is not None:
            self.add_calibration()
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_posterior": None}
        del state["_compiled_name"], state["_compiled_number"]  # of this object, in this process
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._rename("wire")
        super().__setstate__(state)
        self._rename("wire")

    def _hold(self, posterior: Moments) -> None:
        if exporting():
            # An exported program may not assign attributes, but a later layer may still read the posterior.
            _TRACED[self] = posterior
        else:
            self._posterior = posterior

    @overload
    def forward(
        self,
        x: Tensor,
        previous: Moments | None = ...,
        *,
        return_posterior: Literal[False] = ...,
        residual: Tensor | None = ...,
        relu: bool = ...,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        x: Tensor,
        previous: Moments | None = ...,
        *,
        return_posterior: Literal[True],
        residual: Tensor | None = ...,
        relu: bool = ...,
    ) -> tuple[Tensor, Moments]: ...

    def forward(
        self,
        x: Tensor,
        previous: Moments | None = None,
        *,
        return_posterior: bool = False,
        residual: Tensor | None = None,
        relu: bool = False,
    ) -> Tensor | tuple[Tensor, Moments]:
        """Normalize x (N, C, *).

        `previous` is the posterior of the layer before, (G, P) or (1, P). In `example` inference it is (N, P) or
        (1, P). With another number of rows it is pooled to one row. None: use the observation alone.

        `return_posterior=True` returns (y, posterior) and stores nothing on the layer. Use it with activation
        checkpointing, and to save memory: a stored posterior keeps the graph of its forward alive.

        `residual` is added to the result, and `relu` applies a ReLU, both in the same pass. If either is used, the
        children of `then` are not applied.
        """
        compiled = is_dynamo_compiling()
        if not compiled and type(x) is not Tensor and isinstance(x, Proxy):
            options = {"previous": previous, "return_posterior": return_posterior, "residual": residual, "relu": relu}
            return leaf(self, x, **options)  # type: ignore[no-any-return]
        if self._posterior is not None:
            self.release()
        if previous is None and not return_posterior:
            short: Tensor | None = None
            if compiled:
                short = normalize_compiled(self, x, residual, relu)
            elif self.wire is not None and not torch.compiler.is_compiling():
                short = self.wire.normalize(self, x, residual, relu)
            if short is not None:
                return short
        wired = self.wire is not None and previous is None
        if wired:
            call = self.wire.begin()
            previous = self._previous(call, x) if self._needs_prior() else None
        y, posterior = self._forward(x, previous, residual, relu)
        if wired:  # the relay keeps the posterior, not this layer
            self.wire.deliver(call, posterior)
        y = self._finish(y, residual is not None or relu)
        if return_posterior:
            return y, posterior
        if not wired:
            self._hold(posterior)
        return y

    def _previous(self, call: int, x: Tensor) -> Moments | None:
        if self.training and not self.frozen and jit_traces():
            raise ValueError(
                f"torch.jit.trace of {self._layer_name.name} in training: the trace would keep its prior as a "
                "constant; call model.eval() first, or use torch.compile for training"
            )
        previous: Moments | None = self.wire.previous(call, x)
        return previous

    def takes_short_way(self, predicts: bool = False, settled: bool = False) -> bool:
        diagonal = self.covariance == "diagonal" and (self.transition is not None) == predicts
        alone = self.gain_logit is not None or not self._unused()
        trains = self.training and not self.frozen and not self.reestimates
        return diagonal and alone and trains and self.closes == settled

    def has_usual_steps(self) -> bool:
        return has_steps_of(self, BatchKalmanNorm)

    def _forward_outside_closing(self, x: Tensor, previous: Moments | None, *rest: Any) -> tuple[Tensor, Moments]:
        missed = self._missed_previous
        self._missed_previous = missed or self.runs_faded()  # nobody has to be told that a faded prior is missing
        try:
            return super()._forward_outside_closing(x, previous, *rest)
        finally:
            self._missed_previous = missed

    def runs_faded(self) -> bool:
        """Whether the prior has faded: the norm is settled in a closing phase with `fade_prior`."""
        return self.closes and self.closing.settled and self.closing.fades

    def _needs_prior(self) -> bool:
        """Whether this forward needs a prior."""
        if self.prior_features is None:
            return False
        if (not self.training or self.frozen) and self.inference == "population" and self.running_mean is not None:
            return False
        return self._fading("_needs_prior") != ()

    def _fading(self, reader: str) -> tuple[Tensor, ...] | None:
        """How the prior fades in this forward: (λ,), () if it has faded, None if it does not fade.

        A recomputation fades it as its first forward did. `reader` is the method that asks. It asks once per forward.
        """
        if self.prior_features is None or not self.closes or not self.closing.fades:
            return None
        if recomputing() and not noted((self, reader)):
            return None
        return first_seen((self, reader), self._strength_of_fading)

    def _strength_of_fading(self) -> tuple[Tensor, ...]:
        return () if self.closing.settled else (self.closing.strength,)

    def _predict(self, previous: Moments | None, rows: int) -> tuple[Moments | None, Tensor | None]:
        fading = self._fading("_predict")
        if fading == ():
            return None, None
        if previous is None:
            self._warn_without_previous()
            return None, None
        prior, gain = self._prior_and_gain(previous, rows)
        if gain is not None and fading:
            gain = gain + (1 - gain) * fading[0].clamp(max=MOST_FADED)
        return prior, gain

    def _prior_and_gain(self, previous: Moments, rows: int) -> tuple[Moments, Tensor | None]:
        check_previous(previous, self.prior_features, carried=self.transition is None)
        if previous.mean.shape[0] not in (1, rows):
            previous = previous.pooled()
        if self.transition is None:
            gain = getattr(previous, "gain", None)  # computed together with the prior, for many norms
            return previous, self.gain if gain is None else gain
        full = self.covariance == "full"
        logit = None if full else self.gain_logit
        both = None if logit is None else self.transition.predict_with_gain(previous, logit)
        return both or (self.transition(previous, full), self.gain)

    def _warn_without_previous(self) -> None:
        """Warn once. Without the warning, a forgotten `previous` would look like a filter that never learns."""
        if self.prior_features is None or self._missed_previous or torch.compiler.is_compiling():
            return
        if self.wire is not None and not self.wire.expects:
            return
        self._missed_previous = True
        if self.wire is not None:
            warnings.warn(
                f"kalmannorm: a {type(self).__name__}({self.num_features}), {self._layer_name.name}, ran, but not the "
                "norms that feed it: it normalizes with the batch alone. `kalmannorm.wiring(model)` lists the sources "
                "of every norm. If a model has several paths, give `convert` an example of each: more_examples=[…].",
                UserWarning,
                stacklevel=2,
            )
            return
        warnings.warn(
            f"{type(self).__name__}({self.num_features}, prior_features={self.prior_features}) was called without "
            "`previous`: it normalizes with the batch alone, and its gain and transition do not learn. Pass the "
            "posterior of the layer before, or build the layer without prior_features.",
            UserWarning,
            stacklevel=2,
        )

    def _normalize(
        self, x: Tensor, prior: Moments | None, gain: Tensor | None, residual: Tensor | None, relu: bool
    ) -> tuple[Tensor, Moments, Moments]:
        if self.covariance == "diagonal":
            return super()._normalize(x, prior, gain, residual, relu)
        y, posterior, observation = self._normalize_plainly(x, prior, gain)
        return exportable.finish(y, residual, relu), posterior, observation

    def _normalize_plainly(
        self, x: Tensor, prior: Moments | None, gain: Tensor | None
    ) -> tuple[Tensor, Moments, Moments]:
        if self.covariance == "diagonal":
            return super()._normalize_plainly(x, prior, gain)
        size = self.statistics_batch_size
        return exportable.normalize_full(
            x, prior, gain, self.weight, self.bias, statistics_batch_size=size, eps=self.eps
        )

    def _float32_tensors(self) -> list[Tensor | None]:
        own = [*super()._float32_tensors(), self.gain_logit]
        own += [self.prior_scale, self.prior_shift] if self.calibrated else []
        return own if self.transition is None else [*own, *self.transition.parameters()]

    def _repr_parts(self) -> list[str]:
        if self.prior_features is None:
            return []
        parts = [f"prior_features={self.prior_features}", f"transition={self.transition_kind!r}"]
        return parts + (["covariance='full'"] if self.covariance == "full" else [])


def _document(kind: type[BatchKalmanNorm], shape: str) -> None:
    kind.__doc__ = f"`BatchKalmanNorm` for x of shape {shape}.\n\n{inspect.getdoc(BatchKalmanNorm)}"


class BatchKalmanNorm1d(BatchKalmanNorm, nn.BatchNorm1d):
    input_dims = (2, 3)


class BatchKalmanNorm2d(BatchKalmanNorm, nn.BatchNorm2d):
    input_dims = (4,)


class BatchKalmanNorm3d(BatchKalmanNorm, nn.BatchNorm3d):
    input_dims = (5,)


_document(BatchKalmanNorm1d, "(N, C) or (N, C, L)")
_document(BatchKalmanNorm2d, "(N, C, H, W)")
_document(BatchKalmanNorm3d, "(N, C, D, H, W)")
