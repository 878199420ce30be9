"""One norm in inference, without gradients, for models whose norms cannot be folded.

    BatchNorm        nn.BatchNorm2d in eval mode, then F.relu: the baseline
    BKN population   the same numbers from a BKN layer
    GroupNorm        nn.GroupNorm, then F.relu: also independent of the other examples in the batch
    BKN example      every example with its own posterior

A norm after a convolution can be folded in `population` mode. `inference_model` times networks with folded norms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kalmannorm._norms.grouped import Inference
from kalmannorm._norms.kalman import BatchKalmanNorm2d
from kalmannorm._running.prior_bundles import Prior
from kalmannorm.lab.bench.comparing import Entrant, Error, compare
from kalmannorm.lab.bench.op import DTYPES, LAYOUTS, Case
from kalmannorm.lab.bench.op_contenders import BASELINE, GROUPNORM, Forward, Inputs, channel_groups
from kalmannorm.lab.bench.timing import Call
from kalmannorm.lab.bench.truth import EPS, check, of_channels, of_example, of_population
from kalmannorm.lab.bench.turns import Watch
from kalmannorm.lab.files.records import Record
from kalmannorm.moments import Moments


def measure(case: Case, rounds: int, *, copy: float, watch: Watch = lambda _: None) -> list[Record]:
    """One record per contender, BatchNorm first."""
    inputs = Inputs(case.shape, DTYPES[case.dtype], LAYOUTS[case.layout], case.device)
    found = [_batch_norm(inputs, case), _population(inputs, case), _group_norm(inputs, case)]
    found += [_example(inputs, case, size) for size in case.statistics_batches]
    rows = compare(
        found,
        inputs.x,
        rounds,
        copy=copy,
        against={"ratio_groupnorm": GROUPNORM},
        watch=lambda doing: watch(f"{case}: {doing}"),
    )
    return [{**case.columns(), "level": "inference", **row} for row in rows]


def _entrant(
    name: str, case: Case, size: int | str | None, forward: Forward, x: Tensor, truth: Callable[[], Tensor], passes: int
) -> Entrant:
    def prepare() -> tuple[Call, Error]:
        return _without_gradients(forward, x.detach()), partial(check, f"{name} at {case}", expected=[truth()])

    return Entrant(name, size, prepare, passes)


def _without_gradients(forward: Forward, x: Tensor) -> Call:
    def call() -> Sequence[Tensor]:
        with torch.no_grad():
            return (forward(x),)

    return call


def _seen(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Running statistics that differ from those of the batch."""
    return 0.5 + 0.1 * inputs.bias, 4 + 0.1 * inputs.var[0].detach()


def _batch_norm(inputs: Inputs, case: Case) -> Entrant:
    norm = nn.BatchNorm2d(case.shape[1], eps=EPS, device=case.device).eval()
    norm.weight, norm.bias = inputs.affine()
    norm.running_mean, norm.running_var = _seen(inputs)
    truth = partial(of_population, inputs.x.detach(), inputs.weight, inputs.bias, *_seen(inputs), relu=case.relu)
    forward = (lambda x: F.relu(norm(x))) if case.relu else norm
    return _entrant(BASELINE, case, None, forward, inputs.x, truth, 4 if case.relu else 2)


def _bkn(inputs: Inputs, case: Case, size: int, mode: Inference) -> BatchKalmanNorm2d:
    C = case.shape[1]
    norm = BatchKalmanNorm2d(
        C, C, statistics_batch_size=size, transition="weights", inference=mode, eps=EPS, device=case.device
    ).eval()
    norm.weight, norm.bias = inputs.affine()
    norm.running_mean, norm.running_var = _seen(inputs)
    norm.observed_mean, norm.observed_var = _seen(inputs)
    return norm


def _population(inputs: Inputs, case: Case) -> Entrant:
    norm = _bkn(inputs, case, case.statistics_batches[0], "population")
    truth = partial(of_population, inputs.x.detach(), inputs.weight, inputs.bias, *_seen(inputs), relu=case.relu)
    return _entrant("BKN population", case, None, lambda x: norm(x, relu=case.relu), inputs.x, truth, 2)


def _group_norm(inputs: Inputs, case: Case) -> Entrant:
    dtype = DTYPES[case.dtype]
    groups = channel_groups(case.shape[1])
    norm = nn.GroupNorm(groups, case.shape[1], eps=EPS, device=case.device)
    norm.weight, norm.bias = inputs.affine(dtype)
    leaves = [inputs.x, norm.weight, norm.bias]
    forward = (lambda x: F.relu(norm(x))) if case.relu else norm

    def truth() -> Tensor:
        return of_channels(leaves, inputs.upstream, groups, relu=case.relu).results[0]

    return _entrant(GROUPNORM, case, None, forward, inputs.x, truth, 5 if case.relu else 3)


def _example(inputs: Inputs, case: Case, size: int) -> Entrant:
    norm = _bkn(inputs, case, size, "example")
    prior = Prior.of(Moments(inputs.mean.detach(), inputs.var.detach()), inputs.gain.detach())
    leaves = [inputs.x, inputs.weight, inputs.bias, inputs.mean, inputs.var, inputs.gain]
    truth = partial(of_example, leaves, *_seen(inputs), size, relu=case.relu)
    name = "N" if size == case.shape[0] else size

    def forward(x: Tensor) -> Tensor:
        y, _ = norm.forward(x, prior, relu=case.relu, return_posterior=True)
        return y

    return _entrant("BKN example", case, name, forward, inputs.x, truth, 3)
