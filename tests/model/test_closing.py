"""The closing phase: its forward and backward by definition, its schedule, and what a training loop may do with it."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint

from kalmannorm import (
    BatchKalmanNorm2d,
    ClosingPhase,
    GhostBatchNorm1d,
    GhostBatchNorm2d,
    Moments,
    accumulate_statistics,
    convert,
    fold,
    fuse,
    recalibrate,
    set_inference,
    to_batchnorm,
)
from support import two_ranks
from support.closing_definition import at, by_definition
from support.wide import narrow

F64 = torch.float64


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3)).double()


def images(seed: int, examples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(examples, 3, 9, 9, generator=rng, dtype=F64), torch.randint(0, 3, (examples,), generator=rng)


def converted(**options) -> nn.Module:
    return convert(net(), torch.zeros(2, 3, 9, 9, dtype=F64), **{"statistics_batch_size": 2, **options})


def loss_of(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), target)


def train(model: nn.Module, phase: ClosingPhase, steps: range, parts: int = 1, rate: float = 0.1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for number in steps:
        optimizer.zero_grad()
        x, target = images(number)
        with accumulate_statistics(model):
            for some, labels in zip(x.chunk(parts), target.chunk(parts), strict=True):
                (loss_of(model, some, labels) / parts).backward()
        optimizer.step()
        phase.step()


def norms_of(model: nn.Module) -> list:
    return [module for module in model.modules() if isinstance(module, (BatchKalmanNorm2d, GhostBatchNorm2d))]


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if value.is_floating_point()}


def assert_equal(model: nn.Module, other: nn.Module, tolerance: float = 0.0) -> None:
    mine, theirs = state(model), state(other)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("strength", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("examples", [6, 7])
@pytest.mark.parametrize("kalman", [True, False])
@pytest.mark.parametrize("present", [0.0, 0.4])
def test_forward_and_backward_by_definition(kalman, examples, strength, present):
    torch.manual_seed(0)
    x = (1 + 2 * torch.randn(examples, 3, 4, 5, dtype=F64)).requires_grad_()
    g = torch.randn_like(x).detach()
    options = {"statistics_batch_size": 2, "dtype": F64}
    if kalman:
        norm = BatchKalmanNorm2d(3, 3, transition="weights", gain=0.7, **options)
        prior = torch.randn(3, dtype=F64).requires_grad_(), (1 + torch.rand(3, dtype=F64)).requires_grad_()
    else:
        norm, prior = GhostBatchNorm2d(3, **options), None
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
        at(strength, norm)
        norm.closing.present = present
        given = x.detach(), g, prior and [each.detach() for each in prior], strength
        averages = norm.closing.averages.clone()
        sums = torch.stack(by_definition(norm, *given)[2], 1)
        norm.closing.averages[:, :2].lerp_(sums, present)  # what the backward has to expect
        target = by_definition(norm, *given)
        norm.closing.averages.copy_(averages)
    y = norm(x) if prior is None else norm(x, Moments(prior[0][None], prior[1][None]))
    y.backward(g)
    torch.testing.assert_close(y, target[0])
    torch.testing.assert_close(x.grad, target[1])
    torch.testing.assert_close(norm.bias.grad, target[2][0])
    torch.testing.assert_close(norm.weight.grad, target[2][1])
    torch.testing.assert_close(norm.closing.probe.grad.t()[:2], torch.stack(target[2]))
    assert (norm.closing.probe.grad[:, 2] == 1).all()
    if prior is not None:
        q = norm.gain.detach()
        torch.testing.assert_close(
            norm.gain_logit.grad.squeeze(), target[3] * (q * (1 - q)).squeeze(), rtol=1e-5, atol=0
        )
        for mine, wanted in zip(prior, target[4], strict=True):
            torch.testing.assert_close(mine.grad, wanted)


@pytest.mark.parametrize("options", [{}, {"to": "ghost"}, {"transition": "learned"}], ids=str)
def test_strength_zero_changes_nothing(options):
    model = converted(**options)
    other = copy.deepcopy(model)
    for norm in norms_of(other):
        norm.begin_closing()
    for each in (model, other):
        loss_of(each, *images(0, 7)).backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, dict(other.named_buffers())[name], rtol=1e-9, atol=1e-12)


def test_full_strength_trains_the_model_that_population_inference_runs():
    model, (x, _) = converted(), images(0)
    for momentum in (1.0, 0.0):  # this batch becomes the running statistics, which then stay
        for norm in norms_of(model):
            norm.momentum = momentum
        model(x)
    phase = ClosingPhase(model, steps=10, start=0, end=0)
    assert phase.strength == 1
    trained = model(x)
    torch.testing.assert_close(trained, model.eval()(x))
    folded = fold(model)
    torch.testing.assert_close(trained, folded(x))
    torch.testing.assert_close(trained, to_batchnorm(model).eval()(x))


@pytest.mark.parametrize("top", [1, 0.75])
def test_schedule(top):
    model = converted()
    phase = ClosingPhase(model, steps=10, start=0.2, end=0.6, top=top)
    seen = []
    for _ in range(9):
        seen.append((phase.strength, norms_of(model)[0].closes))
        loss_of(model, *images(0)).backward()
        phase.step()
    assert [strength / top for strength, _ in seen] == pytest.approx([0, 0, 0, 0.25, 0.5, 0.75, 1, 1, 1])
    assert [closes for _, closes in seen] == [False, False] + [True] * 7
    assert all(norm.closing.strength == top for norm in norms_of(model))
    phase.remove()
    assert not any("closing" in name for name in model.state_dict())
    loss_of(model, *images(0)).backward()


@pytest.mark.parametrize("options", [{}, {"to": "ghost"}, {"transition": "learned"}], ids=str)
@pytest.mark.parametrize("parts", [2, 4])
def test_accumulation_equals_one_pass(parts, options):
    model = converted(**options)
    other = copy.deepcopy(model)
    train(model, ClosingPhase(model, 12, start=0.1, end=0.5), range(12))
    train(other, ClosingPhase(other, 12, start=0.1, end=0.5), range(12), parts)
    for norm in norms_of(other):
        norm.closing.averages[:, :2] *= parts  # they are averages of sums per backward
    assert_equal(model, other, 1e-9)


def on_a_rank(rank, joined):
    """Half of every batch. `joined`: the groups span both ranks."""
    model = converted(**({"statistics_batch_size": None, "process_group": "world"} if joined else {}))
    wrapped = nn.parallel.DistributedDataParallel(model)
    phase = ClosingPhase(model, 12, start=0.1, end=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(12):
        optimizer.zero_grad()
        x, target = (each.chunk(2)[rank] for each in images(number))
        with nullcontext() if joined else accumulate_statistics(model, "world"):
            loss_of(wrapped, x, target).backward()
        optimizer.step()
        phase.step()
    return model.state_dict()


@pytest.mark.parametrize("joined", [False, True])
def test_two_ranks_equal_one_process(tmp_path, joined):
    states = two_ranks.run(tmp_path, {"closing": partial(on_a_rank, joined=joined)})
    model = converted(**({"statistics_batch_size": None} if joined else {}))
    train(model, ClosingPhase(model, 12, start=0.1, end=0.5), range(12))
    for each in states:
        other = copy.deepcopy(model)
        other.load_state_dict(each["closing"])
        assert_equal(model, other, 1e-9)


def test_joined_groups_without_ranks():
    """Without ranks to join, `process_group` changes nothing."""
    model, other = converted(), converted(process_group="world")
    for each in (model, other):
        train(each, ClosingPhase(each, 6, start=0, end=0.5), range(6))
    assert_equal(model, other)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("prior", [False, True])
def test_residual_and_relu_in_the_same_pass(prior, residual):
    torch.manual_seed(0)
    results = []
    x, added = torch.randn(6, 3, 4, 5, dtype=F64), torch.randn(6, 3, 4, 5, dtype=F64) if residual else None
    moments = Moments(torch.randn(1, 3, dtype=F64), 1 + torch.rand(1, 3, dtype=F64)) if prior else None
    for fused in (False, True):
        norm = BatchKalmanNorm2d(3, 3 if prior else None, transition="weights", statistics_batch_size=2, dtype=F64)
        with torch.no_grad():
            at(0.4, norm)
        leaves = [each.clone().requires_grad_() for each in (x, added) if each is not None]
        if fused:
            y = norm(leaves[0], moments, residual=leaves[1] if residual else None, relu=True)
        else:
            y = norm(leaves[0], moments)
            y = torch.relu(y + leaves[1] if residual else y)
        y.square().sum().backward()
        results.append([y.detach(), *(leaf.grad for leaf in leaves), norm.weight.grad, norm.closing.probe.grad])
    torch.testing.assert_close(results[0], results[1])


def test_a_last_group_of_one_value_joins_the_group_before_it():
    """Five examples in groups of 2, as one group of 2 and one of 3."""
    torch.manual_seed(0)
    x, g = torch.randn(5, 3, dtype=F64), torch.randn(5, 3, dtype=F64)
    norm = GhostBatchNorm1d(3, statistics_batch_size=2, dtype=F64)
    with torch.no_grad():
        at(0.4, norm)
    leaf = x.clone().requires_grad_()
    norm(leaf).backward(g)
    other = GhostBatchNorm1d(3, statistics_batch_size=3, dtype=F64)  # groups of 3 and 2
    with torch.no_grad():
        at(0.4, other)
    turned = x.roll(3, 0).clone().requires_grad_()
    other(turned).backward(g.roll(3, 0))
    torch.testing.assert_close(leaf.grad, turned.grad.roll(-3, 0))
    torch.testing.assert_close(norm.closing.probe.grad, other.closing.probe.grad)


def test_gradients_of_the_posterior_are_those_of_the_norm_as_it_is():
    """They are no part of the closing phase: a learned transition needs them as ever."""
    torch.manual_seed(0)
    x, results = torch.randn(6, 3, 4, 5, dtype=F64), []
    prior = Moments(torch.randn(1, 3, dtype=F64), 1 + torch.rand(1, 3, dtype=F64))
    for strength in (None, 0.6, 1.0):
        norm = BatchKalmanNorm2d(3, 3, transition="weights", statistics_batch_size=2, dtype=F64)
        if strength is not None:
            norm.begin_closing()
            norm.closing.strength.fill_(strength)
        leaf = x.clone().requires_grad_()
        _, posterior = norm(leaf, prior, return_posterior=True)
        (posterior.mean.sum() + posterior.var.square().sum()).backward()
        results.append([leaf.grad, norm.gain_logit.grad])
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0], results[2])


@pytest.mark.parametrize("present", [0.0, 0.5])
@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_a_recomputed_forward_sees_what_its_first_one_saw(strength, present):
    """With `present` the backward has two passes. A checkpoint lets it read its saved tensors only once."""
    model, (x, target) = converted(), images(0)
    for norm in norms_of(model):
        at(strength, norm)
        norm.closing.present = present
    other = copy.deepcopy(model)
    loss_of(model, x, target).backward()
    nn.functional.cross_entropy(checkpoint(other, x, use_reentrant=False), target).backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-14)
    for mine, theirs in zip(norms_of(model), norms_of(other), strict=True):
        torch.testing.assert_close(mine.closing.probe.grad, theirs.closing.probe.grad)


def in_one_segment(model, x):
    return checkpoint(model, x, use_reentrant=False)


def in_two_segments(model, x):
    y = checkpoint(model[:3], x, use_reentrant=False)
    return model[6:](checkpoint(model[3:6], y, use_reentrant=False))


def in_a_segment_of_a_segment(model, x):
    return checkpoint(in_two_segments, model, x, use_reentrant=False)


def in_a_reentrant_segment(model, x):
    return checkpoint(model, x.clone().requires_grad_(), use_reentrant=True)


SEGMENTS = [in_one_segment, in_two_segments, in_a_segment_of_a_segment, in_a_reentrant_segment]


@pytest.mark.parametrize("done", [0, 1, 2, 3], ids=["begins", "rises from 0", "rises to 1", "has risen"])
@pytest.mark.parametrize("fades", [False, True], ids=["kept prior", "fading prior"])
@pytest.mark.parametrize("options", narrow([{}, {"to": "ghost"}, {"transition": "learned"}], kept=[{}]), ids=str)
@pytest.mark.parametrize("run", narrow(SEGMENTS, kept=SEGMENTS[:2]), ids=lambda function: function.__name__)
def test_a_step_before_the_backward_changes_no_recomputation(run, options, fades, done):
    """The recomputation has the strength of its forward, and whether the norm was in the phase, settled or faded."""
    results = []
    for how in (nn.Module.__call__, run):
        model, (x, target) = converted(**options), images(0)
        if options.get("transition") == "learned":
            nn.init.normal_(model[4].transition.matrix, generator=torch.Generator().manual_seed(0))
        for norm in norms_of(model):
            at(0.0, norm)
        averages = [norm.closing.averages.clone() for norm in norms_of(model)]
        phase = ClosingPhase(model, 4, start=0.25, end=0.75, fade_prior=fades)
        phase.load_state_dict({"done": done})
        for norm, average in zip(norms_of(model), averages, strict=True):
            if norm.closes:
                norm.closing.averages.copy_(average)
        phase._checked = True  # it need not tell that no backward ran
        loss = nn.functional.cross_entropy(how(model, x), target)
        phase.step()
        loss.backward()
        results.append([p.grad for p in model.parameters()] + [norm.closing.probe.grad for norm in norms_of(model)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-9)  # gains are float32


@pytest.mark.parametrize("stop", [1, 5, 9])
def test_resume_bit_for_bit(stop):
    model = converted()
    train(model, ClosingPhase(model, 12, start=0.25, end=0.6), range(12))
    first = converted()
    phase = ClosingPhase(first, 12, start=0.25, end=0.6)
    train(first, phase, range(stop))
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "phase": phase.state_dict()}, file)
    file.seek(0)
    saved, second = torch.load(file), converted()
    again = ClosingPhase(second, 12, start=0.25, end=0.6)
    again.load_state_dict(saved["phase"])
    second.load_state_dict(saved["model"])
    train(second, again, range(stop, 12))
    assert_equal(model, second)


def test_a_grad_scaler_changes_nothing():
    model = converted()
    other = copy.deepcopy(model)
    train(model, ClosingPhase(model, 12, start=0.1, end=0.5), range(12))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    phase = ClosingPhase(other, 12, start=0.1, end=0.5, scaler=scaler)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for number in range(12):
        optimizer.zero_grad()
        with accumulate_statistics(other):
            scaler.scale(loss_of(other, *images(number))).backward()
        scaler.step(optimizer)
        scaler.update()
        phase.step()
    assert scaler.get_scale() > 2**10
    assert_equal(model, other, 1e-12)


def test_a_smaller_last_batch_has_the_same_expectation():
    """The same examples twice in x, with a mean loss: half the gradient per value, and the same sums."""
    model = converted()
    for norm in norms_of(model):
        at(0.7, norm)
    other = copy.deepcopy(model)
    x, target = images(0, 4)
    loss_of(model, x, target).backward()
    loss_of(other, torch.cat([x, x]), torch.cat([target, target])).backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12)


def test_a_step_with_nan_changes_no_average():
    model = converted()
    phase = ClosingPhase(model, 10, start=0, end=0.5)
    train(model, phase, range(2), rate=0.0)
    before = [norm.closing.averages.clone() for norm in norms_of(model)]
    (loss_of(model, *images(5)) * float("nan")).backward()
    phase.step()
    for norm, old in zip(norms_of(model), before, strict=True):
        assert torch.equal(norm.closing.averages, old)
        assert not norm.closing.probe.grad.any()


def test_gradients_of_parameters_alone_are_noticed():
    model = converted()
    phase = ClosingPhase(model, 10, start=0, end=0.5)
    torch.autograd.grad(loss_of(model, *images(0)), list(model.parameters()), allow_unused=True)
    with pytest.warns(UserWarning, match=r"no backward has reached a norm.*use loss\.backward\(\)"):
        phase.step()
    phase.step()  # once: a second warning would be an error


def test_averages_forget_the_start():
    """The first step counts in full, the second by a half, and so on down to the momentum."""
    model = converted()
    phase = ClosingPhase(model, 100, start=0, end=1, momentum=0.4)
    found = []
    for number in range(4):
        loss_of(model, *images(number)).backward()
        found.append(norms_of(model)[1].closing.probe.grad[:, :2].clone())
        phase.step()
    average = found[0]
    for weight, new in zip((1 / 2, 0.4, 0.4), found[1:], strict=True):
        average = average + weight * (new - average)
    torch.testing.assert_close(norms_of(model)[1].closing.averages[:, :2], average)


def test_compiled_equals_eager():
    model = converted()
    other = copy.deepcopy(model)
    train(model, ClosingPhase(model, 6, start=0, end=0.5), range(6))
    phase = ClosingPhase(other, 6, start=0, end=0.5)
    compiled = torch.compile(other, backend="aot_eager")
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for number in range(6):
        optimizer.zero_grad()
        loss_of(compiled, *images(number)).backward()
        optimizer.step()
        phase.step()
    assert_equal(model, other, 1e-9)


def test_a_fused_model():
    model = converted()
    other = fuse(copy.deepcopy(model), torch.zeros(2, 3, 9, 9, dtype=F64))
    for each in (model, other):
        train(each, ClosingPhase(each, 6, start=0, end=0.5), range(6))
    assert_equal(model, other, 1e-9)


def test_copies_and_dtypes():
    model = converted().float()
    ClosingPhase(model, 4, start=0, end=0)
    loss_of(model, *[each.float() if each.is_floating_point() else each for each in images(0)]).backward()
    half = copy.deepcopy(model).half()
    closing = norms_of(half)[0].closing
    assert closing.averages.dtype == torch.float32 and closing.probe.dtype == torch.float32
    assert closing.probe.requires_grad and not closing.probe.grad.any()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(2, 2)), "contains no norm of kalmannorm"),
        (converted(to="renorm"), "layer '1': BatchRenorm has a schedule of its own"),
        (nn.Sequential(BatchKalmanNorm2d(3, covariance="full")), "layer '0': a closing phase needs"),
        (nn.Sequential(GhostBatchNorm2d(3, track_running_stats=False)), "needs running statistics"),
    ],
    ids=["none", "renorm", "full", "untracked"],
)  # fmt: skip
def test_what_has_no_closing_phase(model, message):
    with pytest.raises(ValueError, match=message):
        ClosingPhase(model, 4)


@pytest.mark.parametrize(
    "options", [{"start": 0.5, "end": 0.4}, {"start": -1}, {"end": 2}, {"top": 2}, {"momentum": 2}], ids=str
)
def test_wrong_arguments(options):
    with pytest.raises(ValueError, match=next(iter(options)) if len(options) == 1 else "end"):
        ClosingPhase(converted(), 4, **options)


def test_no_second_derivative():
    model, (x, _) = converted(), images(0)
    ClosingPhase(model, 4, start=0, end=0)
    (grad,) = torch.autograd.grad(model(x.requires_grad_()).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    with pytest.raises(RuntimeError, match=r"ClosingPhase\.remove"):
        torch.func.grad(lambda x: model(x).sum())(x.detach())


def settled(model: nn.Module, **options) -> ClosingPhase:
    """The phase of a model that has trained for some steps with λ = 1."""
    phase = ClosingPhase(model, 8, start=0.1, end=0.3, **options)
    train(model, phase, range(8))
    return phase


def test_a_faded_prior_is_no_prior():
    """From the same weights, statistics and averages of gradients, a step is that of batch norm on groups."""
    model = converted()
    settled(model, fade_prior=True)
    other = converted(to="ghost")
    ClosingPhase(other, 8, start=0, end=0)
    other.load_state_dict(model.state_dict(), strict=False)
    x, target = images(9)
    for each in (model, other):
        for norm in norms_of(each):
            norm.forget_gradients()
        each.zero_grad()
        loss_of(each, x, target).backward()
    mine, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    for name, parameter in theirs.items():
        torch.testing.assert_close(mine[name].grad, parameter.grad, rtol=1e-12, atol=1e-12, msg=name)
    gain = mine["4.gain_logit"]
    assert gain.grad is not None and gain.grad.item() == 0  # DDP waits for a gradient
    for mine_norm, their_norm in zip(norms_of(model), norms_of(other), strict=True):
        torch.testing.assert_close(mine_norm.running_var, their_norm.running_var, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(mine_norm.closing.probe.grad, their_norm.closing.probe.grad, rtol=1e-12, atol=1e-12)


def test_a_faded_prior_is_not_computed(monkeypatch):
    model = converted()
    settled(model, fade_prior=True)
    x, target = images(9)
    monkeypatch.setattr("kalmannorm._wiring.program.Program._evaluate", _refuse)
    monkeypatch.setattr("kalmannorm._running.relay.Relay.evaluate", _refuse)
    loss_of(model, x, target).backward()


def _refuse(*args, **kwargs):
    raise AssertionError("a prior was computed")


def test_while_the_prior_fades_the_gain_rises():
    model, other = converted(gain=0.4), converted(gain=0.4 + 0.6 * 0.25)
    for each, fades in ((model, True), (other, False)):
        phase = ClosingPhase(each, 8, start=0, end=1, fade_prior=fades)
        phase.done = 2
        phase._set_strength()
    x, target = images(0)
    for each in (model, other):
        loss_of(each, x, target).backward()
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        if name != "4.gain_logit":
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-9, msg=name)  # gains are float32
    assert model[4].gain_logit.grad.abs() > 0


def test_single_values_train_until_the_end():
    """A norm on (N, C) at m = 1 has no variance in a group. It needs its prior until λ = 1, and then none."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.BatchNorm1d(5)]
    model = convert(nn.Sequential(*layers), torch.randn(4, 3), statistics_batch_size={"1": 2, "": 1})
    phase = ClosingPhase(model, 12, start=0.2, end=0.6, fade_prior=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(12):
        optimizer.zero_grad()
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(number))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        phase.step()
    assert loss.isfinite() and all(value.isfinite().all() for value in state(model).values())


@pytest.mark.parametrize("options", [{"to": "ghost"}, {}, {"fade_prior": True}], ids=str)
def test_recalibration_of_a_settled_model(options):
    """The statistics of one batch make `population` inference what the whole batch normalizes to."""
    options = dict(options)
    fades = options.pop("fade_prior", False)
    model = converted(**options)
    settled(model, **({"fade_prior": True} if fades else {}))
    x, _ = images(3, 64)
    recalibrate(model, [x], progress=False)
    found = model.eval()(x)
    whole = to_batchnorm(model) if options or fades else copy.deepcopy(model)
    if not options and not fades:
        for norm in norms_of(whole):
            norm.end_closing()
            norm.statistics_batch_size = None
    with torch.no_grad():
        expected = whole.train()(x)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # buffers are float32
    assert all(norm.statistics_batch_size == 2 and norm.closes for norm in norms_of(model))


@pytest.mark.parametrize("mode", ["example", "batch"])
def test_other_inference_after_the_phase_warns(mode):
    model = converted()
    settled(model)
    with pytest.warns(UserWarning, match="closing phase.*use 'population'"):
        set_inference(model, mode)


@pytest.mark.parametrize("strength", [0.5, 1.0])
@pytest.mark.parametrize("options", [{}, {"to": "ghost"}, {"fade_prior": True}], ids=str)
@pytest.mark.parametrize("mode", ["batch", "example"])
@pytest.mark.filterwarnings("ignore:set_inference")
def test_inference_normalizes_with_posteriors(mode, options, strength):
    """Eager mode, an exported program and, if no prior fades, the model without the phase give the same."""
    fades = options.get("fade_prior", False)
    model, (x, _) = converted(**{name: value for name, value in options.items() if name == "to"}), images(0)
    phase = ClosingPhase(model, 8, start=0, end=0, top=strength, fade_prior=fades)
    train(model, phase, range(3))
    set_inference(model.eval(), mode)
    before, y = state(model), model(x)
    program = torch.export.export(model, (x,), strict=False)
    torch.testing.assert_close(program.module()(x), y, rtol=1e-9, atol=1e-9)
    y.sum().backward()
    assert not any(norm.closing.probe.grad.any() for norm in norms_of(model))
    assert all(torch.equal(value, before[name]) for name, value in state(model).items())
    if not fades:
        phase.remove()
        torch.testing.assert_close(model(x), y)


def test_a_checkpoint_tells_that_priors_have_faded():
    """A model without a phase, as for recalibration, runs as the one that was saved."""
    model = converted()
    settled(model, fade_prior=True)
    fresh = converted()
    fresh.load_state_dict(model.state_dict())
    assert all(norm.closing.fades and norm.closing.settled for norm in norms_of(fresh))
    x, _ = images(3, 64)
    for each in (model, fresh):
        recalibrate(each, [x], progress=False)
    assert all(torch.equal(value, state(fresh)[name]) for name, value in state(model).items())
    plain = converted()
    settled(plain)
    fresh.load_state_dict(plain.state_dict())
    assert not any(norm.closing.fades for norm in norms_of(fresh))


def test_recalibration_with_a_last_batch_of_one():
    torch.manual_seed(0)
    model = convert(
        nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.BatchNorm1d(5)),
        torch.randn(4, 3),
        statistics_batch_size=2,
    )
    ClosingPhase(model, 8, start=0, end=0, fade_prior=True)
    found = recalibrate(model, [torch.randn(8, 3), torch.randn(1, 3)], progress=False)
    assert found.batches == 2 and set(found.values.values()) == {9}
    assert all(norm.running_var.isfinite().all() for norm in (model[1], model[4]))


def test_gains_get_gradients_whichever_norm_takes_the_long_way():
    """DDP waits for the gradients of all gains, although the first norm of a bundle is frozen or checkpointed."""
    torch.manual_seed(0)
    layers = [part for size in (3, 4, 5, 6) for part in (nn.Conv2d(size, size + 1, 1), nn.BatchNorm2d(size + 1))]
    model = convert(nn.Sequential(*layers).double(), torch.zeros(2, 3, 4, 4, dtype=F64), statistics_batch_size=2)
    ClosingPhase(model, 8, start=0, end=0, fade_prior=True)
    model[3].frozen = True
    x = torch.randn(4, 3, 4, 4, dtype=F64)
    model(x).sum().backward()
    gains = {name: p.grad for name, p in model.named_parameters() if "gain" in name}
    assert all(grad is not None for grad in gains.values()), gains
    model.zero_grad()
    y = checkpoint(model[:4], x, use_reentrant=False)
    model[4:](y).sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "gain" in name)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"start": "a"}, ValueError, "start must be a share"),
        ({"start": 0.6, "end": 0.3}, ValueError, "end must be at least"),
        ({"fade_prior": "yes"}, TypeError, "fade_prior must be True or False, got 'yes'"),
    ],
)
def test_wrong_options_are_named(options, kind, message):
    model = convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.randn(2, 3, 8, 8))
    with pytest.raises(kind, match=message):
        ClosingPhase(model, 10, **options)


def test_weight_standardization_is_true_or_false():
    with pytest.raises(TypeError, match="weight_standardization must be True or False, got 'yes'"):
        convert(
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.randn(2, 3, 8, 8), weight_standardization="yes"
        )


def accumulated(model: nn.Module, phase: ClosingPhase, numbers: range, parts: list[int], divisor: int = 0) -> None:
    """Train with a number of micro-batches for each step. `divisor`: what losses are divided by, 0: their number."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, count in zip(numbers, parts, strict=True):
        optimizer.zero_grad()
        x, target = images(number)
        with accumulate_statistics(model):
            for some, labels in zip(x.chunk(count), target.chunk(count), strict=True):
                (loss_of(model, some, labels) / (divisor or count)).backward()
        optimizer.step()
        phase.step()


def phase_of(model: nn.Module) -> ClosingPhase:
    return ClosingPhase(model, 12, start=0.1, end=0.5)


@pytest.mark.parametrize(("first", "then"), [(1, 4), (4, 1), (2, 4)])
def test_another_number_of_micro_batches_is_refused(first, then):
    model = converted()
    phase = phase_of(model)
    accumulated(model, phase, range(6), [first] * 6)
    with pytest.raises(RuntimeError, match=rf"call phase\.change_micro_batches\({first}, {then}\)"):
        accumulated(model, phase, range(6, 8), [then] * 2)


@pytest.mark.parametrize("then", [1, 4])
def test_the_number_of_micro_batches_may_change_if_the_phase_knows(then):
    model, other = converted(), converted()
    accumulated(model, phase_of(model), range(12), [2] * 12)
    phase = phase_of(other)
    accumulated(other, phase, range(6), [2] * 6)
    phase.change_micro_batches(2, then)
    accumulated(other, phase, range(6, 12), [then] * 6)
    for norm in norms_of(other):
        norm.closing.averages[:, :2] *= then / 2  # they are averages of sums per backward
    assert_equal(model, other, 1e-9)


def test_fewer_micro_batches_at_the_end_of_an_epoch_are_no_change():
    model = converted()
    accumulated(model, phase_of(model), range(12), [4, 4, 4, 4, 2, 4, 4, 4, 4, 2, 4, 4], divisor=4)
    model = converted()
    accumulated(model, phase_of(model), range(8), [4, 2] * 4, divisor=4)


def test_a_resumed_phase_knows_the_number_of_micro_batches():
    model, other = converted(), converted()
    phase, again = phase_of(model), phase_of(other)
    accumulated(model, phase, range(6), [2] * 6)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(phase.state_dict())
    accumulated(other, again, range(6, 8), [2] * 2)
    again.load_state_dict(phase.state_dict())
    with pytest.raises(RuntimeError, match="has changed from 2 to 4"):
        accumulated(other, again, range(6, 8), [4] * 2)
    again.load_state_dict({"done": 6})  # of a phase that did not know it
    accumulated(other, again, range(6, 8), [4] * 2)


def test_layers_that_do_not_always_run_are_no_change():
    """The second norm runs in some steps only, or several times."""
    model = converted()
    phase = ClosingPhase(model, 12, start=0, end=0.5)
    for again in (0, 0, 2, 2, 1, 1, 0, 0):
        y = model[:3](images(again)[0])
        for _ in range(again):
            y = y + 0 * model[3:6](y).sum()
        y.sum().backward()
        phase.step()


@pytest.mark.parametrize("given", [(0, 1), (1, 2.5)])
def test_numbers_of_micro_batches_are_checked(given):
    with pytest.raises((TypeError, ValueError), match="before" if given[0] == 0 else "now"):
        ClosingPhase(converted(), 4).change_micro_batches(*given)


class ByOrder:
    """An average as many scripts compute it: the tensors of both state dicts in their order."""

    def __init__(self, model: nn.Module) -> None:
        self.module = copy.deepcopy(model)

    def update_parameters(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.module.state_dict().values(), model.state_dict().values(), strict=False):
            mine.copy_(mine + 0.25 * (theirs - mine) if mine.is_floating_point() else theirs)


def exponential(mine, theirs, _):
    return mine + 0.25 * (theirs - mine) if mine.is_floating_point() else theirs


AVERAGES = {
    "SWA": AveragedModel,
    "EMA": partial(AveragedModel, avg_fn=exponential),
    "EMA of buffers": partial(AveragedModel, avg_fn=exponential, use_buffers=True),
    "by order": ByOrder,
}


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("made", [-1, 0, 2, 4], ids=["before the phase", "before it begins", "at its start", "in it"])
def test_an_average_may_be_made_at_any_time(average, made):
    """It equals the average of the same values in a model that never had a phase when the average was made."""
    model = converted()
    averages = {made: AVERAGES[average](model)} if made < 0 else {}
    phase = ClosingPhase(model, 8, start=0.25, end=0.75, fade_prior=True)
    plain = None
    for number in range(8):
        if number == made:
            averages[made] = AVERAGES[average](model)
        if number == max(made, 0):
            plain = converted()
            names = plain.state_dict().keys()
            plain.load_state_dict({name: model.state_dict()[name] for name in names})
            reference = AVERAGES[average](plain)
        train(model, phase, range(number, number + 1))
        if plain is not None:
            plain.load_state_dict({name: value for name, value in model.state_dict().items() if name in names})
            with torch.no_grad():
                averages[made].update_parameters(model)
                reference.update_parameters(plain)
    mine = averages[made].module.state_dict()
    for name, value in reference.module.state_dict().items():
        assert torch.equal(mine[name], value), name
    averages[made].module.eval()(images(0)[0])


def test_a_phase_adds_no_buffer_and_only_ends_the_state_dict():
    model = converted()
    buffers, keys = [name for name, _ in model.named_buffers()], list(model.state_dict())
    phase = ClosingPhase(model, 4, start=0, end=0, fade_prior=True)
    assert [name for name, _ in model.named_buffers()] == buffers
    assert list(model.state_dict())[: len(keys)] == keys and len(model.state_dict()) == len(keys) + 6
    wrapped = nn.Sequential(model, nn.Linear(3, 3)).state_dict()
    assert [f"0.{key}" for key in keys] == list(wrapped)[: len(keys)]
    pickled = io.BytesIO()
    torch.save(model, pickled)
    phase.remove()
    assert list(model.state_dict()) == keys
    pickled.seek(0)
    again = torch.load(pickled, weights_only=False)
    assert norms_of(again)[0].closing.strength == 1 and len(again.state_dict()) == len(keys) + 6


def test_an_average_from_before_the_phase_can_take_part_in_it():
    """`recalibrate` has to know that the model was trained with running statistics."""
    model = converted()
    averaged = AveragedModel(model)
    settled(model, fade_prior=True)
    averaged.update_parameters(model)
    averaged.module.load_state_dict({**model.state_dict(), **averaged.module.state_dict()})
    other = copy.deepcopy(model)
    for each in (averaged.module, other):
        recalibrate(each, [images(3, 64)[0]], progress=False)
    assert_equal(averaged.module, other)


@pytest.mark.parametrize("assign", [False, True])
def test_the_state_of_a_phase_is_loaded_in_both_ways(assign):
    model, other = converted(), converted()
    settled(model)
    other.load_state_dict(model.state_dict(), assign=assign)
    assert_equal(model, other)
    with pytest.raises(RuntimeError, match=r"Missing key.*closing\.averages"):
        other.load_state_dict({k: v for k, v in model.state_dict().items() if "1.closing.averages" not in k})


def loop(model: nn.Module, steps: int, *, micro_batches: int = 1, calls=lambda part, parts: None) -> None:
    """A training loop of a user. `calls` is called after every micro-batch, and after the optimizer's step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for number in range(steps):
        x, target = images(number, 4)
        for part in range(micro_batches):
            (loss_of(model, x, target) / micro_batches).backward()
            if part == micro_batches - 1:
                optimizer.step()
                optimizer.zero_grad()
            calls(part + 1, micro_batches)


@pytest.mark.parametrize("notices", [nn.Module.eval, nn.Module.state_dict], ids=["eval", "state_dict"])
@pytest.mark.parametrize("start", [0, 0.5])
def test_a_forgotten_step_is_noticed(start, notices):
    model = converted()
    phase = ClosingPhase(model, 40, start=start, end=1)
    loop(model, 12)
    with pytest.warns(UserWarning, match=r"Call phase\.step\(\) after every optimizer step") as found:
        notices(model)
    assert len(found) == 1
    notices(model.train())  # once: a second warning would be an error
    assert phase.done == 0


def test_a_removed_phase_needs_no_steps():
    model = converted()
    ClosingPhase(model, 40, start=0).remove()
    loop(model, 12)
    model.eval()


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_a_step_per_micro_batch_is_noticed(micro_batches):
    model = converted()
    phase = ClosingPhase(model, 100, start=0, end=1)
    with pytest.warns(UserWarning, match="more often than the optimizer steps") as found:
        loop(model, 10, micro_batches=micro_batches, calls=lambda part, parts: phase.step())
    assert len(found) == 1


def test_two_steps_per_optimizer_step_are_noticed():
    model = converted()
    phase = ClosingPhase(model, 100, start=0, end=1)
    with pytest.warns(UserWarning, match="more often than the optimizer steps"):
        loop(model, 10, calls=lambda part, parts: (phase.step(), phase.step()))


def test_usual_loops_are_no_mistake():
    """Accumulation, evaluations between steps, a step before the optimizer's, and a resumed training."""
    model = converted()
    phase = ClosingPhase(model, 40, start=0.2, end=0.5)
    loop(model, 12, micro_batches=3, calls=lambda part, parts: part == parts and (model.eval().train(), phase.step()))
    other = converted()
    again = ClosingPhase(other, 40, start=0.2, end=0.5)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(phase.state_dict())
    again.change_micro_batches(3, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for number in range(12):
        optimizer.zero_grad()
        loss_of(other, *images(number)).backward()
        again.step()
        optimizer.step()
        other.eval().train()
        other.state_dict()
    for number in range(12):  # an optimizer that writes to `data`, whose changes are not counted
        loss_of(other, *images(number)).backward()
        for parameter in other.parameters():
            parameter.data.sub_(0.01 * parameter.grad)
        again.step()


def test_steps_that_a_grad_scaler_skips_are_no_mistake():
    model = converted()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4)
    phase = ClosingPhase(model, 100, start=0, end=1, scaler=scaler)
    optimizer, skipped = torch.optim.SGD(model.parameters(), lr=0.01), 0
    for number in range(60):
        optimizer.zero_grad()
        before = scaler.get_scale()
        loss = scaler.scale(loss_of(model, *images(number)))
        loss.backward()
        if number < 12 or number % 5 == 0:
            model[0].weight.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        phase.step()
    assert skipped == 21


def test_the_last_of_two_phases_counts():
    model = converted()
    first = ClosingPhase(model, 10, start=0, end=1)
    second = ClosingPhase(model, 10, start=0, end=0)
    with pytest.raises(RuntimeError, match="another ClosingPhase was made later"):
        first.step()
    first.remove()
    loss_of(model, *images(0)).backward()
    second.step()
    assert norms_of(model)[0].closing.strength == 1


def test_a_phase_that_was_not_resumed_is_noticed():
    model, other = converted(), converted()
    settled(model)
    phase = ClosingPhase(other, 8, start=0.5, end=1)
    other.load_state_dict(model.state_dict())
    loss_of(other, *images(0)).backward()
    with pytest.warns(UserWarning, match=r"at step 0 of 8.*call phase\.load_state_dict"):
        phase.step()
    phase.step()
    fresh = converted()
    fresh.load_state_dict(model.state_dict())
    phase = ClosingPhase(fresh, 8, start=0.5, end=1)
    phase.remove()
    phase.step()
    assert not norms_of(fresh)[0].closes


def test_a_model_with_a_phase_is_copied_and_freed():
    model = converted()
    phase = ClosingPhase(model, 8, start=0, end=1)
    assert copy.deepcopy(model)[1].phase is None and to_batchnorm(model, inplace=True)[1] is model[1]
    torch.save(model, io.BytesIO())
    assert phase.begun and not model._state_dict_hooks


@pytest.mark.parametrize("prepared", [False, True], ids=["first", "after other forwards"])
@pytest.mark.parametrize("options", [{"to": "ghost"}, {}, {"fade_prior": True}, {"transition": "learned"}], ids=str)
def test_update_bn_after_the_phase(options, prepared):
    """It gives the statistics that `recalibrate` gives. Training then continues as before."""
    options = dict(options)
    fades = {"fade_prior": options.pop("fade_prior", False)}
    model = converted(**options)
    phase = settled(model, **fades)
    other = copy.deepcopy(model)
    if prepared:
        train(model, phase, range(8, 10), rate=0.0)
    data = [images(number, size)[0] for number, size in ((3, 8), (4, 8), (5, 6))]
    recalibrate(other, data, progress=False)
    update_bn(data, model)
    for mine, theirs in zip(norms_of(model), norms_of(other), strict=True):
        torch.testing.assert_close(mine.running_mean, theirs.running_mean, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(mine.running_var, theirs.running_var, rtol=1e-9, atol=1e-9)
        theirs.closing.averages.copy_(mine.closing.averages)
    results = []
    for each in (model, other):
        each.train().zero_grad()
        loss_of(each, *images(9)).backward()
        results.append([p.grad for p in each.parameters()])
        assert not any(norm.reestimates for norm in norms_of(each))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-9)


def test_update_bn_while_the_strength_rises():
    """The statistics are those of the groups' posteriors, as without a phase."""
    model = converted()
    other = copy.deepcopy(model)
    ClosingPhase(model, 8, start=0, end=0, top=0.5)
    data = [images(number)[0] for number in (3, 4)]
    for each in (model, other):
        update_bn(data, each)
    for mine, theirs in zip(norms_of(model), norms_of(other), strict=True):
        torch.testing.assert_close(mine.running_var, theirs.running_var)


def strengths_of(steps: int, start: float, end: float) -> list[float]:
    phase, found = ClosingPhase(converted(), steps, start=start, end=end), []
    for phase.done in range(steps):
        found.append(phase.strength)
    return found


def linear(steps: int, start: float, end: float) -> list[float]:
    shares = [done / steps for done in range(steps)]
    return [0.0 if s < start else 1.0 if s >= end else (s - start) / (end - start) for s in shares]


@pytest.mark.parametrize(
    ("steps", "start", "end"),
    [
        (1000, 0.02, 0.12),
        (5865, 0.02, 0.12),
        (40, 0.3, 0.6),
        (330, 0.05, 0.35),
        (330, 0.15, 0.45),
        (10, 0, 0),
        (50, 1, 1),
    ],
)
def test_phases_of_usual_length_have_the_given_schedule(steps, start, end):
    assert strengths_of(steps, start, end) == linear(steps, start, end)


@pytest.mark.parametrize(
    ("steps", "start", "end", "full"),
    [(600, 0.02, 0.12, 0.02 + 100 / 600), (300, 0.02, 0.12, 0.32), (300, 0.9, 0.95, 1.0), (20, 0.5, 0.6, 0.8)],
)
def test_a_rise_in_few_steps_takes_longer(steps, start, end, full):
    """At least 100 steps, or 30 % of the training. It is complete at the end of the training."""
    assert strengths_of(steps, start, end) == pytest.approx(linear(steps, start, full))
