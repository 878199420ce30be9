"""Tests of the short way, for two modules: one runs them with this machine's operations, one with Triton's kernels."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError, checkpoint

from kalmannorm import GhostBatchNorm2d, accumulate_statistics, freeze_statistics
from kalmannorm._model.settings import norms
from kalmannorm._ops import dispatch
from kalmannorm._ops.normalize.row_kernels import RowGradients
from support import bundled_nets
from support.bundled_nets import IMAGE, Blocks, Branches
from support.poisoned import DEVICE, poison
from support.short_way import count_repeated, count_short, the_long_way
from support.wide import narrow


class Small(nn.Module):
    """Three norms. Kalman norms have a prior, except the first."""

    def __init__(self):
        super().__init__()
        self.conv0, self.norm0 = nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4)
        self.conv1, self.norm1 = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8)

    def forward(self, x):
        x = self.norm0(self.conv0(x)).relu()
        x = self.norm1(self.conv1(x)).relu()
        return self.norm2(self.conv2(x))


OPTIONS = {}
"""Options of all conversions. A module of tests may set others."""
LEARNED = "transition", "learned"


def converted(net, shape, **options):
    """A converted model. The matrices of learned transitions, initially zero, become random."""
    model = bundled_nets.converted(net, shape, **OPTIONS, **options)
    with torch.no_grad():
        for _, norm in norms(model):
            for parameter in () if getattr(norm, "transition", None) is None else norm.transition.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(torch.randn_like(parameter) / parameter.shape[1] ** 0.5)
    return model


def small(**options):
    """In channels_last, where few programs of a kernel compute a norm: the interpreter runs them one by one."""
    model = converted(Small(), (4, 2, 5, 5), **options).to(DEVICE).to(memory_format=torch.channels_last)
    return model, torch.randn(4, 2, 5, 5, device=DEVICE).to(memory_format=torch.channels_last)


def step(model, x):
    """Output, gradients and statistics of one training step of a copy."""
    return own_step(copy.deepcopy(model), x)


def own_step(model, x):
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    (y.square().sum() + y.sum()).backward()
    found = {"y": y.detach(), "x": x.grad} | {f"d {name}": p.grad for name, p in model.named_parameters()}
    return {name: None if t is None else t.clone() for name, t in (found | dict(model.named_buffers())).items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] is None) == (value is None), name
        if value is not None:
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def later(model):
    """All norms but the first."""
    return [norm for _, norm in norms(model)][1:]


@pytest.mark.parametrize("make", [Blocks, Branches])
@pytest.mark.parametrize("layout", narrow([torch.contiguous_format, torch.channels_last], [torch.channels_last]))
def test_equals_the_long_way(make, layout, monkeypatch):
    model = converted(make(), IMAGE).to(DEVICE).to(memory_format=layout)
    x = torch.randn(4, *IMAGE[1:], device=DEVICE).to(memory_format=layout)
    taken = count_short(monkeypatch)
    poison(monkeypatch)
    found = step(model, x)
    assert len(taken) == len(list(norms(model)))
    assert_same(found, the_long_way(monkeypatch, step, model, x))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_residual_and_relu(residual, relu, monkeypatch):
    class Net(Small):
        def forward(self, x):
            x = self.norm0(self.conv0(x)).relu()
            x = self.conv1(x)
            return self.conv2(self.norm1(x, residual=x if residual else None, relu=relu))

    model, x = small()
    model.__class__ = Net
    taken = count_short(monkeypatch)
    found = step(model, x)
    assert taken
    assert_same(found, the_long_way(monkeypatch, step, model, x))


def one_group(monkeypatch):
    """A net whose norms have one group each, so kernels write all gradients of rows into one memory. It is listed."""
    taken, original = [], RowGradients.take

    def take(self, arrived):
        taken.append(original(self, arrived))
        return taken[-1]

    monkeypatch.setattr(RowGradients, "take", take)
    model, x = small(statistics_batch_size=4)
    return model, x, taken


def outputs_of(module):
    """The outputs of its forwards, from now on."""
    found = []
    module.register_forward_hook(lambda module, inputs, y: found.append(y))
    return found


def shares_rows(taken):
    """With Triton's kernels. Others have memory of their own, and their gradients are copied together."""
    kernels = dispatch.has_kernels(torch.device(DEVICE)) and "learned" not in OPTIONS.values()
    return all(each is not None for each in taken) if kernels else taken[-1] is None


def test_one_group(monkeypatch):
    model, x, taken = one_group(monkeypatch)
    found = step(model, x)
    assert taken and shares_rows(taken)
    assert_same(found, the_long_way(monkeypatch, step, model, x))


def test_two_backwards_of_one_group(monkeypatch):
    """The second one must not overwrite what the first one gave to parameters."""
    model, x, taken = one_group(monkeypatch)
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    held = [p.grad for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    (4 * loss).backward()  # a power of two, so nothing is rounded
    assert shares_rows(taken)
    for (name, p), old in zip(model.named_parameters(), held, strict=True):
        assert torch.equal(old, once[name]), name
        assert torch.equal(p.grad, 4 * old), name


def test_a_backward_of_one_group_that_does_not_reach_the_rows(monkeypatch):
    """What it wrote is left there, and the next backward does not take it for its own."""
    model, x, taken = one_group(monkeypatch)
    x.requires_grad_()
    expected = own_step(copy.deepcopy(model), x.detach())
    taken.clear()
    y = model(x)
    loss = y.square().sum() + y.sum()
    torch.autograd.grad(7 * loss, x, retain_graph=True)
    assert not taken
    loss.backward()
    assert taken and shares_rows(taken)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[f"d {name}"])


def test_a_backward_of_one_group_inside_another(monkeypatch):
    """As of a hook that differentiates something else, through the same graph. It has memory of its own."""
    model, x, _ = one_group(monkeypatch)
    inner = outputs_of(model.norm1)

    def nested(model):
        model.zero_grad()
        inner.clear()
        y = model(x)
        other, first = (3 * y).square().sum(), [True]

        def differentiate(grad):
            if first:  # not in its own backward
                first.clear()
                torch.autograd.grad(other, list(model.parameters()), retain_graph=True)

        inner[0].register_hook(differentiate)
        y.square().sum().backward(retain_graph=True)
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    assert_same(nested(model), the_long_way(monkeypatch, nested, model))


def test_rows_of_one_group_that_do_not_all_arrive(monkeypatch):
    """A loss that needs the first norms only."""
    model, x, taken = one_group(monkeypatch)
    inner = outputs_of(model.norm1)

    def partial(model):
        model.zero_grad()
        inner.clear()
        model(x)
        inner[0].square().sum().backward()
        return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}

    found = partial(model)
    assert taken and taken[-1] is None
    assert_same(found, the_long_way(monkeypatch, partial, model))


def test_several_steps(monkeypatch):
    """Parameters move, and a smaller last batch comes and goes. Statistics are those of the long way."""
    model, x = small()
    twin = copy.deepcopy(model)
    taken = count_short(monkeypatch)

    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for batch in (x, -x, x[:3], 2 * x):
            found = own_step(model, batch)
            optimizer.step()
        return found

    found = train(model)
    assert len(taken) == 4 * 3
    assert_same(found, the_long_way(monkeypatch, train, twin))


def set_all(name, value):
    def change(model):
        for norm in later(model):
            setattr(norm, name, value)

    return change


def other_memory(model):
    for norm in later(model):
        norm.running_mean.data = norm.running_mean.data.clone() + 1
        norm.weight.data = 2 * norm.weight.data.clone()
    model.conv1.weight.data = 2 * model.conv1.weight.data.clone()


def other_buffers(model):
    for norm in later(model):
        norm._buffers["running_var"] = 2 * norm.running_var


def other_parameters(model):
    model.norm1.weight = nn.Parameter(2 * model.norm1.weight.detach())
    model.conv2.weight = nn.Parameter(2 * model.conv2.weight.detach())


def hooked(model):
    model.norm1.register_forward_hook(lambda module, args, y: 2 * y)


def less_gradient(model):
    model.conv1.weight.requires_grad_(False)
    model.norm1.weight.requires_grad_(False)


CHANGES = {  # what changes, and how many norms are short afterwards; if there are two numbers, the second is `learned`
    "eps": (set_all("eps", 0.5), 3),
    "momentum": (set_all("momentum", 0.5), 3),
    "cumulative average": (set_all("momentum", None), 3),
    "plain variances": (set_all("total_variance", False), 3),
    "statistics batch": (set_all("statistics_batch_size", 1), (3, 2)),  # the second pools the posterior of the first
    "no statistics any more": (set_all("track_running_stats", False), 3),
    "memory": (other_memory, 3),
    "buffers": (other_buffers, 3),
    "parameters": (other_parameters, 3),
    "hook": (hooked, 3),
    "frozen parameters": (less_gradient, 3),
    "process group": (set_all("process_group", "world"), 1),
    "frozen statistics": (lambda model: freeze_statistics(model), 0),
    "inference": (lambda model: model.eval(), 0),
    "own method": (lambda model: setattr(model.norm1, "_normalize", model.norm1._normalize), 2),
    "double precision": (lambda model: model.double(), None),  # short on a CPU, long with kernels
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_prepared_expires(change, monkeypatch):
    make, expected = CHANGES[change]
    assert_expires(make, expected[LEARNED in OPTIONS.items()] if isinstance(expected, tuple) else expected, monkeypatch)


def assert_expires(make, expected, monkeypatch):
    """After steps on the short way a setting changes. The next step sees it, on the way that fits."""
    model, x = small()
    own_step(model, x)
    own_step(model, x)
    make(model)
    x = x.to(next(model.parameters()).dtype)
    twin = copy.deepcopy(model)
    taken = count_short(monkeypatch)
    found = own_step(model, x)
    assert expected is None or len(taken) == expected
    assert_same(found, the_long_way(monkeypatch, own_step, twin, x))


def test_accumulated_statistics(monkeypatch):
    model, x = small()
    own_step(model, x)

    def accumulate(model):
        with accumulate_statistics(model):
            own_step(model, x)
            own_step(model, -x)
        return own_step(model, x)

    twin = copy.deepcopy(model)
    assert_same(accumulate(model), the_long_way(monkeypatch, accumulate, twin))


def twice_backward(model, x):
    """`retain_graph`: the gradients of both backwards are added."""
    y = model(x)
    y.sum().backward(retain_graph=True)
    y.square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def second_order(model, x):
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    grad.square().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad}
    # Single values cancel, so all are compared on the scale of the largest.
    return {name: None if grad is None else grad / grad.abs().max().clamp(min=1) for name, grad in found.items()}


def some_gradients(model, x):
    """Of one parameter each; the others get none."""
    asked = model.conv1.weight, getattr(model.norm1, "gain_logit", None), model.norm2.weight
    asked = [p for p in asked if p is not None]
    return {str(i): torch.autograd.grad(model(x).square().sum(), p)[0] for i, p in enumerate(asked)}


def two_forwards(model, x):
    """Both graphs live at once."""
    first, second = model(x), model(-x)
    (first * second).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()} | dict(model.named_buffers())


def checkpointed(model, x):
    x = x.clone().requires_grad_()
    checkpoint(model, x, use_reentrant=False).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()} | dict(model.named_buffers()) | {"x": x.grad}


def functional(model, x):
    parameters = {name: 1.5 * p.detach() for name, p in model.named_parameters()}

    def loss(parameters):
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return functional_call(model, parameters | buffers, (x,)).square().sum()

    return torch.func.grad(loss)(parameters)


def called_with_tensors(model, x):
    """`functional_call` without a transform: parameters that are no leaves."""
    parameters = {name: (1.5 * p).clone() for name, p in model.named_parameters()}
    functional_call(model, parameters, (x,)).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()} | dict(model.named_buffers())


def without_gradients(model, x):
    with torch.no_grad():
        return {"y": model(x)} | dict(model.named_buffers())


def part_of_the_model(model, x):
    """Parts are called one by one."""
    y = model.norm0(model.conv0(x)).relu()
    y = model.norm2(model.conv2(model.norm1(model.conv1(y)).relu()))
    y.square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()} | dict(model.named_buffers())


def watched(model, x):
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names = []
    with Seen():
        y = model(x)
    assert any("batch_kalman_norm" in name for name in names)
    return {"y": y}


WORKS = [
    twice_backward, second_order, some_gradients, two_forwards, checkpointed, functional, called_with_tensors,
    without_gradients, part_of_the_model, watched,
]  # fmt: skip


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__)
def test_unusual_steps(work, monkeypatch):
    model, x = small()
    own_step(model, x)
    model.zero_grad()
    twin = copy.deepcopy(model)
    assert_same(work(model, x), the_long_way(monkeypatch, work, twin, x))


def test_a_branch_without_gradients(monkeypatch):
    class Half(Small):
        def forward(self, x):
            with torch.no_grad():
                x = self.norm1(self.conv1(self.norm0(self.conv0(x)).relu())).relu()
            return self.norm2(self.conv2(x))

    model, x = small()
    model.__class__ = Half
    assert_same(step(model, x), the_long_way(monkeypatch, step, model, x))


class Segments(Small):
    """Its middle and its end are checkpointed, if it is told to."""

    run = staticmethod(lambda part, x: part(x))

    def forward(self, x):
        x = self.norm0(self.conv0(x)).relu()
        x = self.run(self.middle, x)
        return self.run(lambda x: self.norm2(self.conv2(x)), x)

    def middle(self, x):
        return self.norm1(self.conv1(x)).relu()


def in_a_checkpoint(part, x):
    return checkpoint(part, x, use_reentrant=False)


def in_two_checkpoints(part, x):
    return checkpoint(lambda x: checkpoint(part, x, use_reentrant=False), x, use_reentrant=False)


def in_a_reentrant_checkpoint(part, x):
    return checkpoint(part, x, use_reentrant=True)


@pytest.mark.parametrize(
    ("run", "short", "repeated"),
    [(in_a_checkpoint, 3, 2), (in_two_checkpoints, 1, 0), (in_a_reentrant_checkpoint, 1, 0)],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.filterwarnings("ignore:kalmannorm.* a re-entrant checkpoint cuts the gradient")  # with `learned`
def test_segments_of_checkpoints(run, short, repeated, monkeypatch):
    """A segment that is neither nested nor re-entrant takes the short way, and so does its recomputation."""
    model, x = small()
    model.__class__ = Segments
    expected = step(model, x)
    taken, again = count_short(monkeypatch), count_repeated(monkeypatch)
    monkeypatch.setattr(Segments, "run", staticmethod(run))
    found = step(model, x)
    assert (len(taken), len(again)) == (short, repeated)
    assert_same(found, the_long_way(monkeypatch, step, model, x))
    if run is in_a_checkpoint:  # the others round differently, and some gradients are only rounding errors
        assert_same(found, expected)


def test_two_backwards_through_a_checkpoint(monkeypatch):
    model, x = small()
    model.__class__ = Segments
    expected = twice_backward(copy.deepcopy(model), x)
    monkeypatch.setattr(Segments, "run", staticmethod(in_a_checkpoint))
    assert_same(twice_backward(model, x), expected)


def test_a_norm_that_runs_again_inside_a_checkpoint(monkeypatch):
    """The first run is short and the second long, in the forward and in the recomputation."""

    class Again(Segments):
        def middle(self, x):
            x = self.conv1(x)
            return self.norm1(x).relu() + self.norm1(2 * x)

    model, x = small()
    model.__class__ = Again
    expected = step(model, x)
    monkeypatch.setattr(Again, "run", staticmethod(in_a_checkpoint))
    again = count_repeated(monkeypatch)
    assert_same(step(model, x), expected)
    assert len(again) == 2


def fewer_examples(norm, x):
    return norm(x[:3])


def without_gradient(norm, x):
    with torch.no_grad():
        return norm(x)


def other_layout(norm, x):
    return norm(x.transpose(2, 3).contiguous().transpose(2, 3))


class LongFirst(Segments):
    """Its second norm runs twice, and the first run takes the long way."""

    first = staticmethod(fewer_examples)

    def middle(self, x):
        x = self.conv1(x)
        return self.first(self.norm1, 2 * x).sum() + self.norm1(x).relu()


@pytest.mark.parametrize("first", [fewer_examples, without_gradient, other_layout], ids=lambda first: first.__name__)
@pytest.mark.parametrize("run", [Segments.run, in_a_checkpoint], ids=["plain", "checkpoint"])
def test_the_first_run_is_long(run, first, monkeypatch):
    """Then so is the second: the updates keep their order, and a recomputation repeats the first run."""
    model, x = small()
    model.__class__ = LongFirst
    monkeypatch.setattr(LongFirst, "first", staticmethod(first))
    expected = the_long_way(monkeypatch, step, model, x)
    monkeypatch.setattr(LongFirst, "run", staticmethod(run))
    taken, again = count_short(monkeypatch), count_repeated(monkeypatch)
    assert_same(step(model, x), expected)
    assert len(taken) == 2
    assert len(again) == (run is in_a_checkpoint)


@pytest.mark.filterwarnings("ignore:kalmannorm.* ran, but not the norms that feed it")  # with `learned`
def test_the_first_run_is_long_in_a_part(monkeypatch):
    """The same in a checkpoint of a part of the model that is called by itself."""
    model = converted(nn.Sequential(Small()), (4, 2, 5, 5)).to(DEVICE)
    part, x = model[0], torch.randn(4, 2, 5, 5, device=DEVICE)
    part.__class__ = LongFirst
    expected = the_long_way(monkeypatch, own_step, copy.deepcopy(model)[0], x)
    monkeypatch.setattr(LongFirst, "run", staticmethod(in_a_checkpoint))
    again = count_repeated(monkeypatch)
    assert_same(own_step(part, x), expected)
    assert len(again) == 1


@pytest.mark.parametrize("with_norm", [False, True])
def test_a_checkpoint_inside_the_segment_of_a_norm(with_norm, monkeypatch):
    """torch recomputes the outer segment because the inner one needs its input."""

    class Nested(Segments):
        def forward(self, x):
            return self.run(self.middle, self.norm0(self.conv0(x)).relu())

        def middle(self, x):
            x = self.norm1(self.conv1(x)).relu()
            return self.run(lambda x: self.norm2(self.conv2(x)) if with_norm else self.conv2(x).relu(), x)

    model, x = small()
    model.__class__ = Nested
    expected = step(model, x)
    monkeypatch.setattr(Nested, "run", staticmethod(in_a_checkpoint))
    again = count_repeated(monkeypatch)
    assert_same(step(model, x), expected)
    assert len(again) == 1


def test_the_recomputation_gets_another_input(monkeypatch):
    """No prepared kernel reads it. Torch tells that the recomputation differs."""

    class Fewer(Segments):
        examples = 4

        def middle(self, x):
            return self.norm1(self.conv1(x[: self.examples])).relu()

    model, x = small()
    model.__class__ = Fewer
    monkeypatch.setattr(Fewer, "run", staticmethod(in_a_checkpoint))
    y = model(x)
    model.examples = 2
    with pytest.raises(CheckpointError, match="different"):
        y.sum().backward()


def test_a_setting_changes_between_a_checkpoint_and_its_recomputation(monkeypatch):
    """The recomputation does what the forward did."""
    model, x = small()
    model.__class__ = Segments
    expected = step(model, x)
    monkeypatch.setattr(Segments, "run", staticmethod(in_a_checkpoint))
    x = x.clone().requires_grad_()
    y = model(x)
    for norm in later(model):
        norm.momentum = 0.5
    (y.square().sum() + y.sum()).backward()
    torch.testing.assert_close(x.grad, expected["x"])


def test_a_norm_that_runs_again(monkeypatch):
    """More often than in the example of the conversion. Its first moments must stay for its first backward."""

    class Again(Small):
        times = 1

        def forward(self, x):
            x = self.norm0(self.conv0(x)).relu()
            return self.conv2(sum(self.norm1(k * self.conv1(x)) for k in range(1, self.times + 1)))

    model, x = converted(Again(), (4, 2, 5, 5)).to(DEVICE), torch.randn(4, 2, 5, 5, device=DEVICE)
    model.times = 2
    taken = count_short(monkeypatch)
    found = step(model, x)
    assert len(taken) == 2
    assert_same(found, the_long_way(monkeypatch, step, model, x))


def test_batches_with_as_many_values_but_other_groups(monkeypatch):
    """3 examples of 4 × 10 and 4 of 5 × 6: every norm gets as many values, and the last group is another one."""
    model, _ = small()
    twin = copy.deepcopy(model)

    def train(model):
        torch.manual_seed(0)
        for shape in ((3, 2, 4, 10), (4, 2, 5, 6), (3, 2, 4, 10)):
            found = own_step(model, torch.randn(shape, device=DEVICE).to(memory_format=torch.channels_last))
        return found

    taken = count_short(monkeypatch)
    found = train(model)
    assert len(taken) == 9
    assert_same(found, the_long_way(monkeypatch, train, twin))


def test_a_failed_forward_tracks_what_ran(monkeypatch):
    class Stops(Small):
        def forward(self, x):
            self.norm1(self.conv1(self.norm0(self.conv0(x)).relu()))
            raise RuntimeError("stop")

    model, x = small()
    model.__class__ = Stops
    twin = copy.deepcopy(model)

    def run(model):
        with pytest.raises(RuntimeError, match="stop"):
            model(x)
        return {name: buffer.clone() for name, buffer in model.named_buffers()}

    taken = count_short(monkeypatch)
    found = run(model)
    assert len(taken) == 2
    assert_same(found, the_long_way(monkeypatch, run, twin))


def test_a_norm_with_another_number_of_examples(monkeypatch):
    """As in the heads of a detector, which see regions instead of images."""

    class Regions(Small):
        def forward(self, x):
            x = self.norm1(self.conv1(self.norm0(self.conv0(x)).relu())).relu()
            return self.norm2(self.conv2(torch.cat([x, -x, 2 * x])))

    model, x = converted(Regions(), (4, 2, 5, 5)).to(DEVICE), torch.randn(4, 2, 5, 5, device=DEVICE)
    assert_same(step(model, x), the_long_way(monkeypatch, step, model, x))


class Unusual(Small):
    """A forward that does something else between its norms, if it is told to."""

    between = None

    def forward(self, x, again=False):
        x = self.norm1(self.conv1(self.norm0(self.conv0(x)).relu())).relu()
        if self.between is not None:
            type(self).between(self, x)
        if again:
            self(torch.cat([x, x], 1)[:, :2])
        return self.norm2(self.conv2(x))


def without_gradient(model, x):
    with torch.no_grad():
        model.norm1(x + 5)


def with_posterior(model, x):
    """Ghost norms have no posterior to return."""
    model.norm1(x + 5, **({} if isinstance(model.norm1, GhostBatchNorm2d) else {"return_posterior": True}))


BETWEEN = {
    "the norm runs again without gradients": without_gradient,
    "the norm runs again on fewer examples": lambda model, x: model.norm1(x[:2] + 5),
    "the norm runs again and returns its posterior": with_posterior,
    "the norm runs again in a checkpoint": lambda model, x: checkpoint(model.norm1, x + 5, use_reentrant=False),
    "the statistics batch becomes smaller": lambda model, x: setattr(model.norm2, "statistics_batch_size", 1),
    "the statistics batch becomes larger": lambda model, x: setattr(model.norm2, "statistics_batch_size", 4),
    "a momentum changes after its norm ran": lambda model, x: setattr(model.norm1, "momentum", 0.5),
    "an attribute of the user": lambda model, x: setattr(model.norm1, "last", x.detach()),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_between_the_norms(between, monkeypatch):
    model, x = small()
    model.__class__ = Unusual
    own_step(model, x)
    monkeypatch.setattr(Unusual, "between", lambda self, x: BETWEEN[between](self, x))
    twin = copy.deepcopy(model)
    assert_same(own_step(model, x), the_long_way(monkeypatch, own_step, twin, x))


@pytest.mark.filterwarnings("ignore:kalmannorm.* ran, but not the norms that feed it")  # with `learned`
def test_a_forward_that_calls_itself(monkeypatch):
    model, x = small()
    model.__class__ = Unusual
    twin = copy.deepcopy(model)

    def run(model):
        model(x[..., :3, :3].repeat(1, 1, 2, 2), again=True)
        return {name: buffer.clone() for name, buffer in model.named_buffers()}

    assert_same(run(model), the_long_way(monkeypatch, run, twin))


def test_a_number_as_residual(monkeypatch):
    class Net(Small):
        def forward(self, x):
            return self.norm1(self.conv1(self.norm0(self.conv0(x)).relu()), residual=2.0)

    model, x = small()
    model.__class__ = Net
    assert_same(step(model, x), the_long_way(monkeypatch, step, model, x))


def test_shared_buffers(monkeypatch):
    class Same(Small):
        def __init__(self):
            super().__init__()
            self.conv2, self.norm2 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    model, x = converted(Same(), (4, 2, 5, 5)).to(DEVICE), torch.randn(4, 2, 5, 5, device=DEVICE)
    model.norm2.running_mean, model.norm2.running_var = model.norm1.running_mean, model.norm1.running_var
    assert_same(step(model, x), the_long_way(monkeypatch, step, model, x))
