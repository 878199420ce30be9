"""Checks every network before it is timed. The checks run on copies, so statistics are not updated.

A step, as it will be timed, must give a finite loss and a gradient for every parameter. In float32 the logits and
gradients must be those of the same network, unfused, in float64. Groups in one pass must give the results of one pass
per group. Batch norm with one group must equal nn.BatchNorm.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase

from kalmannorm._model.accumulate import accumulate_statistics
from kalmannorm._norms.closing_state import ClosingState
from kalmannorm._norms.grouped import GroupedNorm
from kalmannorm.lab.bench.step_contenders import BASELINE, NONE, Case, Contender, Entry, full_float32
from kalmannorm.lab.bench.timing import Timed
from kalmannorm.lab.errors import LabError
from kalmannorm.lab.recipes.methods import method

TOLERANCE = 5e-3
"""Relative error of losses and logits. Float32 rounds differently in another order of summation, and errors add up over
layers (5e-4 in a ResNet-101 with nn.BatchNorm)."""
GRADIENTS = 0.25
"""Error of a parameter's gradient, relative to it and a hundredth of all. If rounding moves a value to the other side
of a ReLU, a gradient jumps (0.07 in that network)."""
MOST = 16
"""Examples that are computed in float64."""
LOSS = 3e-2
"""Relative error of the loss in the timed precision."""


def check(case: Case, contender: Contender) -> None:
    """Raise an error if the results of a contender are wrong."""
    entry = contender.entry
    if entry.method == NONE:
        return
    if entry.way == "inductor":
        _check_compiled(contender)
        return
    _check_step(Contender(case, entry, copy.deepcopy(contender.model), contender.images, contender.labels))
    with full_float32():
        _check_gradients(case, contender)
        if entry.method == BASELINE:
            whole = case.build(Entry("bn", entry.setting))
            found, expected = (_loss(model, contender) for model in (whole, copy.deepcopy(contender.model)))
            _close("bn", "with one group its loss is not that of nn.BatchNorm", found, expected)
        elif method(entry.method).groups:
            _check_groups(contender)


def _check_step(trial: Contender) -> float:
    name, loss = str(trial.entry), float(trial.step())
    _require(name, "its loss is not a number", loss == loss and abs(loss) != float("inf"))
    for key, parameter in trial.model.named_parameters():
        gradient = parameter.grad
        _require(name, f"{key} has no gradient", gradient is not None)
        assert gradient is not None
        _require(name, f"the gradient of {key} is not finite", bool(gradient.isfinite().all()))
    return loss


def _check_compiled(contender: Contender) -> None:
    """Check the contender itself, because compiling a copy would take the same time again. Its state is restored."""
    plain = Contender(
        contender.case, Entry(BASELINE, contender.entry.setting), contender.model, contender.images, contender.labels
    )
    start = copy.deepcopy(contender.model.state_dict())
    losses = []
    for one in (plain, contender):
        losses.append(_check_step(one))
        contender.model.load_state_dict(start)
        one.optimizer.state.clear()
    _close(str(contender.entry), "its loss is not that of the plain net", losses[1], losses[0], limit=LOSS)


def check_compiled(contender: Contender) -> None:
    """A compiled step must give the loss of the plain net."""
    if contender.entry.method != NONE:
        found = float(contender.step())
        run, contender.run = contender.run, contender.model
        try:
            expected = float(contender.step())
        finally:
            contender.run = run
        _close(str(contender.entry), "its compiled loss is not that of a plain step", found, expected, limit=LOSS)


def check_replay(contender: Contender, ready: Timed) -> None:
    """A captured step must give the loss of an eager one."""
    if contender.entry.method != NONE:
        eager, replayed = float(contender.step()), float(ready.results()[0])
        _close(str(contender.entry), "the loss of its CUDA graph is not that of a step", replayed, eager, limit=LOSS)


def _check_gradients(case: Case, contender: Contender) -> None:
    few = min(max(2 * contender.entry.setting.statistics_batch, 4), MOST)
    images, labels = contender.images[:few], contender.labels[:few]
    results: list[tuple[Tensor, list[Tensor], list[Tensor]]] = []
    entry = contender.entry._replace(way="")
    for given in (copy.deepcopy(contender.model), case.build(entry).double()):
        model = Contender(case, entry, given, images, labels).model  # with a closing phase, if the entry has one
        closings = _closings(model)
        _expect_gradients(closings)
        _only_norms_train(model)
        logits = model(images.to(next(model.parameters()).dtype))
        loss = F.cross_entropy(logits, labels)
        # An auxiliary head is used in training only, and gets zeros here.
        parameters, probes = list(model.parameters()), [closing.probe for closing in closings]
        parts = torch.autograd.grad(loss, [*parameters, *probes], allow_unused=True, materialize_grads=True)
        parts = tuple(part.double() for part in parts)
        results.append((logits.detach().double(), list(parts[: len(parameters)]), list(parts[len(parameters) :])))
    (logits, gradients, sums), (true_logits, true_gradients, true_sums) = results
    name = str(contender.entry)
    _close(name, "its logits are not those in float64", _size(logits - true_logits), 0.0, scale=_size(true_logits))
    least = 0.01 * float(torch.stack([true.norm() for true in true_gradients]).norm())
    for (key, _), found, true in zip(contender.model.named_parameters(), gradients, true_gradients, strict=True):
        error = float((found - true).norm()) / (float(true.norm()) + least)
        _require(name, f"the gradient of {key} is not that in float64: off by {error:.1e}", error < GRADIENTS)
    if true_sums:  # what the closing phase collects; the third column counts backwards
        found, true = torch.cat(sums), torch.cat(true_sums)
        error = float((found - true)[:, :2].norm() / true[:, :2].norm()) + float((found - true)[:, 2].abs().max())
        _require(name, f"what its closing phase collects is off by {error:.1e}", error < GRADIENTS)


def _closings(model: nn.Module) -> list[ClosingState]:
    norms = [module for module in model.modules() if isinstance(module, GroupedNorm)]
    return [norm.closing for norm in norms if norm.closes]


@torch.no_grad()
def _expect_gradients(closings: list[ClosingState]) -> None:
    """Averages that are not zero, the same for every model: a new phase has none, and errors in them would not show."""
    generator = torch.Generator().manual_seed(0)
    for closing in closings:
        closing.averages[:, :2] = 0.01 * torch.randn(len(closing.averages), 2, generator=generator).to(closing.averages)


def _only_norms_train(model: nn.Module) -> None:
    """Dropout and similar layers would draw other random numbers."""
    model.eval()
    for module in model.modules():
        if isinstance(module, _NormBase):
            module.train()


def _loss(model: nn.Module, like: Contender) -> float:
    _only_norms_train(model)
    with torch.no_grad():
        return float(F.cross_entropy(model(like.images), like.labels))


@torch.no_grad()
def _check_groups(contender: Contender) -> None:
    model, size = copy.deepcopy(contender.model), contender.entry.setting.statistics_batch
    _only_norms_train(model)
    few = contender.images[: 4 * size]
    with accumulate_statistics(model):  # Batch Renorm must use the correction of one pass
        together = model(few)
        apart = torch.cat([model(group) for group in torch.split(few, size)])
    name = str(contender.entry)
    _close(name, "its groups depend on each other", _size(together - apart), 0.0, scale=_size(together))


def _size(logits: Tensor) -> float:
    return float(logits.abs().max())


def _close(
    name: str, fault: str, found: float, expected: float, *, scale: float | None = None, limit: float = TOLERANCE
) -> None:
    error = abs(found - expected) / (abs(expected) if scale is None else scale)
    _require(name, f"{fault}: off by {error:.1e}", error < limit)


def _require(name: str, fault: str, right: bool) -> None:
    if not right:
        raise LabError(f"{name} is wrong, so nothing is timed: {fault}")
