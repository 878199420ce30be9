"""Tests of settled norms on the short way, for two modules: one runs them with PyTorch's operations, one with kernels.

A norm is settled at the end of its closing phase, where it normalizes with running statistics.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from kalmannorm import ClosingPhase, convert, fuse
from kalmannorm._model.settings import norms
from kalmannorm._running.prior_bundles import PriorBundles
from kalmannorm._running.short_way import ShortForward
from support import short_way_cases as cases
from support.bundled_nets import IMAGE, Blocks, Branches
from support.poisoned import DEVICE, poison
from support.short_way import count_short, the_long_way
from support.wide import narrow


def settle(model, **options):
    """End a closing phase at once, with statistics and averages of gradients as after some steps."""
    phase = ClosingPhase(model, 100, start=0, end=0, process_group=None, **options)
    rng = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, norm in norms(model):
            drawn = [torch.randn(norm.num_features, generator=rng) for _ in range(4)]
            norm.running_mean.copy_(0.3 * drawn[0])
            norm.running_var.copy_(drawn[1].exp())
            norm.closing.averages.copy_(torch.stack([*drawn[2:], torch.full_like(drawn[0], 7)], 1))
    return phase


def small():
    model, x = cases.small()
    return model, x, settle(model)


def own_step(model, x):
    """As that of the cases of the short way, with the gradients that the phase collects."""
    for _, norm in norms(model):
        norm.forget_gradients()
    found = cases.own_step(model, x)
    probes = {f"probe {name}": norm.closing.probe.grad.clone() for name, norm in norms(model) if norm.closes}
    return found | probes


def step(model, x):
    return own_step(copy.deepcopy(model), x)


@pytest.mark.parametrize("fade", [False, True])
@pytest.mark.parametrize("make", [Blocks, Branches])
@pytest.mark.parametrize("layout", narrow([torch.contiguous_format, torch.channels_last], [torch.channels_last]))
def test_equals_the_long_way(make, layout, fade, monkeypatch):
    model = cases.converted(make(), IMAGE).to(DEVICE).to(memory_format=layout)
    settle(model, fade_prior=fade)
    x = torch.randn(4, *IMAGE[1:], device=DEVICE).to(memory_format=layout)
    taken = count_short(monkeypatch)
    poison(monkeypatch)
    found = step(model, x)
    assert len(taken) == len(list(norms(model)))
    cases.assert_same(found, the_long_way(monkeypatch, step, model, x))


def test_only_some_priors_have_faded(monkeypatch):
    """A norm in another state takes the long way, and the result is right."""
    model, x, _ = small()
    model.norm1.settle_closing(True, fades=True)
    taken = count_short(monkeypatch)
    found = step(model, x)
    assert len(taken) == len(list(norms(model))) - (model.norm1.gain_logit is not None)
    cases.assert_same(found, the_long_way(monkeypatch, step, model, x))


def test_a_prior_that_comes_back(monkeypatch):
    model, x, _ = small()
    for fades in (True, False, True):
        for _, norm in norms(model):
            norm.settle_closing(True, fades=fades)
        found = step(model, x)
        cases.assert_same(found, the_long_way(monkeypatch, step, model, x))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_residual_and_relu(residual, relu, monkeypatch):
    class Net(cases.Small):
        def forward(self, x):
            x = self.norm0(self.conv0(x)).relu()
            x = self.conv1(x)
            return self.conv2(self.norm1(x, residual=x if residual else None, relu=relu))

    model, x, _ = small()
    model.__class__ = Net
    taken = count_short(monkeypatch)
    found = step(model, x)
    assert len(taken) == 2
    cases.assert_same(found, the_long_way(monkeypatch, step, model, x))


def test_several_steps(monkeypatch):
    """Parameters, statistics and averages move, and a smaller last batch comes and goes."""
    taken = count_short(monkeypatch)

    def train():
        torch.manual_seed(0)
        model, x, phase = small()
        optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        for batch in (x, -x, x[:3], 2 * x):
            cases.own_step(model, batch)
            optimizer.step()
            phase.step()
        return own_step(model, x)

    found = train()
    assert len(taken) == 5 * 3
    cases.assert_same(found, the_long_way(monkeypatch, train))


def removed(model, phase):
    phase.remove()


def unsettled(model, phase):
    phase.top = 0.5
    phase.step()


def with_present(model, phase):
    phase.present = 0.5
    phase.step()


def without_present_again(model, phase):
    with_present(model, phase)
    phase.present = 0.0
    phase.step()


def changed(change):
    def change_settings(model, phase):
        cases.CHANGES[change][0](model)

    return change_settings


CHANGES = {
    "removed": (removed, 3),
    "strength below 1": (unsettled, 0),
    "present": (with_present, 0),
    "no present again": (without_present_again, 3),
    **{name: (changed(name), 3) for name in ("eps", "momentum", "statistics batch", "memory", "buffers", "parameters")},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_prepared_expires(change, monkeypatch):
    """After steps on the short way a setting changes. The next step sees it, on the way that fits."""
    make, expected = CHANGES[change]

    def run():
        torch.manual_seed(0)
        model, x, phase = small()
        own_step(model, x)
        make(model, phase)
        taken.clear()
        return own_step(model, x)

    taken = count_short(monkeypatch)
    found = run()
    assert len(taken) == expected
    cases.assert_same(found, the_long_way(monkeypatch, run))


def test_the_phase_settles_during_training(monkeypatch):
    """The norms leave the short way while λ rises, and come back."""
    taken = count_short(monkeypatch)

    def run():
        torch.manual_seed(0)
        model, x = cases.small()
        phase = ClosingPhase(model, 5, start=0.2, end=0.6, process_group=None)
        counts = []
        for _ in range(5):
            taken.clear()
            found = cases.own_step(model, x)
            counts.append(len(taken))
            phase.step()
        return counts, found

    counts, found = run()
    assert counts == [3, 0, 0, 3, 3]
    cases.assert_same(found, the_long_way(monkeypatch, run)[1])


def test_units_of_the_loss(monkeypatch):
    """The averages of gradients are used in the units of a GradScaler."""
    model, x, _ = small()
    with torch.no_grad():
        for _, norm in norms(model):
            norm.closing.scale.fill_(8)
    found = step(model, x)
    cases.assert_same(found, the_long_way(monkeypatch, step, model, x))
    with torch.no_grad():
        for _, norm in norms(model):
            norm.closing.scale.fill_(1)
    assert not torch.allclose(found["x"], step(model, x)["x"])


def seen_in_the_backward(model, x):
    """A dispatch mode sees the backward as registered ops."""

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names = []
    y = model(x)
    with Seen():
        y.square().sum().backward()
    assert sum("settled_backward" in name for name in names) == 3
    return {name: p.grad for name, p in model.named_parameters()}


def checkpointed(model, x):
    x = x.clone().requires_grad_()
    checkpoint(model, x, use_reentrant=False).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()} | {**model.state_dict(prefix="now "), "x": x.grad}


def statistics_move_before_the_backward(model, x):
    """The backward uses the statistics and averages of its forward."""
    y = model(x)
    with torch.no_grad():
        for _, norm in norms(model):
            norm.running_mean += 1
            norm.closing.averages += 1
    y.square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


WORKS = [
    seen_in_the_backward, checkpointed, statistics_move_before_the_backward,
    cases.twice_backward, cases.some_gradients, cases.two_forwards, cases.called_with_tensors, cases.without_gradients,
    cases.part_of_the_model,
]  # fmt: skip


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__)
def test_unusual_steps(work, monkeypatch):
    model, x, _ = small()
    own_step(model, x)
    model.zero_grad()
    twin = copy.deepcopy(model)
    cases.assert_same(work(model, x), the_long_way(monkeypatch, work, twin, x))


class Loop(nn.Module):
    """A norm that runs twice in a forward. Its second run reads the statistics that the first one has updated."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.BatchNorm2d(2)

    def forward(self, x):
        return self.last(self.norm(self.conv(self.norm(x))))


@pytest.mark.parametrize("to", ["kalman", "ghost"])
def test_a_norm_that_runs_again(to, monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(4, 2, 5, 5, device=DEVICE)
    model = convert(Loop().to(DEVICE), x, statistics_batch_size=2, to=to)
    settle(model)
    found = step(model, x)
    cases.assert_same(found, the_long_way(monkeypatch, step, model, x))


def other_dtype(model):
    model.norm1.running_var = model.norm1.running_var.double()


def strided(model):
    model.norm1._buffers["running_mean"] = torch.stack([model.norm1.running_mean] * 2, 1)[:, 0]


def untracked_in_another_dtype(model):
    for name in ("running_mean", "running_var"):
        setattr(model.norm1, name, getattr(model.norm1, name).double())
    model.norm1.track_running_stats = False


@pytest.mark.parametrize("change", [other_dtype, strided, untracked_in_another_dtype], ids=lambda each: each.__name__)
def test_buffers_that_kernels_cannot_read(change, monkeypatch):
    model, x, _ = small()
    own_step(model, x)
    change(model)
    twin = copy.deepcopy(model)
    taken = count_short(monkeypatch)

    def run(model):
        with torch.no_grad():
            return {"y": model(x)}

    found = run(model)
    assert len(taken) == 2
    cases.assert_same(found, the_long_way(monkeypatch, run, twin))


def test_no_second_derivative():
    model, x, _ = small()
    x.requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_fused_and_saving_memory(monkeypatch):
    """Outputs that are computed again need the long way. The results are the same."""
    model, x, _ = small()
    saving = fuse(model, x, save_memory=True)
    settle(saving)
    found = step(saving, x)
    cases.assert_same(found, the_long_way(monkeypatch, step, saving, x))


def collected(model):
    return [norm.closing.probe.grad.clone() for _, norm in norms(model)]


def test_what_is_collected_in_other_backwards(monkeypatch):
    """Only `backward` adds to what was collected. Each one adds again."""
    model, x, _ = small()
    states = [norm.closing for _, norm in norms(model)]
    own_step(model, x)
    once = collected(model)
    assert all((each[:, 2] == 1).all() for each in once)
    loss = model(x).square().sum()
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward(inputs=list(model.parameters()), retain_graph=True)
    found = torch.autograd.grad(loss, [state.probe for state in states], retain_graph=True)
    assert all(torch.equal(now, old) for now, old in zip(collected(model), once, strict=True))
    for state in states:
        state.probe.grad.zero_()
    loss.backward(retain_graph=True)
    first = collected(model)
    for one, other in zip(first, found, strict=True):
        torch.testing.assert_close(one, other)
    loss.backward()
    for now, old in zip(collected(model), first, strict=True):
        torch.testing.assert_close(now, 2 * old)


def test_frozen_parameters_collect_too(monkeypatch):
    model, x, _ = small()
    for _, norm in norms(model):
        for parameter in (norm.weight, norm.bias):
            parameter.requires_grad_(False)
    taken = count_short(monkeypatch)
    found = step(model, x)
    assert len(taken) == len(list(norms(model)))
    cases.assert_same(found, the_long_way(monkeypatch, step, model, x))


def test_a_norm_on_the_long_way_collects_once(monkeypatch):
    """Its bundle does not collect for it."""
    model, x, _ = small()
    expected = the_long_way(monkeypatch, step, model, x)
    normalize = ShortForward.normalize

    def some(self, call, target, norm, *given):
        return None if norm is last else normalize(self, call, target, norm, *given)

    last = list(norms(model))[-1][1]
    monkeypatch.setattr(ShortForward, "normalize", some)
    cases.assert_same(own_step(model, x), expected)


def test_one_group(monkeypatch):
    """Kernels then write the gradients of all rows into one memory."""
    _, x, taken = cases.one_group(monkeypatch)
    model, _ = cases.small(statistics_batch_size=4)
    settle(model)
    found = step(model, x)
    assert bool(taken) == has_priors(model)
    assert not taken or cases.shares_rows(taken)
    cases.assert_same(found, the_long_way(monkeypatch, step, model, x))


def has_priors(model):
    """Then norms are in bundles, unless the priors have faded."""
    return any(getattr(norm, "prior_features", None) is not None for _, norm in norms(model))


def test_without_priors_no_bundle_runs(monkeypatch):
    """The gradients of γ and β of all norms are parts of one memory, and belong to the parameters alone."""
    monkeypatch.setattr(PriorBundles, "fill", None)
    model, x = cases.small()
    settle(model, fade_prior=True)
    cases.own_step(model, x)
    grads = [p.grad for _, norm in norms(model) for p in (norm.weight, norm.bias)]
    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 1
    before = [grad.clone() for grad in grads]
    cases.own_step(model, 2 * x)
    assert all(torch.equal(now, old) for now, old in zip(grads, before, strict=True))  # another step has other memory


def faded():
    model, x = cases.small()
    settle(model, fade_prior=True)
    return model, x


def without_affine(model):
    model.norm1.weight = model.norm1.bias = None


def without_bias(model):
    model.norm1.bias = None


def other_memory(model):
    model.norm1.weight.data = model.norm1.weight.data.clone()


def other_layout(model):
    model.norm1.weight.data = torch.stack([model.norm1.weight.data] * 2, 1)[:, 0]


def computed(model):
    torch.nn.utils.parametrize.register_parametrization(model.norm1, "weight", Doubled())


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


PARAMETERS = {without_affine: 0, without_bias: 0, other_memory: 0, other_layout: 1, computed: 1}


@pytest.mark.parametrize("change", PARAMETERS, ids=lambda each: each.__name__)
def test_parameters_that_change(change, monkeypatch):
    """The number of norms that kernels cannot read any more. They take the long way."""
    model, x = faded()
    own_step(model, x)
    twin = copy.deepcopy(model)
    change(model)
    change(twin)
    taken = count_short(monkeypatch)
    found = own_step(model, x)
    assert len(taken) == len(list(norms(model))) - PARAMETERS[change]
    cases.assert_same(found, the_long_way(monkeypatch, own_step, twin, x))


def test_gains_that_are_not_read_get_zero(monkeypatch):
    """DDP waits for a gradient of each parameter. Each gain has memory of its own, because optimizers change it."""
    model, x = faded()
    cases.own_step(model, x)
    gains = [norm.gain_logit for _, norm in norms(model) if getattr(norm, "gain_logit", None) is not None]
    assert bool(gains) == has_priors(model)
    for gain in gains:
        assert gain.grad.shape == gain.shape
        assert (gain.grad == 0).all()
        gain.grad += 1
    assert all((gain.grad == 1).all() for gain in gains)


@pytest.mark.parametrize("work", [work for work in WORKS if work is not checkpointed], ids=lambda work: work.__name__)
def test_unusual_steps_without_priors(work, monkeypatch):
    model, x = faded()
    own_step(model, x)
    model.zero_grad()
    twin = copy.deepcopy(model)
    cases.assert_same(work(model, x), the_long_way(monkeypatch, work, twin, x))


def test_other_backwards_without_priors(monkeypatch):
    """As above: only `backward` adds to what was collected, and a gradient that was taken away is made again."""
    model, x = faded()
    states = [norm.closing for _, norm in norms(model)]
    own_step(model, x)
    once = collected(model)
    assert all((each[:, 2] == 1).all() for each in once)
    loss = model(x).square().sum()
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward(inputs=list(model.parameters()), retain_graph=True)
    found = torch.autograd.grad(loss, [state.probe for state in states], retain_graph=True)
    assert all(torch.equal(now, old) for now, old in zip(collected(model), once, strict=True))
    states[0].probe.grad = None
    for state in states[1:]:
        state.probe.grad.zero_()
    loss.backward()
    for one, other in zip(collected(model), found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_backward_inside_another_one_without_priors():
    """It has gradients of its own: a hook differentiates the same graph in the middle of the backward."""
    model, x = faded()
    inner = []

    def differentiate(grad):
        if not inner:
            inner.append(None)
            inner[0] = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        return grad

    middle = []
    handle = model.norm1.register_forward_hook(lambda module, given, y: middle.append(y))
    loss = model(x).square().sum()
    handle.remove()
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    middle[0].register_hook(differentiate)
    model.zero_grad()
    loss.backward(retain_graph=True)
    for parameter, other, grad in zip(model.parameters(), inner[0], expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
        torch.testing.assert_close(other, grad)


def other_dtype_of_the_state(model):
    for _, norm in norms(model):
        norm.closing.double()


def loaded_in_another_dtype(model):
    state = {name: t.double() if name.endswith("averages") else t for name, t in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


@pytest.mark.parametrize("fade", [False, True])
@pytest.mark.parametrize("change", [other_dtype_of_the_state, loaded_in_another_dtype], ids=lambda each: each.__name__)
def test_a_state_that_kernels_cannot_read(change, fade, monkeypatch):
    model, x = cases.small()
    settle(model, fade_prior=fade)
    own_step(model, x)
    twin = copy.deepcopy(model)
    change(model)
    change(twin)
    taken = count_short(monkeypatch)
    found = own_step(model, x)
    assert not taken
    cases.assert_same(found, the_long_way(monkeypatch, own_step, twin, x))


@pytest.mark.parametrize("strided", [False, True])
def test_parameters_that_get_other_memory_before_the_backward(strided, monkeypatch):
    model, x = faded()
    own_step(model, x)
    model.zero_grad()
    twin = copy.deepcopy(model)

    def work(model):
        y = model(x)
        data = model.norm1.weight.data
        model.norm1.weight.data = torch.stack([data] * 2, 1)[:, 0] if strided else data.clone()
        y.square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    cases.assert_same(work(model), the_long_way(monkeypatch, work, twin))


def test_a_parametrization_is_evaluated_once():
    class Counted(nn.Module):
        def forward(self, x):
            calls.append(None)
            return x * 1.5

    calls = []
    model, x = faded()
    torch.nn.utils.parametrize.register_parametrization(model.norm1, "weight", Counted())
    own_step(model, x)
    calls.clear()
    own_step(model, x)
    assert len(calls) == 1
