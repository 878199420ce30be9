"""The time filter of trials/forms.py against its definition, in float64, a short training on made-up images, and the
scoreboard."""

import copy
import math

import pytest
import torch
from torch import nn

from trials import table
from trials.cells import Cell, Data
from trials.forms import Form
from trials.training import MOMENTUM, Run, Training, train


def naive(x, grad, weight, bias, mu, var, a, c, lam, m, eps):
    """y and dx of the definition, group by group."""
    outputs, gradients = [], []
    for group, g in zip(x.split(m), grad.split(m), strict=True):
        over = (0, 2, 3)
        seen_mean, seen_var = group.mean(over), group.var(over, unbiased=False)
        mean = seen_mean + lam * (mu - seen_mean)
        used = seen_var + lam * (var - seen_var) + lam * (1 - lam) * (mu - seen_mean) ** 2
        rho = (used + eps).rsqrt().view(1, -1, 1, 1)
        normalized = (group - mean.view(1, -1, 1, 1)) * rho
        outputs.append(weight.view(1, -1, 1, 1) * normalized + bias.view(1, -1, 1, 1))
        scaled = g * weight.view(1, -1, 1, 1)
        own_a, own_c = scaled.mean(over), (scaled * normalized).mean(over)
        used_a = ((1 - lam) * own_a + lam * a * weight).view(1, -1, 1, 1)
        used_c = ((1 - lam) * own_c + lam * c * weight).view(1, -1, 1, 1)
        gradients.append(rho * (scaled - used_a - normalized * used_c))
    return torch.cat(outputs), torch.cat(gradients)


@pytest.mark.parametrize("m", [1, 2, 6])
@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
def test_the_time_filter_is_its_definition(m, lam):
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(5)).double()
    nn.init.normal_(model[0].weight)
    time = Form(kind="time", m=m).apply(model, torch.randn(6, 5, 4, 4).double(), 10)
    memory = time.cells[0]
    for name in ("mu", "var", "a", "c"):
        value = torch.rand(5).double() + (name == "var")
        time.rows[name] = value
        setattr(memory, name, value)
    time.lam = torch.tensor(lam, dtype=torch.float64)
    x, grad = torch.randn(6, 5, 4, 4).double().requires_grad_(), torch.randn(6, 5, 4, 4).double()
    y = model(x)
    dx, d_weight, d_bias = torch.autograd.grad(y, [x, model[0].weight, model[0].bias], grad)
    state = memory.mu, memory.var, memory.a, memory.c
    expected, expected_dx = naive(
        x.detach(), grad, model[0].weight.detach(), model[0].bias.detach(), *state, lam, m, 1e-5
    )
    torch.testing.assert_close(y.detach(), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(dx, expected_dx, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(memory.d_bias, d_bias)
    torch.testing.assert_close(memory.d_weight, d_weight)


@pytest.mark.parametrize(("lam", "same"), [(0.0, Form(kind="kalman", m=2)), (1.0, Form(kind="time", m=2))])
def test_the_mixture_is_bkn_at_the_start_and_the_time_filter_at_the_end(lam, same):
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double()
    x, results = torch.randn(6, 3, 5, 5).double(), []
    for form in (Form(kind="time", m=2, level="mixture"), same):
        model = copy.deepcopy(net)
        time = form.apply(model, x, 10)
        if time is not None:
            time.lam = torch.tensor(lam, dtype=torch.float64)
            for memory in time.cells:
                memory.mu, memory.var = (torch.full_like(memory.mu, fill).double() for fill in (0.3, 1.7))
        results.append([(y := model(x)).detach(), torch.autograd.grad(y.square().sum() + y.sum(), model[1].weight)[0]])
    torch.testing.assert_close(results[0], results[1])


FORMS = [
    Form(kind="batch"),
    Form(kind="online"),
    Form(kind="kalman", m=2, closing=True),
    Form(kind="kalman", m=1, closing=True, means="average"),
    Form(kind="time", m=1),
    Form(kind="time", m=2, level="drift", backward="feedback", power=0.5),
    Form(kind="time", m=2, level="drift", backward="depth"),
    Form(kind="time", m=1, level="mixture"),
]


def made_up(form):
    torch.manual_seed(0)
    labels = torch.arange(96) % 2
    images = (torch.randint(0, 100, (96, 3, 8, 8)) + 100 * labels.view(-1, 1, 1, 1)).byte()
    one = torch.ones(1, 3, 1, 1)
    data = Data(images, labels, images, labels, one / 60, -one * 1.6)

    def net():
        block = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
        return nn.Sequential(*block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))

    return Training(Run("made up", form), Cell("made up", (), net, 8, 1, 10), data, graph=False, batch=16)


def test_gradient_averages_follow_the_gradients_not_what_the_optimizer_made_of_them():
    training = made_up(Form(kind="time", m=2))
    before = [norm.bias.detach().clone() for norm in training.time.norms]
    training.step()
    for norm, memory, bias in zip(training.time.norms, training.time.cells, before, strict=True):
        updated = -training.rate * (1 + MOMENTUM) * memory.a * memory.values  # the first step: a is the gradient's mean
        torch.testing.assert_close(norm.bias.detach() - bias, updated)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_every_kind_of_form_trains(form):
    training = made_up(form)
    train([training])
    assert math.isfinite(training.loss())
    assert training.score()["population"] > 90


@pytest.mark.parametrize("form", [Form(kind="standardized"), Form(kind="moving", m=2)], ids=lambda form: form.name)
def test_norms_that_do_not_see_brightness_train(form):
    """The classes of the made-up images differ in brightness, which centred weights and group norm remove."""
    training = made_up(form)
    before = [p.detach().clone() for p in training.model.parameters()]
    train([training])
    assert math.isfinite(training.loss())
    assert all(not torch.equal(p, old) for p, old in zip(training.model.parameters(), before, strict=True))


def test_a_graph_is_captured_again_when_norms_begin_to_close_and_when_they_settle(monkeypatch):
    class Replay:
        def replay(self):
            training._step()

    captured = []
    monkeypatch.setattr(Training, "_captured", lambda self: captured.append(self.done) or Replay())
    training = made_up(Form(kind="kalman", m=1, closing=True, means="average"))
    training.graph = Replay()
    begun, settled = (math.ceil(share * training.steps) for share in (training.phase.start, training.phase.end))
    train([training])
    assert captured == [begun, settled] and begun < settled


def recorded(form, seed=0, accuracy=60.0, loss=1.0, key="", **more):
    row = {
        "key": f"tiny100 | {form.name} | seed={seed}{key}",
        "cell": "tiny100",
        "seed": seed,
        "epochs": 15,
        "rate": 0.1,
    }
    return {**row, "form": vars(form), "held_out": {"population": accuracy}, "loss": loss, "round": "first", **more}


def test_the_scoreboard_has_the_best_first_and_the_last_record_of_a_seed():
    batch, bkn = Form(kind="batch"), Form(kind="kalman", m=2)
    rows = [
        recorded(batch, accuracy=59.0),
        recorded(bkn, loss=None, accuracy=1.0),
        recorded(batch, seed=1, accuracy=58.0),
        recorded(bkn, accuracy=61.0, round="second"),
        recorded(batch, accuracy=62.0, key=" | decay=0.001"),
        recorded(bkn, accuracy=1.0, loss=None, decay=2e-3),
    ]
    _, *lines = table.scoreboard("tiny100", rows=rows)
    assert [line[:6] for line in lines] == [
        ["batch norm at 128", "0.1", "0.001", "1", "62.0", "62.00"],
        ["BKN, m = 2", "0.1", "0.0005", "1", "61.0", "61.00"],
        ["batch norm at 128", "0.1", "0.0005", "2", "59.0 58.0", "58.50"],
        ["BKN, m = 2", "0.1", "0.002", "1", "diverged", ""],
    ]
    assert lines[1][-1] == "second"
    best = table.best(table.scores(rows))
    assert best is not None and best.setting.decay == 1e-3


def test_words_tell_all_recorded_settings_apart():
    found = table.scores(table.records())
    assert len(found) > 100
    for cell in {score.setting.cell for score in found}:
        for test in (False, True):
            lines = [tuple(line[:3]) for line in table.scoreboard(cell, test=test)]
            assert len(set(lines)) == len(lines)


def test_runs_are_scored_on_as_many_images_as_told():
    """One image more changes an accuracy by one step."""
    for score in table.scores(table.records()):
        for accuracy in score.accuracies().values():
            right = accuracy * score.setting.images / 100
            assert abs(right - round(right)) < 1e-6
