"""GroupedNorm: the base of all norms with per-group statistics.

It contains the training forward, alone or joined with other ranks, three inference modes, and freezing.
`running_statistics.py` updates the running statistics. Subclasses define how a group is normalized.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kalmannorm._groups import group_count, group_size, lone_last, statistics_dtype
from kalmannorm._norms.closing import Affine, Target, corrected, normalize_closing, refuse_transforms
from kalmannorm._norms.closing_state import ClosingState
from kalmannorm._norms.distributed import (
    LayerName,
    ProcessGroupChoice,
    RankGroup,
    Ranks,
    normalize_jointly,
    normalize_with,
    take_part,
    take_part_empty,
)
from kalmannorm._norms.running_statistics import TrackedNorm
from kalmannorm._norms.settled import normalize_settled
from kalmannorm._norms.sync_conversion import notice_conversion
from kalmannorm._ops.dispatch import transformed
from kalmannorm._ops.expect.virtual_group import among_average, expected_of_example
from kalmannorm._ops.normalize import exportable
from kalmannorm._ops.snapshot import snapshot
from kalmannorm._support.activation_checkpoints import first_seen, noted, recompute_id, region
from kalmannorm._support.checks import check_enough_values, check_input, check_number, positive_int
from kalmannorm._support.tracing import jit_traces
from kalmannorm.functional import normalize, observe
from kalmannorm.moments import Moments

Inference = Literal["population", "batch", "example"]
INFERENCE_MODES: tuple[Inference, ...] = ("population", "batch", "example")

# The methods that the short way replaces. A subclass or an object that has its own takes the long way.
_STEPS = {
    "_forward", "_forward_train", "_predict", "_train_alone", "_normalize", "_affine", "_idle",
    "_track_batch", "_tracking_request", "_track", "_pool", "_updated", "_update_statistics",
    "_normalize_closing", "_target", "_settled_closing", "_drawn_to", "_forward_reestimated",
}  # fmt: skip


def recomputing() -> bool:
    """Whether this forward runs inside a backward. Then activation checkpointing recomputes it."""
    return recompute_id() != -1


def exporting() -> bool:
    """Whether `torch.export` or `torch.jit.trace` traces this forward. An exported program stores no state of the norm.

    `torch.compiler.is_exporting` is not used, because dynamo also treats it as True under `torch.compile` (torch 2.10).
    """
    if torch.compiler.is_compiling():
        return not torch.compiler.is_dynamo_compiling()
    return jit_traces()


def plainly() -> bool:
    """Whether inference uses plain operations instead of the op. Exporters know them, and compilers optimize them."""
    return torch.compiler.is_compiling() or jit_traces()


class GroupedNorm(TrackedNorm):
    """Base of the norm layers; see the subclasses. `input_dims` lists the allowed numbers of dimensions of x."""

    input_dims: tuple[int, ...] = ()
    inference_modes: tuple[Inference, ...] = INFERENCE_MODES
    then: tuple[str, ...] = ()
    """Children that are applied to the result, in order. A converted norm class had them after normalizing."""
    rebuilds: bool = False
    """Whether layers may compute its output again in the backward instead of keeping it. `fuse` sets it."""
    example_batch_size: int | None = None
    """m of `example` inference. None: the statistics batch of training."""
    reestimates: bool = False
    """Whether the statistics were reset in a closing phase, as `torch.optim.swa_utils.update_bn` does. Until the next
    forward with gradients the norm cannot be drawn to them: see `_forward_reestimated`."""
    closing: ClosingState
    """The state of a closing phase. It exists if `closes` is true."""
    _layer_name: LayerName = LayerName("a norm", 0)
    """Its name in the converted model, or a description. Errors show it."""

    def __init__(
        self,
        num_features: int,
        *,
        statistics_batch_size: int | None = None,
        inference: Inference = "population",
        total_variance: bool = True,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        observation_momentum: float = 0.02,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: ProcessGroupChoice = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        num_features = positive_int("num_features", num_features)
        if statistics_batch_size is not None:
            statistics_batch_size = positive_int("statistics_batch_size", statistics_batch_size)
        check_number("eps", eps, 0, math.inf)
        check_number("observation_momentum", observation_momentum, 0, 1)
        if momentum is not None:
            check_number("momentum", momentum, 0, 1)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.statistics_batch_size = statistics_batch_size
        self.total_variance = total_variance
        self.observation_momentum = observation_momentum
        self.process_group = process_group
        self._layer_name = LayerName.of(f"a {type(self).__name__}({num_features})")
        self.frozen = False
        self._register_statistics(device, self.filter_dtype(dtype))
        self.inference: Inference = "population"
        self.example_batch_size = None
        self.set_inference(inference)

    @property
    def process_group(self) -> ProcessGroupChoice:
        """The ranks whose observations are joined in training: None, "world" or a ProcessGroup."""
        return self._ranks.choice

    @process_group.setter
    def process_group(self, choice: ProcessGroupChoice) -> None:
        self.check_process_group(choice)
        self._ranks = Ranks(choice)

    def check_process_group(self, choice: ProcessGroupChoice) -> None:
        """Raise if this norm cannot join the observations of ranks."""

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        notice_conversion(self)
        return super().named_children()

    def set_inference(self, mode: Inference, *, statistics_batch_size: int | None = None) -> None:
        """Choose the statistics that `eval()` normalizes with: "population", "batch" or "example".

        `statistics_batch_size` is m of `example` inference. Training does not change. The layer keeps the number until
        another one is given. None: the number that was given before, or else the layer's own `statistics_batch_size`.
        """
        self.check_inference(mode, statistics_batch_size)
        if statistics_batch_size is not None:
            self.example_batch_size = positive_int("statistics_batch_size", statistics_batch_size)
        self.inference = mode

    def check_inference(self, mode: str, statistics_batch_size: int | None = None) -> None:
        """Raise if this norm cannot use the mode."""
        if mode not in self.inference_modes:
            choices = ", ".join(repr(choice) for choice in self.inference_modes)
            family = type(self).__name__.removesuffix("d").rstrip("123")  # `convert` checks one class for 1d, 2d and 3d
            raise ValueError(f"inference of {family} must be one of {choices}, got {mode!r}")
        if statistics_batch_size is not None:
            positive_int("statistics_batch_size", statistics_batch_size)
            if mode != "example":
                raise ValueError(
                    f"statistics_batch_size must be None for inference={mode!r}, got {statistics_batch_size}; only "
                    "'example' uses it"
                )
        if mode == "example":
            if statistics_batch_size is None and self._example_size() is None:
                raise ValueError(
                    "inference='example' needs the statistics batch of training: got statistics_batch_size=None; "
                    "after training in batches of m examples call kalmannorm.set_inference(model, 'example', "
                    "statistics_batch_size=m), or build the layer with statistics_batch_size=m"
                )
            if self.running_mean is None:
                raise ValueError("inference='example' needs running statistics: got track_running_stats=False")

    def _example_size(self) -> int | None:
        """m of `example` inference."""
        return self.statistics_batch_size if self.example_batch_size is None else self.example_batch_size

    def begin_closing(self) -> None:
        """Add the state of a closing phase, with strength 0. See `ClosingPhase`."""
        if not self.closes:
            like = self.running_mean
            assert like is not None
            self.closing = ClosingState(self.num_features, like.device, like.dtype)
            self.closes = True

    def settle_closing(self, settled: bool, present: float | None = None, fades: bool | None = None) -> None:
        """Say whether the strength λ is 1, set κ, and say whether priors fade.

        At λ = 1 the norm runs another way: see `_norms/settled.py`.
        """
        closing = self.closing
        present = closing.present if present is None else present
        fades = closing.fades if fades is None else fades
        if (closing.settled, closing.present, closing.fades) != (settled, present, fades):
            self._expire()
            closing.settled, closing.present = settled, present
            if closing.fades != fades:
                closing.set_fades(fades)

    def runs_settled(self) -> bool:
        """Whether a training forward normalizes with running statistics alone."""
        return self.closes and self.closing.settled and not self.closing.present

    def end_closing(self) -> None:
        """Remove the state of a closing phase."""
        if self.closes:
            self.closes = False
            del self.closing

    def forget_gradients(self) -> None:
        """In a closing phase: forget what backwards have collected since the last step."""
        if self.closes and self.closing.probe.grad is not None:
            self.closing.probe.grad.zero_()

    def check_closing(self) -> None:
        """Raise if this norm cannot have a closing phase."""
        if not self.track_running_stats:
            raise ValueError("a closing phase needs running statistics: got track_running_stats=False")

    def _forward(
        self, x: Tensor, previous: Moments | None, residual: Tensor | None = None, relu: bool = False
    ) -> tuple[Tensor, Moments]:
        """Output and posterior. If the residual has the shape and dtype of x, the op adds it and applies the ReLU."""
        joins = self._ranks.choice is not None
        if isinstance(x, Tensor) and x.dim() in self.input_dims and (x.numel() if joins else x.shape[0]) == 0:
            rank_group = self._joined_ranks()
            if rank_group is not None:
                self._check_input_dim(x)
                take_part_empty(x, self.statistics_batch_size, rank_group)
            elif x.shape[0] == 0:
                y, posterior = self._forward_empty(x)
                return exportable.finish(y, residual, relu), posterior
        check_input(x)
        self._check_input_dim(x)
        alike = residual is None or (isinstance(residual, Tensor) and _alike(residual, x))
        if self.training and not self.frozen:
            train = self._forward_reestimated if self.reestimates else self._forward_train
            if alike:
                return train(x, previous, residual, relu)
            y, posterior = train(x, previous)
        elif self.running_mean is not None and self.inference == "population":
            y, posterior = self._forward_population(x)
        else:
            single = self.running_mean is not None and self.inference == "example"
            infer = self._forward_example if single else self._forward_batch
            if alike and not plainly():
                return infer(x, previous, residual, relu)
            y, posterior = infer(x, previous)
        # y is a new tensor, so it may be overwritten. Transforms and compilers need out-of-place operations.
        own = alike and not torch.compiler.is_compiling() and not transformed()
        return (_finish_in_place if own else exportable.finish)(y, residual, relu), posterior

    def takes_short_way(self, predicts: bool = False, settled: bool = False) -> bool:
        """Whether a training forward only normalizes with the rows of a bundle and tracks (`_running/short_way.py`).

        `predicts`: it also computes its prior from a posterior, with a learned transition. `settled`: it is at the end
        of a closing phase, and normalizes with running statistics. Most classes never take the short way.
        """
        return False

    def has_usual_steps(self) -> bool:
        """Whether the short way knows all methods of a training forward. Most classes have their own."""
        return False

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}closing.strength" in state_dict:
            self.begin_closing()  # its state is loaded next
            strength = state_dict[f"{prefix}closing.strength"]
            known = type(strength) is Tensor and not strength.is_meta
            settled = float(strength) == 1 if known else self.closing.settled
            self.settle_closing(settled, fades=f"{prefix}closing.fading" in state_dict)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _float32_tensors(self) -> list[Tensor | None]:
        own = super()._float32_tensors()
        return [*own, *self.closing.saved().values(), self.closing.scale] if self.closes else own

    def _joined_ranks(self) -> RankGroup | None:
        """The ranks that wait for this rank's observation. None if it runs alone."""
        group = self._ranks.group() if self.training and not self.frozen else None
        return None if group is None else RankGroup(group, self._layer_name)

    def _forward_empty(self, x: Tensor) -> tuple[Tensor, Moments]:
        """Forward without examples, as in a head without proposals.

        Statistics are not updated, and all parameters get a gradient of 0.
        """
        self._check_input_dim(x)
        y = F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        mean, var = self.running_mean, self.running_var
        if mean is None or var is None:
            mean = torch.zeros(self.num_features, device=x.device)
            var = torch.ones_like(mean)
        posterior = Moments(mean.detach().clone().unsqueeze(0), var.detach().clone().unsqueeze(0))
        return take_part(y, self._idle(None)), posterior.to(statistics_dtype(x))

    def _finish(self, y: Tensor, done: bool = False) -> Tensor:
        """Apply the children of `then` to y. `done`: a residual or a ReLU in the pass replaced them."""
        for name in () if done else self.then:
            y = getattr(self, name)(y)
        return y

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() not in self.input_dims:
            ranks = " or ".join(f"{rank}D" for rank in self.input_dims)
            raise ValueError(f"x must be {ranks} for {type(self).__name__}, got shape {tuple(input.shape)}")
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"x must have num_features = {self.num_features} channels, got {input.shape[1]} "
                f"in shape {tuple(input.shape)}"
            )

    def _predict(self, previous: Moments | None, rows: int) -> tuple[Moments | None, Tensor | None]:
        """The prior, (rows, C) or (1, C), and the gain. This class has none."""
        return None, None

    def _idle(self, prior: Moments | None) -> list[Tensor]:
        """Parameters that this forward does not use. DDP would wait for them. Without a prior: all but γ and β."""
        return [] if prior is not None or not torch.is_grad_enabled() or exporting() else self._unused()

    def _unused(self) -> list[Tensor]:
        """The parameters that a forward without a prior does not use."""
        asked = {"weight", "bias", *self.then}
        if self._parameters.keys() <= asked and self._modules.keys() <= asked:
            return []  # a tracer needs long for all names
        return [p for name, p in self.named_parameters() if p.requires_grad and name.split(".")[0] not in asked]

    def _affine(self, observation: Moments) -> tuple[Tensor | None, Tensor | None]:
        """γ and β, (C,) or (G, C), for groups with this observation."""
        return self.weight, self.bias

    def _forward_train(
        self, x: Tensor, previous: Moments | None, residual: Tensor | None = None, relu: bool = False
    ) -> tuple[Tensor, Moments]:
        prior, gain = self._predict(previous, self._groups(x))
        rank_group = self._joined_ranks()
        if rank_group is None:
            y, posterior = self._train_alone(x, prior, gain, residual, relu)
        else:
            y, posterior = self._train_jointly(x, prior, gain, rank_group)
            y = exportable.finish(y, residual, relu)
        return take_part(y, self._idle(prior)), posterior

    def reset_running_stats(self) -> None:
        super().reset_running_stats()
        if self.closes:
            self.reestimates = True

    def _forward_reestimated(
        self, x: Tensor, previous: Moments | None, residual: Tensor | None = None, relu: bool = False
    ) -> tuple[Tensor, Moments]:
        """A training forward of a norm in its closing phase whose statistics were reset, to estimate them again."""
        if torch.is_grad_enabled():
            self.reestimates = False
            return self._forward_train(x, previous, residual, relu)
        return self._forward_outside_closing(x, previous, residual, relu)

    def _forward_outside_closing(
        self, x: Tensor, previous: Moments | None, residual: Tensor | None = None, relu: bool = False
    ) -> tuple[Tensor, Moments]:
        """A training forward that is not drawn to the running statistics, because these are estimated from it.

        A settled norm trained with fixed statistics. Those of the whole batch are nearest to that, and each norm then
        sees its input as the norms before it will produce it. The pooled statistics do not depend on the groups. One
        value per channel has no variance. Then the running statistics are used, as in training.
        """
        whole = self.closing.settled and self.total_variance
        if whole and x.numel() <= x.shape[1]:
            return self._forward_train(x, previous, residual, relu)
        size = self.statistics_batch_size
        self.closes, self.statistics_batch_size = False, None if whole else size
        try:
            return self._forward_train(x, previous, residual, relu)
        finally:
            self.closes, self.statistics_batch_size = True, size

    def _train_alone(
        self, x: Tensor, prior: Moments | None, gain: Tensor | None, residual: Tensor | None, relu: bool
    ) -> tuple[Tensor, Moments]:
        if prior is None and not (self.closes and self.closing.settled):  # λ = 1 needs no variance of a group
            check_enough_values(x, self.statistics_batch_size, self)
        y, posterior, observation = self._normalize(x, prior, gain, residual, relu)
        if self.track_running_stats and not recomputing():
            self._track_batch(posterior, observation, x, group_size(x.shape[0], self.statistics_batch_size))
        return y, posterior

    def _train_jointly(
        self, x: Tensor, prior: Moments | None, gain: Tensor | None, rank_group: RankGroup
    ) -> tuple[Tensor, Moments]:
        size = self.statistics_batch_size
        apply = self._apply_corrected if self._is_closing() else self._apply_posterior
        y, posterior, joint = normalize_jointly(
            x, prior, gain, apply, statistics_batch_size=size, rank_group=rank_group
        )
        if self.track_running_stats and not recomputing():
            if self.wire is not None and not (self.compiles_alone and torch.compiler.is_compiling()):
                self.wire.track_first_run()
            with torch.no_grad():
                seen = joint.observation()
                self._track(seen if prior is None else joint.posterior(posterior), seen, joint.values())
        return y, posterior

    def _normalize(
        self, x: Tensor, prior: Moments | None, gain: Tensor | None, residual: Tensor | None, relu: bool
    ) -> tuple[Tensor, Moments, Moments]:
        # A prior may carry the same γ and β. Using them adds up both of their gradients in one place.
        weight, bias = getattr(prior, "affine", (None, None))
        weight, bias = self.weight if weight is None else weight, self.bias if bias is None else bias
        if self._is_closing():
            return self._normalize_closing(x, prior, gain, (weight, bias), residual, relu)
        return normalize(
            x, prior, gain, weight, bias, statistics_batch_size=self.statistics_batch_size, eps=self.eps,
            residual=residual, relu=relu, region=self._region(),
        )  # fmt: skip

    def _region(self) -> Any:
        """Where the output may be computed again: see `functional.normalize`."""
        return region() if self.rebuilds and not torch.compiler.is_compiling() else None

    def _apply_posterior(self, x: Tensor, posterior: Moments, observation: Moments) -> Tensor:
        """Normalize with a posterior that was computed elsewhere."""
        size = self.statistics_batch_size
        return normalize_with(x, posterior, *self._affine(observation), statistics_batch_size=size, eps=self.eps)

    def _is_closing(self) -> bool:
        """Whether this forward is one of a closing phase. Inference is none. A recomputation is one if its first
        forward was."""
        return self.closes and self.training and not self.frozen and (not recomputing() or noted(self))

    def _normalize_closing(
        self,
        x: Tensor,
        prior: Moments | None,
        gain: Tensor | None,
        affine: Affine,
        residual: Tensor | None,
        relu: bool,
    ) -> tuple[Tensor, Moments, Moments]:
        """`_normalize` in the closing phase."""
        size = self.statistics_batch_size
        if prior is None and lone_last(x, group_size(x.shape[0], size)):  # the op has no groups of m + 1 examples
            seen = observe(x, size, join_last=True)
            return exportable.finish(self._apply_corrected(x, seen, seen, affine), residual, relu), seen, seen
        refuse_transforms()
        target = self._target(self._settled_closing)
        return (normalize_settled if target.strength is None else normalize_closing)(
            x, prior, gain, affine, target, self.closing.probe,
            statistics_batch_size=size, eps=self.eps, residual=residual, relu=relu,
        )  # fmt: skip

    def _apply_corrected(
        self, x: Tensor, posterior: Moments, observation: Moments, affine: Affine | None = None
    ) -> Tensor:
        """`_apply_posterior` in the closing phase."""
        refuse_transforms()
        given = (self.weight, self.bias) if affine is None else affine
        size = group_size(x.shape[0], self.statistics_batch_size)
        target = self._target(self._drawn_to)
        moments, *rows = corrected(posterior, given, target, self.closing.probe, eps=self.eps, x=x, size=size)
        return normalize_with(x, moments, *rows, statistics_batch_size=self.statistics_batch_size, eps=self.eps)

    def _target(self, read: Callable[[], tuple[Tensor, ...]]) -> Target:
        # This forward updates the statistics. Its recomputation must read the old values. It also runs the same way,
        # because a settled norm has no strength among them.
        if self.wire is not None and not torch.compiler.is_compiling() and not recomputing():
            self.wire.track_before_reading(self.running_mean)
        mean, var, averages, *strength = snapshot(first_seen(self, read))
        return Target(mean, var, averages, strength[0] if strength else None, self.closing.present)

    def _drawn_to(self) -> tuple[Tensor, ...]:
        assert self.running_mean is not None and self.running_var is not None
        closing = self.closing
        return self.running_mean, self.running_var, closing.averages * closing.scale, closing.strength

    def _settled_closing(self) -> tuple[Tensor, ...]:
        """As `_drawn_to`. Without the strength if the norm is settled and needs no sums of the present forward."""
        drawn_to = self._drawn_to()
        return drawn_to[:3] if self.closing.settled and not self.closing.present else drawn_to

    def _forward_population(self, x: Tensor) -> tuple[Tensor, Moments]:
        dtype = statistics_dtype(x)
        mean, var, weight, bias = (
            None if t is None else t.to(dtype) for t in (self.running_mean, self.running_var, self.weight, self.bias)
        )
        assert mean is not None and var is not None
        if torch.is_grad_enabled() and not exporting():
            # DDP may overwrite its buffers before the backward, which still needs these values.
            mean, var = mean.clone(), var.clone()
        idle = self._idle(None)
        if bias is not None:
            bias, idle = take_part(bias, idle), []  # adding to a row is cheaper than adding to y
        y = take_part(F.batch_norm(x, mean, var, weight, bias, False, 0.0, self.eps), idle)
        return y, Moments(mean.unsqueeze(0), var.unsqueeze(0))

    def _forward_batch(
        self, x: Tensor, previous: Moments | None, residual: Tensor | None = None, relu: bool = False
    ) -> tuple[Tensor, Moments]:
        prior, gain = self._predict(previous, self._groups(x))
        if prior is None and not exporting():
            check_enough_values(x, self.statistics_batch_size, self)
        if plainly():
            y, posterior, _ = self._normalize_plainly(x, prior, gain)
        else:
            y, posterior, _ = self._normalize(x, prior, gain, residual, relu)
        return take_part(y, self._idle(prior)), posterior

    def _normalize_plainly(
        self, x: Tensor, prior: Moments | None, gain: Tensor | None
    ) -> tuple[Tensor, Moments, Moments]:
        """`_normalize` in operations that every exporter knows."""
        size = self.statistics_batch_size
        return exportable.normalize(x, prior, gain, self.weight, self.bias, statistics_batch_size=size, eps=self.eps)

    def _forward_example(
        self, x: Tensor, previous: Moments | None, residual: Tensor | None = None, relu: bool = False
    ) -> tuple[Tensor, Moments]:
        self.check_inference("example")
        prior, gain = self._predict(previous, x.shape[0])
        size = self._example_size()
        if prior is None and size == 1:
            check_enough_values(x, 1, self)
        assert self.observed_mean is not None and self.observed_var is not None
        assert size is not None
        average = Moments(self.observed_mean, self.observed_var).to(statistics_dtype(x))
        if plainly():
            observation = among_average(exportable.observe_examples(x), average, size)
            posterior = exportable.posterior_of(prior, observation, gain)
            y = exportable.apply(x, posterior, self.weight, self.bias, 1, self.eps)
        else:
            if torch.is_grad_enabled():  # DDP may overwrite its buffers before the backward
                average = Moments(average.mean.clone(), average.var.clone())
            expected, trust = expected_of_example(prior, gain, average, size)
            y, posterior, _ = normalize(
                x, expected, trust, self.weight, self.bias,
                statistics_batch_size=1, eps=self.eps, residual=residual, relu=relu,
            )  # fmt: skip
        return take_part(y, self._idle(prior)), posterior

    def _groups(self, x: Tensor) -> int:
        return group_count(x.shape[0], group_size(x.shape[0], self.statistics_batch_size))

    def extra_repr(self) -> str:
        parts = [str(self.num_features), f"statistics_batch_size={self.statistics_batch_size}"]
        parts += self._repr_parts()
        parts.append(f"inference={self.inference!r}")
        if self.example_batch_size is not None:
            parts.append(f"example_batch_size={self.example_batch_size}")
        parts += [f"eps={self.eps}", f"momentum={self.momentum}"]
        parts += [
            f"{name}=False" for name in ("affine", "track_running_stats", "total_variance") if not getattr(self, name)
        ]
        if self.process_group is not None:
            parts.append("process_group=" + ("'world'" if self.process_group == "world" else "ProcessGroup"))
        return ", ".join(parts + (["frozen"] if self.frozen else []))

    def _repr_parts(self) -> list[str]:
        return []


def has_steps_of(norm: GroupedNorm, kind: type[GroupedNorm]) -> bool:
    """Whether a training forward consists of the methods of this class, not of a subclass or of the object."""
    own = (getattr(type(norm), name) is getattr(kind, name) for name in _STEPS)
    return not _STEPS & vars(norm).keys() and all(own)


def _alike(residual: Tensor, x: Tensor) -> bool:
    return residual.shape == x.shape and residual.dtype == x.dtype and residual.device == x.device


def _finish_in_place(y: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    y = y if residual is None else y.add_(residual)
    return y.relu_() if relu else y
