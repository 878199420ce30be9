"""The plan of a converted model: a flat list of small steps on moments. It is evaluated when a norm needs its prior.

Steps hold no activations. They read parameters from their modules each time they run. So they need no update after an
optimizer step, `load_state_dict`, `functional_call` or a copy of the model. The list is flat, because residual chains
are deep and nested objects would reach Python's recursion limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kalmannorm import moments as algebra
from kalmannorm._support.pickles import Complete
from kalmannorm._wiring.recording.trace import Ref
from kalmannorm._wiring.weak_modules import WeakModule
from kalmannorm.moments import Moments
from kalmannorm.moments.core import full_precision


@dataclass
class Context:
    """Values that the steps of one evaluation may need."""

    device: torch.device
    dtype: torch.dtype
    posteriors: dict[int, Moments]
    examples: int = 0  # number of examples in the normalized tensor, 0 if there is none


@dataclass
class Step(Complete):
    """One step. `inputs` are the indices of earlier steps; `run` gets their results."""

    inputs: tuple[int, ...] = ()

    def run(self, given: list[Any], context: Context) -> Any:
        raise NotImplementedError

    def join(self, given: list[Tensor]) -> Tensor | None:
        """`run` on moments that are one tensor, (2, G, C): means and variances. None if that is not possible."""
        return None


@dataclass
class NormBelief(Step):
    """N(β, γ²): the belief about a norm's output."""

    norm: WeakModule = field(default_factory=lambda: WeakModule(None))
    channels: int = 0

    def run(self, given: list[Any], context: Context) -> Moments:
        return _belief(self.norm.tensor("weight"), self.norm.tensor("bias"), self.channels, context)


@dataclass
class AffineBelief(Step):
    """N(β, γ²) for a norm of another kind. `parts` says whether each input is its weight γ or its bias β."""

    parts: tuple[str, ...] = ()
    channels: int = 0

    def run(self, given: list[Any], context: Context) -> Moments:
        weight = bias = None
        for part, tensor in zip(self.parts, given, strict=True):
            if part == "weight":
                weight = tensor.reshape(-1)
            else:
                bias = tensor.reshape(-1)
        return _belief(weight, bias, self.channels, context)


@dataclass
class InputBelief(Step):
    """N(0, 1), one entry for every element: the belief about the model's input, which is usually standardized."""

    def run(self, given: list[Any], context: Context) -> Moments:
        return _belief(None, None, 1, context)


def _belief(weight: Any, bias: Any, channels: int, context: Context) -> Moments:
    if weight is None and bias is None:
        mean = torch.zeros(1, channels, device=context.device, dtype=context.dtype)
        return Moments(mean, torch.ones_like(mean))
    return _there(algebra.belief(weight, bias).to(context.dtype), context)


def _there(m: Moments, context: Context) -> Moments:
    """Move moments to the device of the norm that needs them. A large model may use several devices."""
    if m.mean.device == context.device:
        return m
    mean, var, cov = m
    return Moments(mean.to(context.device), var.to(context.device), None if cov is None else cov.to(context.device))


@dataclass
class Posterior(Step):
    """The posterior of a norm in this forward."""

    call: int = 0

    def run(self, given: list[Any], context: Context) -> Moments:
        return _there(context.posteriors[self.call], context)


@dataclass
class Parameter(Step):
    """A parameter or buffer, read from its owner."""

    owner: WeakModule = field(default_factory=lambda: WeakModule(None))
    name: str = ""

    def run(self, given: list[Any], context: Context) -> Any:
        tensor = self.owner.tensor(self.name)
        return tensor if tensor.device == context.device else tensor.to(context.device)


@dataclass
class Constant(Step):
    """An index, or a tensor that the model's code creates from no other tensor. It follows the model to its device."""

    tensor: Tensor = field(default_factory=lambda: torch.empty(0))

    def run(self, given: list[Any], context: Context) -> Tensor:
        if self.tensor.device == context.device:
            return self.tensor
        with torch.inference_mode(False):  # the stored tensor must also work in a training step
            tensor = self.tensor.to(context.device)
        if type(tensor) is Tensor:  # an exporter's fake tensor must not be kept after its trace
            self.tensor = tensor
        return tensor


@dataclass
class Fixed(Step):
    """Moments that depend on parameters alone, computed once. `freeze_priors` replaces other steps by this one."""

    moments: Moments | None = None

    def run(self, given: list[Any], context: Context) -> Moments:
        assert self.moments is not None
        mean, var, _ = self.moments
        return Moments(mean.to(context.device, context.dtype), var.to(context.device, context.dtype))


@dataclass
class Replay(Step):
    """A function of parameters alone, such as a standardized weight, called again.

    Each `Ref` is an index into `inputs`.
    """

    func: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: int | None = None

    def run(self, given: list[Any], context: Context) -> Any:
        assert self.func is not None
        args = [_filled(a, given) for a in self.args]
        kwargs = {name: _filled(a, given) for name, a in self.kwargs.items()}
        out = self.func(*args, **kwargs)
        return out if self.output is None else out[self.output]


def _filled(argument: Any, given: list[Any]) -> Any:
    if isinstance(argument, Ref):
        return given[argument.index]
    if isinstance(argument, (list, tuple)):
        return type(argument)([_filled(a, given) for a in argument])
    return argument


@dataclass
class Static(Step):
    """A tensor computed from parameters, as moments: its values are the mean, the variance is 0."""

    def run(self, given: list[Any], context: Context) -> Moments:
        mean = given[0].to(context.dtype).reshape(1, -1)
        return Moments(mean, torch.zeros_like(mean))


@dataclass
class Apply(Step):
    """A function of `kalmannorm.moments` on the inputs, with options."""

    function: Callable[..., Moments] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, given: list[Any], context: Context) -> Moments:
        assert self.function is not None
        return self.function(*given, **self.options)


@dataclass
class Combine(Step):
    """A sum, difference, product or concatenation. If the numbers of groups differ, each input is pooled to one."""

    function: Callable[..., Moments] | None = None

    def run(self, given: list[Any], context: Context) -> Moments:
        assert self.function is not None
        rows = 1
        for m in given:
            if m.mean.shape[0] != 1:
                if rows not in (1, m.mean.shape[0]):
                    given = [other.pooled() for other in given]
                    break
                rows = m.mean.shape[0]
        return self.function(given) if self.function is algebra.concatenate else self.function(*given)

    def join(self, given: list[Tensor]) -> Tensor | None:
        first, *others = given
        if self.function is algebra.concatenate:
            alike = all(each.shape[:2] == first.shape[:2] for each in others)
            return torch.cat(given, 2) if alike else None
        if self.function is not algebra.add or not all(each.shape == first.shape for each in others):
            return None
        for each in others:
            first = first + each
        return first


@dataclass
class Detach(Step):
    """Stops the gradient of the prior where the model stops a gradient."""

    def join(self, given: list[Tensor]) -> Tensor | None:
        return given[0].detach()

    def run(self, given: list[Any], context: Context) -> Moments:
        mean, var, cov = given[0]
        return Moments(mean.detach(), var.detach(), None if cov is None else cov.detach())


@dataclass
class Slice(Step):
    """A range of neighbouring channels."""

    start: int = 0
    stop: int = 0

    def run(self, given: list[Any], context: Context) -> Moments:
        return algebra.select(given[0], slice(self.start, self.stop))

    def join(self, given: list[Tensor]) -> Tensor | None:
        return given[0][:, :, self.start : self.stop]


@dataclass
class Select(Step):
    """Channels chosen by the index in the second input."""

    def run(self, given: list[Any], context: Context) -> Moments:
        return algebra.select(given[0], given[1])

    def join(self, given: list[Tensor]) -> Tensor | None:
        return given[0][:, :, given[1]]


@dataclass
class Mix(Step):
    """Each channel is a mixture of entries.

    The second input has their indices, (C, n), the third their shares, (C, n).
    """

    def run(self, given: list[Any], context: Context) -> Moments:
        m, index, share = given
        share = share.to(m.mean.dtype)
        parts, spread = m.mean[:, index], m.var[:, index]  # (G, C, n)
        mean = (parts * share).sum(2)
        return Moments(mean, ((spread + (parts - mean.unsqueeze(2)).square()) * share).sum(2))


@dataclass
class WeightedSum(Step):
    """Each channel is a weighted sum of entries.

    The second input has their indices, (C, n). The third has the weights of the means, the fourth those of the
    variances.
    """

    def run(self, given: list[Any], context: Context) -> Moments:
        m, index, weights, spread = given
        mean = (m.mean[:, index] * weights.to(m.mean.dtype)).sum(2)
        return Moments(mean, (m.var[:, index] * spread.to(m.var.dtype)).sum(2))


@dataclass
class Standardized(Step):
    """A norm across many channels: centres and scales by the mean and variance over each group of channels."""

    parts: tuple[str, ...] = ()
    groups: int = 1
    centred: bool = True

    def run(self, given: list[Any], context: Context) -> Moments:
        mean, var = (part.unflatten(1, (self.groups, -1)) for part in (given[0].mean, given[0].var))
        if self.centred:
            mean = mean - mean.mean(2, keepdim=True)
        scale = (mean.square() + var).mean(2, keepdim=True).clamp(min=1e-12).rsqrt()
        m = Moments((mean * scale).flatten(1), (var * scale.square()).flatten(1))
        for part, tensor in zip(self.parts, given[1:], strict=True):
            m = algebra.scale(m, tensor) if part == "weight" else algebra.shift(m, tensor)
        return m


@dataclass
class Softmax(Step):
    """Weights that sum to 1 over n = `size` alternatives: mean 1/n, variance var (1 - 1/n) / n² to first order."""

    size: int = 1

    def run(self, given: list[Any], context: Context) -> Moments:
        n = self.size
        m = given[0]
        return Moments(torch.full_like(m.mean, 1 / n), (m.var * ((1 - 1 / n) / n**2)).clamp(max=(1 - 1 / n) / n))


@dataclass
class Program(Complete):
    """All steps of a model's plan."""

    steps: list[Step] = field(default_factory=list)

    def add(self, step: Step) -> int:
        self.steps.append(step)
        return len(self.steps) - 1

    def constant(self, tensor: Tensor) -> int:
        return self.add(Constant((), tensor))

    def calibrated(self, target: int, norm: WeakModule) -> int:
        """Add a step that scales and shifts the prior of a norm by the norm's constants, one of each per channel.

        A depthwise convolution does this, and bundles know convolutions.
        """
        scale, shift = (self.add(Parameter((), norm, name)) for name in ("prior_scale", "prior_shift"))
        channels = len(norm.tensor("prior_shift"))
        return self.add(Apply((target, scale, shift), algebra.convolution, {"groups": channels}))

    def evaluate(self, target: int, context: Context, memo: dict[int, Any]) -> Moments:
        """The result of a step. `memo` keeps the results of all steps for the norms that run later."""
        if target not in memo:
            with full_precision(context.device):
                self._evaluate(target, context, memo)
        result: Moments = memo[target]
        return result

    def _evaluate(self, target: int, context: Context, memo: dict[int, Any]) -> None:
        pending = [target]
        while pending:
            index = pending[-1]
            if index in memo:
                pending.pop()
                continue
            step = self.steps[index]
            missing = [i for i in step.inputs if i not in memo]
            if missing:
                pending.extend(missing)
                continue
            memo[index] = step.run([memo[i] for i in step.inputs], context)
            pending.pop()

    def join(
        self, target: int, context: Context, posteriors: Mapping[int, Moments | Tensor], memo: dict[int, Tensor]
    ) -> Tensor | None:
        """As `evaluate`, for steps that only combine posteriors: the moments of a step as one tensor, (2, G, C).

        None if a posterior did not arrive or is on another device, or if a step does something else.
        """
        pending = [target]
        while pending:
            index = pending[-1]
            if index in memo:
                pending.pop()
                continue
            step = self.steps[index]
            missing = [i for i in step.inputs if i not in memo]
            if missing:
                pending.extend(missing)
                continue
            if isinstance(step, Posterior):
                found = joined(posteriors.get(step.call))
                if found is not None and (found.device, found.dtype) != (context.device, context.dtype):
                    return None
            elif isinstance(step, Constant):
                found = step.run([], context)
            else:
                found = step.join([memo[i] for i in step.inputs])
            if found is None:
                return None
            memo[index] = found
            pending.pop()
        return memo[target]

    def owned(self) -> list[WeakModule]:
        """The modules whose tensors are read by any step."""
        beliefs = [step.norm for step in self.steps if isinstance(step, NormBelief)]
        return beliefs + [step.owner for step in self.steps if isinstance(step, Parameter)]

    def owners(self, target: int) -> list[WeakModule]:
        """The modules whose parameters a step depends on."""
        norms = [step.norm for step in self.leaves(target, NormBelief) if isinstance(step, NormBelief)]
        return norms + [step.owner for step in self.leaves(target, Parameter) if isinstance(step, Parameter)]

    def needed(self, targets: Iterable[int]) -> list[int]:
        """These steps and all steps that they depend on."""
        seen: set[int] = set()
        pending = list(targets)
        while pending:
            step = pending.pop()
            if step not in seen:
                seen.add(step)
                pending.extend(self.steps[step].inputs)
        return sorted(seen)

    def leaves(self, target: int, kind: type[Step] | tuple[type[Step], ...]) -> list[Step]:
        """The steps of one kind that a step depends on."""
        seen: set[int] = set()
        pending: list[int] = [target]
        found = []
        while pending:
            index = pending.pop()
            if index in seen:
                continue
            seen.add(index)
            if isinstance(self.steps[index], kind):
                found.append(self.steps[index])
            pending.extend(self.steps[index].inputs)
        return found


def joined(posterior: Moments | Tensor | None) -> Tensor | None:
    """A posterior as one tensor, (2, G, C). None if there is none, or if it has a covariance."""
    if posterior is None or isinstance(posterior, Tensor):
        return posterior
    mean, var, cov = posterior
    return torch.stack([mean, var]) if cov is None else None


def parted(posterior: Moments | Tensor) -> Moments:
    """A posterior as mean and variance."""
    return Moments(*posterior.unbind(0)) if isinstance(posterior, Tensor) else posterior


def selected(program: Program, step: int, entries: Tensor, size: int) -> int:
    """Add a step that picks these entries of a belief with `size` entries. All entries in order need no step."""
    entries = entries.reshape(-1)
    start, count = int(entries[0]), entries.numel()
    if torch.equal(entries, torch.arange(start, start + count)):
        return step if (start, count) == (0, size) else program.add(Slice((step,), start, start + count))
    return program.add(Select((step, program.constant(entries))))


def combined(program: Program, function: Callable[..., Moments], steps: Sequence[int]) -> int:
    return program.add(Combine(tuple(steps), function))
