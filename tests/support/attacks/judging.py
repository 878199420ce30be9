"""Whether results are as exact as `bounds` says that they can be; prints those that are not.

The naive reference in float64 says what is exact. Where float32 overflows, it says in float32 what else is right.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kalmannorm._ops.normalize import aten, naive
from support.attacks import bounds
from support.attacks.bounds import Amount, Pair
from support.attacks.cases import Case

OUTPUTS = ("y", "mean", "var", "observed mean", "observed var")
INPUTS = ("x", "prior mean", "prior var", "gain", "weight", "bias")
Results = dict[str, Tensor]


class Judge:
    """Holds the results of one call against the exact ones. `overflows` (G, C) tells where float32 may be too narrow.

    There a result must be the exact one, or the one of the naive formulas in float32. A gradient that is not finite by
    the naive formulas may be anything. A sum over groups may have exact and naive parts, so it must only be finite
    where the naive one is.
    """

    def __init__(self, call: str, x: Tensor, slabs: bounds.Slabs, at: bounds.Precision, found: Counter[str]) -> None:
        self.call, self.x, self.slabs, self.at, self.found = call, x, slabs, at, found
        groups = slabs.there.shape[0]
        self.overflows = torch.zeros(groups, x.shape[1], dtype=torch.bool)

    def beyond(self, *highest: Tensor) -> None:
        """Mark where a number on the way may not fit into float32; (G, C) each."""
        for rows in highest:
            self.overflows |= ~(rows < self.at.largest)

    def compare(self, name: str, actual: Tensor, exact: Tensor, naive: Tensor, error: Tensor) -> None:
        """`error` has the shape of the result, or a row for each group where that is their sum."""
        dtype = actual.dtype
        actual, exact, naive = actual.double(), exact.double(), naive.double()
        overflows, summed = self.overflows, False
        if actual.shape == self.x.shape and name in ("y", "gradient of x"):
            overflows = self.slabs.back(bounds.rows(overflows).expand_as(self.slabs.there))
        elif error.shape != actual.shape:
            summed = True
            if error.numel() > error.shape[1] > actual.numel() or actual.numel() == 1:
                error, overflows = error.sum(), overflows.any()
            else:
                error, overflows = error.sum(0), overflows.any(0)
            error, overflows = error.reshape(actual.shape), overflows.reshape(actual.shape)
        info = torch.finfo(dtype)
        allowed = 2 * error + info.eps * exact.abs() + info.smallest_normal * info.eps
        same = (actual - exact).abs() <= allowed
        signs = (actual.sign() == exact.sign()) | (exact.abs() <= allowed)
        same |= (exact.abs() + allowed > info.max) & (actual.abs() >= 0.99 * info.max) & signs
        same |= ~exact.isfinite() & ~actual.isfinite()
        alike = (actual - naive).abs() <= (4 * self.at.u + info.eps) * naive.abs() + 2 * error + info.smallest_normal
        alike |= ~naive.isfinite() & ~actual.isfinite()
        open_ended = ~(allowed < torch.inf) & exact.isfinite()
        if name.startswith("gradient"):
            open_ended |= overflows & ~naive.isfinite()
        if summed:
            open_ended |= overflows & actual.isfinite()
        self.found["judged"] += int((~open_ended).sum())
        self.found["unjudged"] += int(open_ended.sum())
        self.say(name, ~(same | open_ended | overflows & alike), actual, exact, allowed, naive)

    def say(self, name: str, wrong: Tensor, actual: Tensor, exact: Tensor, allowed: Tensor, naive: Tensor) -> None:
        if not wrong.any():
            return
        self.found["wrong"] += 1
        where = tuple(wrong.nonzero()[0].tolist())
        numbers = [f"{t.expand(wrong.shape)[where].item():.9g}" for t in (actual, exact, allowed, naive)]
        print(
            f"{self.call}: {name}{list(where)} is {numbers[0]}, exactly {numbers[1]} +- {numbers[2]}, by the naive "
            f"formulas {numbers[3]}; x is {self.x.dtype} {tuple(self.x.shape)}",
            file=sys.stderr,
        )


class Truth:
    """What the op must give for a case: exact results, naive ones, and how far from the first they may be.

    `parameters` are γ and β with errors of their own, where a layer computes them.
    """

    def __init__(
        self, case: Case, call: str, found: Counter[str], parameters: Pair | None = None, *, merged: bool = False
    ) -> None:
        x = case.x.double()
        self.slabs = bounds.Slabs(x, case.size)
        statistics = torch.float64 if case.x.dtype == torch.float64 else torch.float32
        self.at = bounds.precision(statistics, int(self.slabs.count.max()))
        prior = None if case.prior is None else (case.prior[0].double(), case.prior[1].double())
        gain = None if case.gain is None else case.gain.double()
        observed = bounds.observe(x, self.slabs, self.at, merged=merged)
        self.forward = forward = bounds.fuse(observed, prior, gain, case.eps, self.at)
        weight, bias = parameters or (certain(case.weight, x), certain(case.bias, x))
        y = bounds.normalized(x, self.slabs, forward.mean, forward.rho, weight, bias, self.at)
        grads = [g.double() for g in case.grads]
        backward = bounds.differentiate(x, grads, self.slabs, forward, prior, gain, weight, self.at, aten.FAR)
        self.judge = Judge(call, case.x, self.slabs, self.at, found)
        highest = forward.highest + forward.observed_var.error
        self.judge.beyond(highest * self.slabs.count, backward.highest)
        outputs = (y, forward.mean, forward.var, forward.observed_mean, forward.observed_var)
        amounts = dict(zip(OUTPUTS, outputs, strict=True))
        amounts |= {f"gradient of {name}": getattr(backward, name.replace(" ", "_")) for name in INPUTS}
        self.errors = {name: amount.error for name, amount in amounts.items()}
        self.terms = {name: amount.terms for name, amount in amounts.items()}
        self.exact = self.naive = differentiated(naive.batch_kalman_norm, case.inputs(torch.float64), case)
        if self.judge.overflows.any():
            self.naive = differentiated(naive.batch_kalman_norm, case.inputs(), case)

    def compare(self, results: Results) -> None:
        for name, result in results.items():
            self.judge.compare(name, result, self.exact[name], self.naive[name], self.errors[name])


def certain(parameter: Tensor, x: Tensor) -> Amount:
    rows = parameter.double().view(-1, x.shape[1])
    return Amount(rows, rows.abs(), torch.zeros_like(rows))


def differentiated(function: Callable[..., Any], inputs: list[Tensor | None], case: Case) -> Results:
    """Outputs and gradients by name."""
    outputs = function(*inputs, case.size, case.eps)
    given = {f"gradient of {name}": t for name, t in zip(INPUTS, inputs, strict=True) if t is not None}
    arriving = [g.to(o.dtype) for g, o in zip(case.grads, outputs, strict=True)]
    grads = torch.autograd.grad(outputs, list(given.values()), arriving)
    return dict(zip((*OUTPUTS, *given), (t.detach() for t in (*outputs, *grads)), strict=True))
