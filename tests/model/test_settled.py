"""Norms at the end of the closing phase, λ = 1: population inference in training, and when they run this way."""

from __future__ import annotations

import copy
import io
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kalmannorm import BatchKalmanNorm2d, ClosingPhase, GhostBatchNorm2d, GroupedNorm, Moments, convert, fuse
from kalmannorm._model.graphed.state import ModelState
from kalmannorm._norms import grouped
from kalmannorm._norms.closing import Target, normalize_closing
from kalmannorm._norms.settled import normalize_settled
from kalmannorm._running import settled_way, short_way
from kalmannorm._support.changes import Changes
from support.closing_definition import F64, at, by_definition


class Net(nn.Module):
    """With a residual and ReLUs, which `fuse` computes in the pass of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.other = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        return self.head(torch.relu(self.other(self.second(x)) + x).mean((2, 3)))


def converted(dtype=F64, **options):
    torch.manual_seed(0)
    example = torch.zeros(2, 3, 6, 6, dtype=dtype)
    return convert(Net().to(dtype), example, **{"statistics_batch_size": 2, **options})


def images(seed, examples=8, dtype=F64):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(examples, 3, 6, 6, generator=rng, dtype=dtype), torch.randint(0, 3, (examples,), generator=rng)


def norms_of(model):
    return [module for module in model.modules() if isinstance(module, GroupedNorm)]


def loss_of(model, x, target):
    return nn.functional.cross_entropy(model(x), target)


def train(model, phase, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in steps:
        optimizer.zero_grad()
        loss_of(model, *images(number)).backward()
        optimizer.step()
        phase.step()


def settled(model, seed=3):
    """Put all norms at λ = 1, with some state."""
    for number, norm in enumerate(norms_of(model)):
        with torch.no_grad():
            at(1.0, norm, seed + number)
        norm.settle_closing(True)
    return model


@pytest.fixture
def runs(monkeypatch):
    """The number of forwards that ran the settled way."""
    counted = []

    def counts(original):
        def counting(*args, **kwargs):
            counted.append(1)
            return original(*args, **kwargs)

        return counting

    for way in (grouped, short_way):
        monkeypatch.setattr(way, "normalize_settled", counts(way.normalize_settled))
    monkeypatch.setattr(settled_way, "settle_alone", counts(settled_way.settle_alone))
    return counted


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("options", [{}, {"to": "ghost"}, {"transition": "learned"}], ids=str)
def test_the_output_is_that_of_population_inference(options, dtype, fused, runs):
    model = settled(converted(dtype, **options))
    if fused:
        model = fuse(model, torch.zeros(2, 3, 6, 6, dtype=dtype))
    for norm in norms_of(model):  # far from the groups: at a smaller λ it would be clipped
        norm.running_mean.add_(20)
        norm.running_var.mul_(100)
    x, _ = images(0, 7, dtype)
    expected = copy.deepcopy(model).eval()(x)
    runs.clear()  # `fuse` has run the model
    found = model(x)
    assert len(runs) == 2
    torch.testing.assert_close(found, expected, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=0)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_one_norm_has_the_bits_of_population_inference(layout):
    norm = GhostBatchNorm2d(3, statistics_batch_size=2)
    settled(norm)
    x, residual = (torch.randn(7, 3, 4, 5).contiguous(memory_format=layout) for _ in range(2))
    expected = copy.deepcopy(norm).eval()(x, residual=residual, relu=True)
    assert torch.equal(norm(x, residual=residual, relu=True), expected)


@pytest.mark.parametrize("examples", [6, 7])
@pytest.mark.parametrize("kalman", [True, False])
def test_forward_and_backward_by_definition(kalman, examples, runs):
    torch.manual_seed(0)
    x = (1 + 2 * torch.randn(examples, 3, 4, 5, dtype=F64)).requires_grad_()
    g = torch.randn_like(x).detach()
    options = {"statistics_batch_size": 2, "dtype": F64}
    prior = None
    norm = GhostBatchNorm2d(3, **options)
    if kalman:
        norm = BatchKalmanNorm2d(3, 3, transition="weights", gain=0.7, **options)
        prior = torch.randn(3, dtype=F64).requires_grad_(), (1 + torch.rand(3, dtype=F64)).requires_grad_()
    settled(norm)
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
        norm.running_mean.add_(30)  # d is far beyond its limit at λ = 0
        norm.running_var.mul_(400)  # and so is r
        before = [prior and [each.detach() for each in prior], 1.0]
        target = by_definition(norm, x.detach(), g, *before)
    y = norm(x) if prior is None else norm(x, Moments(prior[0][None], prior[1][None]))
    y.backward(g)
    found = [y, x.grad, norm.bias.grad, norm.weight.grad, *norm.closing.probe.grad.t()[:2]]
    wanted = [*target[:2], *target[2], *target[2]]
    if prior is not None:
        q = norm.gain.detach().squeeze()
        found += [norm.gain_logit.grad.squeeze() / (q * (1 - q)), *(each.grad for each in prior)]
        wanted += [target[3], *target[4]]
    for index, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        # The slope of the gain has a margin of 1e-6 (`GAIN_MARGIN`).
        tolerance = 1e-5 if index == 6 else 1e-10
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))
    assert (norm.closing.probe.grad[:, 2] == 1).all() and len(runs) == 1


SHAPES = {"ragged": (7, 3, 4, 5), "one group": (2, 3, 3, 3), "(N, C)": (6, 5), "3-D": (5, 2, 7), "C = 1": (5, 1, 3, 4)}
ROWS = {"one row": (1, ()), "rows of groups": (2, (1,)), "none": (0, ())}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("adds", [False, True], ids=["", "residual"])
def test_the_same_as_the_way_of_every_strength(name, rows, last, adds):
    """All results and gradients, also those that arrive at posterior and observation."""
    torch.manual_seed(0)
    shape, (number, gains) = SHAPES[name], ROWS[rows]
    C, groups = shape[1], -(-shape[0] // 2)
    G = groups if number == 2 else 1
    parameter = (G, C) if number == 2 else (C,)
    x = torch.randn(shape, dtype=F64) + 1
    if last and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    filtered = [torch.randn(G, C, dtype=F64), 1 + torch.rand(G, C, dtype=F64), torch.rand((C,) * len(gains), dtype=F64)]
    given = [x, *(filtered if number else []), *torch.randn(2, *parameter, dtype=F64)]
    given += [torch.randn_like(x)] if adds else []
    probe, strength = torch.zeros(C, 3, dtype=F64), torch.ones((), dtype=F64)
    running = torch.randn(C, dtype=F64), 1 + torch.rand(C, dtype=F64), torch.randn(C, 3, dtype=F64)
    grads = [torch.randn(shape, dtype=F64), *torch.randn(4, groups, C, dtype=F64)]
    found = []
    for way, target in ((normalize_settled, Target(*running, None)), (normalize_closing, Target(*running, strength))):
        leaves = [each.detach().clone().requires_grad_() for each in (*given, probe)]
        first, rest = leaves[0], leaves[1:]
        prior, gain = (Moments(*rest[:2]), rest[2]) if number else (None, None)
        rest = rest[3:] if number else rest
        y, posterior, seen = way(
            first, prior, gain, (rest[0], rest[1]), target, leaves[-1],
            statistics_batch_size=2, eps=1e-5, residual=rest[2] if adds else None, relu=True,
        )  # fmt: skip
        outputs = [y, *posterior[:2], *seen[:2]]
        found.append([*outputs, *torch.autograd.grad(outputs, leaves, grads)])
    for mine, theirs in zip(*found, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("strength", [1 - 1e-3, 1 - 1e-6])
def test_there_is_no_jump(strength):
    """Just before λ = 1 results are nearly those of λ = 1, however far the running statistics are from the group."""
    torch.manual_seed(0)
    norm = settled(GhostBatchNorm2d(3, statistics_batch_size=2))
    norm.running_mean.add_(600)
    norm.running_var.mul_(2500)
    other = copy.deepcopy(norm)
    other.settle_closing(False)
    other.closing.strength.fill_(strength)
    x, g = torch.randn(2, 6, 3, 4, 5).unbind(0)
    results = []
    for each in (norm, other):
        leaf = x.clone().requires_grad_()
        y = each(leaf)
        y.backward(g)
        results.append((y.detach(), leaf.grad))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=0, atol=20 * (1 - strength) * float(mine.abs().max()) + 1e-5)


def test_an_infinite_variance_is_not_nan_at_full_strength():
    """The square of 1e25 overflows in float32. ρ is 0 then, and 1 / ρ is infinite."""
    norm = GhostBatchNorm2d(2, statistics_batch_size=2)
    with torch.no_grad():
        at(1.0, norm)
    x = torch.randn(2, 2, 3, 3)
    x[0, 0, 0, 0] = 1e25
    with pytest.warns(RuntimeWarning):
        y = norm(x)
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_runs_as_its_first_one(reentrant):
    """It reads the old statistics, and runs the same way even if the norms have settled in between."""
    for before, between in product((True, False), repeat=2):
        model = settled(converted())
        for norm in norms_of(model):
            norm.settle_closing(before)
        other = copy.deepcopy(model)
        x, target = images(0)
        loss_of(model, x.requires_grad_(), target).backward()
        loss = nn.functional.cross_entropy(checkpoint(other, x, use_reentrant=reentrant), target)
        for norm in norms_of(other):
            norm.settle_closing(between)
        loss.backward()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-14)
        for mine, theirs in zip(norms_of(model), norms_of(other), strict=True):
            torch.testing.assert_close(mine.closing.probe.grad, theirs.closing.probe.grad)


@pytest.mark.parametrize("options", [{}, {"top": 0.9}, {"present": 0.5}], ids=str)
def test_when_norms_settle(options, runs):
    model = converted()
    phase = ClosingPhase(model, 10, start=0.1, end=0.4, **options)
    seen = []
    for number in range(6):
        seen.append((phase.settled, len(runs)))
        train(model, phase, range(number, number + 1))
    if options:
        assert not any(settled for settled, _ in seen) and not runs
        return
    assert seen == [(False, 0)] * 4 + [(True, 0), (True, 2)]
    phase.remove()
    before = len(runs)
    train(model, ClosingPhase(model, 10, start=0.0, end=0.5), range(1))
    assert len(runs) == before


@pytest.mark.parametrize("missing", ["weight", "bias"])
def test_one_parameter_alone(missing):
    """Without β, γ still counts, and the other way round."""
    norm = GhostBatchNorm2d(3, statistics_batch_size=2, dtype=F64)
    with torch.no_grad():
        norm.weight.fill_(2)
        norm.bias.fill_(1)
    setattr(norm, missing, None)
    settled(norm)
    x = torch.randn(4, 3, 2, 2, dtype=F64)
    expected = copy.deepcopy(norm).eval()(x)
    torch.testing.assert_close(norm(x), expected)


def test_accumulation_runs_this_way(runs):
    """Micro-batches of 2 groups each have the gradients of the whole batch."""
    model = settled(converted())
    other = copy.deepcopy(model)
    x, target = images(0)
    loss_of(model, x, target).backward()
    for norm in norms_of(other):
        norm.closing.averages[:, :2] /= 2  # averages are those of a backward
        norm.momentum = 0.0  # the second part starts from the same statistics
    for some, labels in zip(x.chunk(2), target.chunk(2), strict=True):
        (loss_of(other, some, labels) / 2).backward()
    assert len(runs) == 6
    for mine, theirs in zip(norms_of(model), norms_of(other), strict=True):
        torch.testing.assert_close(mine.closing.probe.grad[:, :2], theirs.closing.probe.grad[:, :2])
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("stop", [5, 8])
@pytest.mark.parametrize("order", [("model", "phase"), ("phase", "model"), ("model",)], ids=str)
def test_resume_bit_for_bit(stop, order):
    """λ is 1 from step 6 on."""
    model, settings = converted(), {"start": 0.25, "end": 0.5}
    train(model, ClosingPhase(model, 12, **settings), range(12))
    first = converted()
    phase = ClosingPhase(first, 12, **settings)
    train(first, phase, range(stop))
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "phase": phase.state_dict()}, file)
    file.seek(0)
    saved, second = torch.load(file), converted()
    if "phase" not in order:
        second.load_state_dict(saved["model"])
        assert {norm.closing.settled for norm in norms_of(second)} == {stop == 8}
        return
    again = ClosingPhase(second, 12, **settings)
    for name in order:
        {"model": second, "phase": again}[name].load_state_dict(saved[name])
    assert {norm.closing.settled for norm in norms_of(second)} == {stop == 8}
    train(second, again, range(stop, 12))
    theirs = second.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, theirs[name]), name


def test_an_earlier_state_unsettles():
    model = converted()
    phase = ClosingPhase(model, 10, start=0.0, end=0.5)
    train(model, phase, range(2))
    early = copy.deepcopy(model.state_dict()), phase.state_dict()
    train(model, phase, range(2, 6))
    assert all(norm.closing.settled for norm in norms_of(model))
    assert all(norm.closing.settled for norm in norms_of(copy.deepcopy(model)))
    phase.load_state_dict(early[1])
    assert not any(norm.closing.settled for norm in norms_of(model))
    train(model, phase, range(2, 6))
    model.load_state_dict(early[0])
    assert not any(norm.closing.settled for norm in norms_of(model))


def test_graphs_and_prepared_steps_notice():
    """A graph serves one version of the settings, and prepared decisions expire when norms change."""
    model = converted()
    model(images(0)[0])  # the first forward on the short way adds attributes
    phase = ClosingPhase(model, 4, start=0.0, end=0.5)
    state, versions, counts = ModelState(model), [], []
    for number in range(4):
        versions.append(state.version().number)
        counts.append(Changes.count)
        train(model, phase, range(number, number + 1))
    assert versions[0] == versions[1] != versions[2] == versions[3]
    assert counts[0] == counts[1] < counts[2] == counts[3]
    for norm in norms_of(model):
        norm.settle_closing(False)
    assert state.version().number == versions[0]


def test_compiled_equals_eager(runs):
    model = settled(converted())
    other = copy.deepcopy(model)
    x, target = images(0, 7)
    loss_of(model, x, target).backward()
    loss_of(torch.compile(other, backend="aot_eager"), x, target).backward()
    assert len(runs) >= 2
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)
    for (name, mine), theirs in zip(model.named_buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12, msg=name)
    for mine, theirs in zip(norms_of(model), norms_of(other), strict=True):
        torch.testing.assert_close(mine.closing.probe.grad, theirs.closing.probe.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("relu", [False, True])
def test_other_dtypes_are_near_float64(dtype, relu):
    torch.manual_seed(0)
    norm = settled(BatchKalmanNorm2d(3, 3, transition="weights", statistics_batch_size=2))
    exact = copy.deepcopy(norm).double()
    x, residual, g = (torch.randn(5, 3, 4, 5).to(dtype) for _ in range(3))
    prior = Moments(torch.randn(1, 3), 1 + torch.rand(1, 3))
    found = []
    for each, kind in ((norm, dtype), (exact, F64)):
        leaves = [t.to(kind, copy=True).requires_grad_() for t in (x, residual)]
        given = Moments(*(t.to(each.weight.dtype) for t in prior[:2]))
        y = each(leaves[0], given, residual=leaves[1], relu=relu)
        y.backward(g.to(kind))
        assert y.dtype == kind and leaves[0].grad.dtype == kind
        found.append([y, *(leaf.grad for leaf in leaves), each.weight.grad, each.bias.grad, each.closing.probe.grad])
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
    for mine, theirs in zip(*found, strict=True):
        assert float((mine.double() - theirs).detach().norm() / theirs.detach().norm()) < tolerance
