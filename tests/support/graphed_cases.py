"""What a graphed model must do. Each case gets `make`, which graphs a model, and the device.

With CUDA graphs the cases run on a GPU. With the stand-in of `rerun.py` they run on any device.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kalmannorm
from kalmannorm import ClosingPhase, accumulate_statistics, convert, freeze_statistics, fuse, set_inference
from support.converted_net import Net, image

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def plain(device):
    torch.manual_seed(0)
    return Net().to(device)


def converted(device, transition="weights"):
    model = convert(plain(device), image().to(device), transition=transition, statistics_batch_size=2)
    for name, parameter in model.named_parameters():
        if name.endswith("matrix"):
            nn.init.constant_(parameter, 0.1)
    return model


def fused(device):
    return fuse(converted(device), image().to(device))


def learned(device):
    return converted(device, "learned")


def standardized(device):
    return convert(plain(device), image().to(device), statistics_batch_size=2, weight_standardization=True)


def renorm(device):
    steps = {"warmup_steps": 0, "r_steps": 4, "d_steps": 4}
    return convert(plain(device), image().to(device), to="renorm", statistics_batch_size=2, **steps)


NETS = [plain, converted, fused, learned, standardized, renorm]


def close(one, other, what=""):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=lambda m: f"{what}: {m}")


def alike(one, other):
    """Parameters, gradients, and buffers with the state of a closing phase."""
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        close(a, b, name)
        if a.grad is not None:
            close(a.grad, b.grad, f"gradient of {name}")
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        close(a, b, name)


def pair(make, model, **options):
    """A graphed model, and an eager twin."""
    return make(model, **options), copy.deepcopy(model)


def loss_of(model, x):
    return model(x).square().mean()


def steps_alike(run, twin, inputs, **zero):
    """A loop with an optimizer. Losses, weights, gradients and statistics are those of the twin, at every step."""
    groups = [kalmannorm.parameter_groups(each, 1e-3) for each in (run, twin)]
    optimizers = [torch.optim.SGD(each, 0.05, momentum=0.9) for each in groups]
    for x in inputs:
        losses = []
        for each, optimizer in zip((run, twin), optimizers, strict=True):
            optimizer.zero_grad(**zero)
            loss = loss_of(each, x)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        close(*losses)
        alike(run, twin)


def replayed(run, calls, captures=1):
    """All calls but the first. A norm may set an attribute in its first forward, and then the second is eager too."""
    graphs = run.cuda_graphs
    assert graphs.replays in (calls - 1, calls - 2) and graphs.captures == captures, str(graphs)


def images(device, number=6, batch=4):
    return [image(batch, seed).to(device) for seed in range(number)]


@case
def a_training_loop_is_that_of_the_model(make, device):
    for build in NETS:
        run, twin = pair(make, build(device))
        steps_alike(run, twin, images(device))
        replayed(run, 6)


@case
def gradients_are_zeroed_or_removed(make, device):
    for build in (plain, converted):
        run, twin = pair(make, build(device))
        steps_alike(run, twin, images(device), set_to_none=False)
        replayed(run, 6)


@case
def many_shapes_in_turn(make, device):
    run, twin = pair(make, converted(device), limit=8)
    generator = random.Random(0)
    shapes = [(2 + number % 5, 3, 8 + number // 5, 9) for number in range(20)]
    for number in range(60):
        x = torch.randn(*generator.choice(shapes)).to(device)
        for each in (run, twin):
            each.zero_grad()
        losses = [loss_of(each, x) for each in (run, twin)]
        for loss in losses:
            loss.backward()
        close(*(loss.detach() for loss in losses), f"call {number}")
        alike(run, twin)
    assert len(run.cuda_graphs) == 8 and run.cuda_graphs.replays > 8


@case
def old_graphs_make_room(make, device):
    run = make(plain(device), limit=2)
    for batch in (2, 3, 2, 3, 2, 3, *(12 * [4])):
        loss_of(run, image(batch).to(device)).backward()
    graphs = run.cuda_graphs
    assert len(graphs) == 2 and graphs.captures == 3, str(graphs)
    assert graphs.eager["more signatures than the limit"] == 6


@case
def several_forwards_before_their_backwards(make, device):
    for build in (plain, converted):
        run, twin = pair(make, build(device))
        for seeds in ((0, 1), (2, 3), (4, 5), (6, 7, 8), (9, 10, 11)):
            results = []
            for each in (run, twin):
                each.zero_grad()
                losses = [loss_of(each, image(seed=seed).to(device)) for seed in seeds]
                for loss in losses:
                    loss.backward()
                results.append([loss.detach() for loss in losses])
            close(*results)
            alike(run, twin)
        graphs = run.cuda_graphs
        assert graphs.captures == 2 and graphs.eager["too many backwards are outstanding"] == 2, str(graphs)


@case
def forwards_of_different_shapes_before_their_backwards(make, device):
    run, twin = pair(make, converted(device))
    for _ in range(4):
        for each in (run, twin):
            each.zero_grad()
            first, second = (loss_of(each, image(batch, batch).to(device)) for batch in (4, 2))
            first.backward()
            second.backward()
        alike(run, twin)
    assert run.cuda_graphs.captures == 3 and run.cuda_graphs.replays == 5


@case
def results_keep_their_values(make, device):
    """Outputs and gradients of one step, kept by the user, after further steps."""
    run = make(converted(device))
    kept = []
    for x in images(device, 5):
        run.zero_grad()
        x.requires_grad_()
        out = run(x)
        out.square().mean().backward()
        kept += [(each, each.clone()) for each in (out.detach(), x.grad, *(p.grad for p in run.parameters()))]
        for each, values in kept:
            assert torch.equal(each, values)
    replayed(run, 5)


@case
def a_forward_without_a_backward(make, device):
    run, twin = pair(make, converted(device))
    for x in images(device):
        for each in (run, twin):
            each.zero_grad()
            each(x)  # dropped
            loss_of(each, x).backward()
        alike(run, twin)
    assert run.cuda_graphs.captures == 1


@case
def accumulation(make, device):
    for build in (plain, converted):
        run, twin = pair(make, build(device))
        for start in (0, 3):
            for each in (run, twin):
                each.zero_grad()
                for seed in range(start, start + 3):
                    (loss_of(each, image(seed=seed).to(device)) / 3).backward()
                torch.nn.utils.clip_grad_norm_(each.parameters(), 0.05)
            alike(run, twin)
        replayed(run, 6)


@case
def accumulated_statistics(make, device):
    run, twin = pair(make, converted(device))
    for _ in range(3):
        for each in (run, twin):
            each.zero_grad()
            with accumulate_statistics(each):
                for x in images(device, 3):
                    loss_of(each, x).backward()
        alike(run, twin)
    assert run.cuda_graphs.replays > 3


@case
def recalibration(make, device):
    run, twin = pair(make, converted(device))
    loss_of(run, image().to(device)), loss_of(twin, image().to(device))
    for each in (run, twin):
        kalmannorm.recalibrate(each, images(device))
    alike(run, twin)


@case
def training_and_evaluation(make, device):
    run, twin = pair(make, converted(device))
    for mode in ("population", "batch", "example"):
        set_inference(run, mode), set_inference(twin, mode)
        for _ in range(2):
            for each in (run.train(), twin.train()):
                each.zero_grad()
                for x in images(device, 3):
                    loss_of(each, x).backward()
            alike(run, twin)
            run.eval(), twin.eval()
            assert not run.training and not run.block1.bn1.training
            with torch.no_grad():
                for x in images(device, 3):
                    close(run(x), twin(x))
            with torch.inference_mode():
                close(run(x), twin(x))
    assert run.cuda_graphs.captures == 6 and run.cuda_graphs.eager["inference mode"] == 6, str(run.cuda_graphs)


@case
def settings_change(make, device):
    run, twin = pair(make, converted(device))

    def set_all(name, value):
        for each in (run, twin):
            for _, norm in kalmannorm._model.settings.norms(each):
                setattr(norm, name, value)

    changes = [
        lambda: set_all("momentum", 0.5),
        lambda: set_all("eps", 0.1),
        lambda: set_all("statistics_batch_size", 4),
        lambda: [freeze_statistics(each) for each in (run, twin)],
        lambda: [freeze_statistics(each, False) for each in (run, twin)],
        lambda: [each.block2.conv1.requires_grad_(False) for each in (run, twin)],
        lambda: [each.block2.conv1.requires_grad_(True) for each in (run, twin)],
    ]
    for change in changes:
        steps_alike(run, twin, images(device, 3))
        change()
    steps_alike(run, twin, images(device, 3))
    for each in (run, twin):
        each.block3.conv2 = nn.Identity()
        with pytest.warns(UserWarning, match="'block3.conv2' was replaced"):
            each(image().to(device))
    steps_alike(run, twin, images(device, 3))
    assert run.cuda_graphs.replays >= 12


@case
def other_memory(make, device):
    run, twin = pair(make, converted(device))
    for change in (
        lambda each: each.load_state_dict({k: v * 1.01 for k, v in each.state_dict().items()}),
        lambda each: each.load_state_dict({k: v.clone() for k, v in each.state_dict().items()}, assign=True),
        lambda each: each.to(memory_format=torch.channels_last),
        lambda each: setattr(each.head, "weight", nn.Parameter(each.head.weight.detach() + 1)),
        lambda each: setattr(each.head.weight, "data", each.head.weight.data + 1),
    ):
        steps_alike(run, twin, images(device, 3))
        change(run), change(twin)
    steps_alike(run, twin, images(device, 3))
    assert run.cuda_graphs.replays >= 10
    close(run.state_dict(), twin.state_dict())


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.drop, self.two = nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 3)

    def forward(self, x):
        return self.two(self.drop(self.one(x)))


@case
def random_numbers(make, device):
    """Those of the model itself: capturing draws none, and replays draw in turn."""
    run, twin = pair(make, Dropping().to(device))
    x = torch.randn(8, 6).to(device)
    results = []
    for each in (run, twin):
        torch.manual_seed(1)
        found = []
        for number in range(6):
            each.drop.p = 0.25 if number > 4 else 0.5
            each.zero_grad()
            loss_of(each, x).backward()
            found += [each.one.weight.grad.clone(), torch.rand(3, device=device), torch.rand(3)]
        results.append(found)
    close(*results)
    assert run.cuda_graphs.replays == 4
    assert not torch.equal(results[0][6], results[0][9])


@case
def half_precision(make, device):
    for build in (plain, converted):
        run, twin = pair(make, build(device))
        scalers = [torch.amp.GradScaler(torch.device(device).type, init_scale=64.0) for _ in range(2)]
        optimizers = [torch.optim.SGD(each.parameters(), 0.05) for each in (run, twin)]
        for x in images(device):
            losses = []
            for each, scaler, optimizer in zip((run, twin), scalers, optimizers, strict=True):
                optimizer.zero_grad()
                with torch.autocast(torch.device(device).type, torch.bfloat16):
                    loss = each(x).float().square().mean()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                losses.append(loss.detach())
            torch.testing.assert_close(*losses, rtol=2e-2, atol=1e-3)
        loss_of(run, x)  # without autocast: another signature
        replayed(run, 6)


class Heads(nn.Module):
    """Several outputs, some of them no tensors, and one without a gradient."""

    def __init__(self):
        super().__init__()
        self.body, self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x, scale=1.0, *, more=None):
        y = self.body(x).tanh()
        out = OrderedDict(one=self.one(y) * scale, two=[self.two(y), None, "two"], best=y.argmax(1))
        return out if more is None else (out, more["bias"] + y)


@case
def structured_arguments_and_results(make, device):
    run, twin = pair(make, Heads().to(device))
    for number in range(6):
        x, bias = torch.randn(4, 6).to(device), torch.randn(6).to(device).requires_grad_()
        grads = []
        for each in (run, twin):
            each.zero_grad()
            bias.grad = None
            out, more = each(x, 2.0, more={"bias": bias})
            assert type(out) is OrderedDict and out["two"][1:] == [None, "two"] and out["best"].dtype == torch.int64
            (out["one"].sum() + out["two"][0].square().sum() + more.sum()).backward()
            grads.append(bias.grad)
        close(*grads, f"call {number}")
        alike(run, twin)
    assert run.cuda_graphs.replays == 5
    close(run(x, 3.0)["one"], twin(x, 3.0)["one"])


@case
def backwards_from_some_outputs(make, device):
    """Parameters behind other outputs get no gradient, as in the model itself, and not a gradient of zero."""
    run, twin = pair(make, Heads().to(device))
    for number in range(10):
        x = torch.randn(4, 6).to(device)
        for each in (run, twin):
            each.zero_grad()
            out = each(x)
            (out["one"] if number < 7 else out["two"][0]).square().sum().backward()
        assert (run.two.weight.grad is None) == (number < 7)
        alike(run, twin)
    assert run.cuda_graphs.captures == 2


@case
def second_derivatives(make, device):
    run, twin = pair(make, nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).to(device))
    for _ in range(4):
        x = torch.randn(4, 6).to(device).requires_grad_()
        for each in (run, twin):
            each.zero_grad()
            (slope,) = torch.autograd.grad(each(x).sum(), x, create_graph=True)
            (slope.square().sum() + each(x).mean()).backward()
        alike(run, twin)
    assert run.cuda_graphs.replays > 3


@case
def two_backwards_of_one_forward(make, device):
    for model in (nn.Sequential(Dropping(), nn.BatchNorm1d(3)), renorm("cpu"), converted("cpu")):
        run, twin = pair(make, model.to(device))
        for seed in range(4):
            x = (torch.randn(8, 6) if isinstance(model, nn.Sequential) else image(8)).to(device)
            for each in (run, twin):
                torch.manual_seed(seed)
                each.zero_grad()
                out = each(x)
                out.square().mean().backward(retain_graph=True)
                out.abs().mean().backward()
                with pytest.raises(RuntimeError):
                    out.mean().backward()
            alike(run, twin)
        replayed(run, 4)


@case
def a_closing_phase(make, device):
    """It collects gradients of tensors that are no parameters, which a graph would not return."""
    run, twin = pair(make, converted(device))
    steps_alike(run, twin, images(device, 3))
    phases = [ClosingPhase(each, 6, start=0, end=0.5) for each in (run, twin)]
    replays = run.cuda_graphs.replays
    for x in images(device, 6):
        for each, phase in zip((run, twin), phases, strict=True):
            each.zero_grad()
            loss_of(each, x).backward()
            phase.step()
        alike(run, twin)
    assert run.cuda_graphs.replays == replays, str(run.cuda_graphs)


@case
def hooks(make, device):
    """Hooks on modules see every forward. Hooks on parameters run once for each backward."""
    run, twin = pair(make, converted(device))
    steps_alike(run, twin, images(device, 3))
    seen = []
    handle = run.block1.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    run(image().to(device)), twin(image().to(device))
    assert len(seen) == 1 and run.cuda_graphs.eager["hooks on modules"] == 1
    handle.remove()
    calls = []
    run.head.weight.register_hook(lambda grad: calls.append(1) or 2 * grad)
    twin.head.weight.register_hook(lambda grad: 2 * grad)
    before = run.cuda_graphs.replays
    steps_alike(run, twin, images(device, 3))
    assert len(calls) == 3 and run.cuda_graphs.replays == before + 3
    run.zero_grad(), twin.zero_grad()
    for each in (run, twin):
        loss_of(each, image().to(device)).backward(retain_graph=True)
    alike(run, twin)
    assert len(calls) == 4


@case
def weights_changed_before_the_backward(make, device):
    run = make(converted(device))
    for x in images(device, 3):
        loss = loss_of(run, x)
        loss.backward()
    loss = loss_of(run, x)
    with torch.no_grad():
        run.stem[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()
    run.zero_grad()
    loss_of(run, x).backward()


@case
def trained_inputs_and_frozen_parts(make, device):
    run, twin = pair(make, converted(device))
    for trains, captures in ((False, 1), (True, 2)):
        for each in (run, twin):
            each.stem.requires_grad_(trains)
            each.block1.bn1.weight.requires_grad_(trains)
        for x in images(device, 4):
            grads = []
            for each in (run, twin):
                each.zero_grad()
                y = x.clone().requires_grad_()
                loss_of(each, y * 2).backward()
                grads.append(y.grad)
            close(*grads)
            alike(run, twin)
        assert run.cuda_graphs.captures == captures


class Odd(nn.Module):
    """A model that no graph can serve, in one of several ways."""

    def __init__(self, way):
        super().__init__()
        self.way, self.calls, self.body = way, 0, nn.Linear(6, 6)
        self.others, self.history = [nn.Linear(6, 6)], []
        self.register_buffer("count", torch.zeros(()))

    def _apply(self, function, recurse=True):
        self.others[0]._apply(function)
        return super()._apply(function, recurse)

    def forward(self, x):
        if self.way == "input in place":
            x.add_(1)
        y = self.body(x)
        if self.way == "counter":
            self.calls += 1
            y = y * self.calls
        elif self.way == "history":
            self.history.append(1)
            y = y * len(self.history)
        elif self.way == "python's random":
            y = y * random.random()
        elif self.way == "input as output":
            y = x
        elif self.way == "buffer replaced":
            self.count = self.count + 1
            y = y * self.count
        elif self.way == "buffer as output":
            self.count += 1
            y = self.count
        elif self.way == "not registered":
            y = self.others[0](y)
        elif self.way == "parameter in place":
            with torch.no_grad():
                self.body.weight.mul_(1.1)
        elif self.way == "object":
            y = y, object
        elif self.way == "sparse":
            y = F.embedding(x.abs().long().clamp(max=5), self.body.weight, sparse=True)
        return y


ODD = (
    "counter", "history", "python's random", "input in place", "input as output", "buffer replaced",
    "buffer as output", "not registered", "parameter in place", "object", "sparse",
)  # fmt: skip


@case
def what_graphs_cannot_serve(make, device):
    for way in ODD:
        torch.manual_seed(0)
        run, twin = pair(make, Odd(way).to(device))
        results = []
        for each in (run, twin):
            random.seed(1)
            torch.manual_seed(2)
            found = []
            for _ in range(6):
                each.zero_grad()
                each.others[0].zero_grad()
                x = torch.randn(4, 6).to(device)
                y = each(x)
                y = y[0] if isinstance(y, tuple) else y
                if y.requires_grad and each.way != "sparse":
                    (y.sum() + each(x.clone())[0].sum() if each.way == "counter" else y.square().sum()).backward()
                grads = [p.grad for p in (*each.parameters(), *each.others[0].parameters())]
                found += [x, y.detach().clone(), *(g for g in grads if g is not None)]
            results.append(found)
        close(*results, way)
        assert run.cuda_graphs.replays == 0 and len(run.cuda_graphs) == 0, f"{way}: {run.cuda_graphs}"


@case
def the_model_in_another_form(make, device):
    """Attributes, copies and classes are those of the model."""
    model = converted(device)
    run = make(model)
    assert isinstance(run, Net) and type(run).__name__ == "Net" and repr(run) == repr(model)
    assert list(run.state_dict()) == list(model.state_dict())
    assert [name for name, _ in run.named_modules()] == [name for name, _ in model.named_modules()]
    run.epoch = 3
    assert model.epoch == 3 and list(map(id, run.parameters())) == list(map(id, model.parameters()))
    for x in images(device, 3):
        loss_of(run, x).backward()
    other = copy.deepcopy(run)
    assert other.stem[0].weight is not run.stem[0].weight and len(other.cuda_graphs) == 0
    with torch.no_grad():
        other.eval(), run.eval()
        for x in images(device, 3):
            close(other(x), run(x))
            close(model(x), run(x))
    assert other.cuda_graphs.replays == 2
    with pytest.raises(ValueError, match="already graphed"):
        kalmannorm.graphed(run)
