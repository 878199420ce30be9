"""The checks of `families.py` for one model: the sources of norms, training steps, and the quality of priors.

The oracle does not use the tracer. Every norm's output is cut off from the graph before it. Norm j feeds norm k if a
random projection of k's input has a non-zero gradient with respect to j's output.
"""

from __future__ import annotations

import copy
import statistics
from collections import Counter
from typing import Any, NamedTuple

import torch
from family_models import norms_of
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import kalmannorm
from kalmannorm._norms.kalman import BatchKalmanNorm

SIGNAL = 10
"""A correlation counts if the variance of observed means over channels is this many times their own variance."""


def _randomised(model: nn.Module) -> nn.Module:
    """A copy in float64 in which nothing is zero, saturated or tiny."""
    model = copy.deepcopy(model).double()
    generator = torch.Generator(next(model.parameters()).device).manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(0, p[0].numel() ** -0.5, generator=generator)
            elif name.endswith("bias"):
                p.normal_(0, 0.1, generator=generator)
            else:
                p.uniform_(0.5, 1.5, generator=generator)
    return model


class _Oracle:
    """Replaces the forward of every norm, and computes gradients as soon as it gets an input."""

    def __init__(self, model: nn.Module) -> None:
        self.feeds: dict[str, list[str]] = {}
        self.leaves: list[tuple[str, Tensor]] = []
        for name, norm in norms_of(model).items():
            norm.forward = self._replacing(name, norm)  # type: ignore[method-assign]

    def _replacing(self, name: str, norm: Any) -> Any:
        def forward(x: Tensor) -> Tensor:
            self._ask(name, x)
            y = self._normalized(x.detach(), norm).requires_grad_()
            self.leaves.append((name, y))
            y = y.clone()  # for activations that write in place
            for child in ("drop", "act") if hasattr(norm, "act") else ():
                y = getattr(norm, child)(y)
            return y

        return forward

    def _normalized(self, x: Tensor, norm: Any) -> Tensor:
        axes = [axis for axis in range(x.dim()) if axis != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        var, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
        y = (x - mean) * (var + norm.eps).rsqrt()
        return y if norm.weight is None else y * norm.weight.detach().view(shape) + norm.bias.detach().view(shape)

    def _ask(self, name: str, x: Tensor) -> None:
        found = self.feeds.setdefault(name, [])
        if not x.requires_grad:
            return
        projection = torch.randn_like(x)
        leaves = [leaf for _, leaf in self.leaves]
        if not leaves:
            return
        gradients = torch.autograd.grad((x * projection).sum(), leaves, retain_graph=True, allow_unused=True)
        for (source, _), gradient in zip(self.leaves, gradients, strict=True):
            if gradient is not None and bool(gradient.any()) and source not in found:
                found.append(source)


def fed_by(model: nn.Module, x: Tensor) -> dict[str, set[str]]:
    """For every norm that runs, the norms that feed it in eval, or in training if it does not run in eval."""
    feeds: dict[str, set[str]] = {}
    everything = set(norms_of(model))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for training in (False, True):
            if everything <= set(feeds):
                break
            run = _randomised(model).train(training)
            for p in run.parameters():
                p.requires_grad_(False)
            oracle = _Oracle(run)
            run(x.double())
            for name, sources in oracle.feeds.items():
                feeds.setdefault(name, set(sources))
    return feeds


def differences(expected: dict[str, set[str]], wiring: kalmannorm.Wiring) -> list[str]:
    """The norms whose sources in the report differ from the oracle's, one line for each norm."""
    found = []
    for norm in wiring.norms:
        truth, told = expected.get(norm.name, set()), set(norm.sources)
        if truth != told:
            found.append(f"{norm.name}: missing {sorted(truth - told)}, too many {sorted(told - truth)}")
    return found


def step_faults(model: nn.Module, x: Tensor) -> list[str]:
    """One training step of a converted model: non-finite values, and parameters of wired norms without gradient."""
    torch.manual_seed(0)
    model.train()
    model.zero_grad(set_to_none=True)
    outputs = [t for t in tree_flatten(model(x))[0] if isinstance(t, Tensor)]
    loss = sum((t * torch.randn_like(t)).mean() for t in outputs)
    assert isinstance(loss, Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    faults = [f"output {i}" for i, t in enumerate(outputs) if not t.isfinite().all()]
    for name, p in model.named_parameters():
        if p.grad is not None and not p.grad.isfinite().all():
            faults.append(f"gradient of {name}")
    for name, module in model.named_modules():
        if isinstance(module, BatchKalmanNorm) and module.prior_features is not None:
            faults += [f"{name}.{part} has no gradient" for part, p in module.named_parameters() if p.grad is None]
    model.zero_grad(set_to_none=True)
    return faults


class Prior(NamedTuple):
    """The prior of one norm, compared with its observation."""

    correlation: float | None  # of the means, over channels; None if the observed means hardly differ
    ratio: float  # median over channels of prior variance / observed variance
    offset: float  # median over channels of |prior mean - observed mean|, in observed deviations


def priors(model: nn.Module, x: Tensor) -> dict[str, Prior]:
    """The prior of every norm, in one training forward of a model converted with `weights` and a gain near 1."""
    found: dict[str, Prior] = {}
    counts: Counter[str] = Counter()

    def hook(name: str) -> Any:
        def compare(module: Any, args: tuple[Tensor]) -> None:
            which, counts[name] = counts[name], counts[name] + 1
            if which < len(module.wire.calls):
                prior = module.wire.previous(which, args[0])
                if prior is not None:
                    found[f"{name}#{which}"] = _compared(prior, args[0])

        return compare

    wired = [(n, m) for n, m in model.named_modules() if isinstance(m, BatchKalmanNorm) and m.prior_features]
    handles = [module.register_forward_pre_hook(hook(name)) for name, module in wired]
    torch.manual_seed(0)
    with torch.no_grad():
        model.train()(x)
    for handle in handles:
        handle.remove()
    return found


def _compared(prior: kalmannorm.Moments, x: Tensor) -> Prior:
    by_example = x.double().flatten(2) if x.dim() > 2 else x.double().unsqueeze(2)
    means = by_example.mean(2)  # (N, C)
    mean, var = means.mean(0), by_example.transpose(0, 1).flatten(1).var(1, correction=0)
    given, spread = prior.mean[0].double(), prior.var[0].double()
    ratio = (spread / var.clamp(min=1e-12)).median().item()
    offset = ((given - mean).abs() / var.clamp(min=1e-12).sqrt()).median().item()
    sampling = means.var(0).mean() / means.shape[0]
    if mean.numel() < 3 or mean.var() < SIGNAL * sampling + 1e-8 * var.mean():
        return Prior(None, ratio, offset)
    if given.var() == 0:
        return Prior(0.0, ratio, offset)
    return Prior(torch.corrcoef(torch.stack([given, mean]))[0, 1].item(), ratio, offset)


class Summary(NamedTuple):
    """Over the norms of a model: medians, the number of correlations, and the share of norms within both targets."""

    correlation: float | None
    correlated: int
    ratio: float | None
    offset: float | None
    within: float | None


CORRELATION, RATIO = 0.9, (0.5, 2.0)
"""The targets: the least correlation, and the range of the ratio."""


def _good(prior: Prior) -> bool:
    correlated = prior.correlation is None or prior.correlation >= CORRELATION
    return correlated and RATIO[0] <= prior.ratio <= RATIO[1]


def summary(found: dict[str, Prior]) -> Summary:
    correlations = [p.correlation for p in found.values() if p.correlation is not None]
    correlation = statistics.median(correlations) if correlations else None
    if not found:
        return Summary(correlation, len(correlations), None, None, None)
    ratio, offset = (statistics.median(p[i] for p in found.values()) for i in (1, 2))  # type: ignore[type-var]
    within = sum(_good(p) for p in found.values()) / len(found)
    return Summary(correlation, len(correlations), ratio, offset, within)
