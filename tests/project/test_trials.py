"""The time filter of trials/forms.py against its definition, in float64, a short training on made-up images, the
queue, and the scoreboard."""

import argparse
import contextlib
import copy
import csv
import dataclasses
import json
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import kalmannorm
from kalmannorm.lab.data.resident import crop_and_flip
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.training.optimizer import learning_rate, optimizer_of, set_learning_rate
from kalmannorm.lab.training.step import Step
from support.wide import narrow
from trials import __main__ as command
from trials import early, pack, queue, table, timing, training
from trials.cells import CELLS, Cell, Data, split
from trials.evidence import ABLATIONS, EVIDENCE, PAPER, QUEUE, SIZES, TABLE3, methods
from trials.faster import speed_up
from trials.forms import Form
from trials.rounds import ROUNDS
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


def net():
    block = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))


def made_up(form, epochs=10, saved=None, **changes):
    torch.manual_seed(0)
    labels = torch.arange(96) % 2
    images = (torch.randint(0, 100, (96, 3, 8, 8)) + 100 * labels.view(-1, 1, 1, 1)).byte()
    one = torch.ones(1, 3, 1, 1)
    data = Data(images, labels, images, labels, one / 60, -one * 1.6)

    cell = Cell("made up", "made up", net, 8, 1, epochs)
    return Training(Run("made up", form, **changes), cell, data, graph=False, batch=16, saved=saved)


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


@pytest.mark.parametrize(
    "form",
    [
        Form(kind="ghost", m=16),
        Form(kind="kalman", m=2, transition="learned"),
        Form(kind="kalman", m=2, closing=True, means="average", close=(0.3, 0.6)),
    ],
    ids=lambda form: form.name,
)
def test_a_training_is_that_of_the_lab(form):
    """The lab's step, optimizer and learning rate, on the same images: `kalmannorm reproduce` trains what rounds do."""
    training = made_up(form, epochs=4)
    torch.manual_seed(training.run.seed)
    model = net().to(memory_format=torch.channels_last)
    phase = form.apply(model, training.data.prepared(training.data.train[:4]), training.steps)
    recipe = Recipe(
        gradient_batch=16, statistics_batch=form.m, learning_rate=training.rate, weight_decay=training.decay,
        schedule="linear", momentum=MOMENTUM,
    )  # fmt: skip
    optimizer = optimizer_of(model, recipe)
    alone = SimpleNamespace(
        world_size=1, backward=lambda loss: loss.backward(), no_backward_sync=lambda *_, **__: contextlib.nullcontext()
    )
    step = Step(alone, model, recipe, Execution(device="cpu"))
    for at, (chosen, moves) in enumerate(zip(training.order, training.moves, strict=True)):
        images = training.data.prepared(training.data.train[chosen])
        set_learning_rate(optimizer, learning_rate(recipe, at, training.steps, 0))
        step(crop_and_flip(images, moves.long(), training.cell.padding), training.data.train_labels[chosen])
        optimizer.step()
        if phase is not None:
            phase.step()
    train([training])
    ours, labs = training.model.state_dict(), model.state_dict()
    assert ours.keys() == labs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(
            value, labs[name], rtol=1e-4, atol=1e-5, msg=lambda told, name=name: f"{name}: {told}"
        )


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


def once(forms):
    """Each form with groups of at most 8, and without those that are then equal."""
    return list(dict.fromkeys(dataclasses.replace(form, m=min(form.m, 8)) for form in forms))


@pytest.mark.parametrize("form", once(run.form for _, run in QUEUE), ids=lambda form: form.name)
def test_every_form_of_the_queue_trains_and_is_scored(form):
    running = made_up(form, epochs=1, virtual=(1, 5), evaluations=3)
    train([running])
    assert math.isfinite(running.loss())
    scores = running.scores()["held_out"]
    several = form.kind in ("kalman", "ghost")
    assert {"example", "example 5"} <= set(scores) if several else "example" not in scores
    assert ("recalibrated" in scores) == (form.kind in ("kalman", "ghost", "renorm"))
    assert [step for step, _ in running.reached] == [2, 4, 6]


@pytest.mark.parametrize("cell", narrow(CELLS, ["cifar10-resnet32", "cifar10-wide"]))
def test_every_cell_of_the_queue_runs(cell):
    """As `python -m trials --queue --dry` does. That command runs all of them."""
    runs = [*(run for _, run in QUEUE), *ROUNDS["small"]]
    run = next(run for run in runs if (run.cell == cell and run.form.closing) or run.cell == cell)
    found = command.dry(command.small(run))
    assert set(found) >= {"held_out", "loss"} and (run.test or "tested" in found)


def test_the_wide_net_has_the_parameters_of_the_learned_transition():
    wide = CELLS["cifar10-wide"].net()
    narrow_net = CELLS["cifar10"].net()
    TABLE3["BKN learned (128, 2)"].apply(narrow_net, torch.randn(2, 3, 32, 32), 10)
    counts = [sum(p.numel() for p in model.parameters()) for model in (wide, narrow_net)]
    assert abs(counts[0] / counts[1] - 1) <= 0.01


def test_the_compiled_group_norm_is_that_of_torch():
    """What trials use on a GPU, in training."""
    part = nn.GroupNorm(4, 8, eps=0.1)
    for parameter in part.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(4, 8, 6, 6).to(memory_format=torch.channels_last).requires_grad_()
    found = []
    for model in (part, copy.deepcopy(part)):
        if found:
            speed_up(model)
        y = model(x)
        grads = torch.autograd.grad(y, [x, *model.parameters()], torch.linspace(-1, 1, y.numel()).view(y.shape))
        found.append([y, *grads])
        assert torch.equal(model.eval()(x), part.eval()(x))
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:kalmannorm. a batch had NaN")
def test_a_diverged_training_ends_early(monkeypatch):
    monkeypatch.setattr(training, "LOOKED_EVERY", 2)
    bad, good = made_up(Form(kind="ghost", m=2), epochs=5), made_up(Form(kind="ghost", m=2), epochs=5)
    with torch.no_grad():
        bad.model[0].weight.fill_(math.nan)
    train([bad, good])
    assert bad.done == 2 and good.done == good.steps == bad.steps
    assert not math.isfinite(bad.loss()) and math.isfinite(good.loss())
    assert bad.diverged and not good.diverged


def converted(form):
    torch.manual_seed(0)
    model = net()
    form.apply(model, torch.randn(4, 3, 8, 8), 10)
    return model, model[4]


def test_a_fixed_gain_is_not_trained():
    running = made_up(Form(kind="kalman", m=2, gain=0.3, fixed=True), epochs=2)
    train([running])
    assert kalmannorm.gains(running.model) == pytest.approx({"4": 0.3})
    learned = made_up(Form(kind="kalman", m=2, gain=0.3), epochs=2)
    train([learned])
    assert kalmannorm.gains(learned.model) != pytest.approx({"4": 0.3})


def test_a_gain_by_noise_is_that_of_a_kalman_filter():
    """P / (P + R): P is the error of the prior, R that of a mean of m H W values."""
    layers = [nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU()]
    layers += [nn.Conv2d(4, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, 1), nn.BatchNorm2d(4)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 2))
    before = [buffer.clone() for buffer in model.buffers()]
    Form(kind="kalman", m=2, error=0.01).apply(model, torch.randn(4, 3, 8, 8), 10)
    expected = {"4": 0.01 / (0.01 + 1 / (2 * 2 * 2)), "7": 0.01 / (0.01 + 1 / (2 * 1 * 1))}
    assert kalmannorm.gains(model) == pytest.approx(expected, rel=1e-3)  # gains 0 and 1 are out of reach
    assert model.training and model[4].gain_logit.requires_grad
    assert torch.equal(model[1].running_mean, before[0]) and torch.equal(model[1].running_var, before[1])


@pytest.mark.parametrize("transition", ["weights", "learned"])
def test_a_blind_prior_changes_no_output_and_only_gradients_of_layers_before(transition):
    form = Form(kind="kalman", m=2, transition=transition)
    found = []
    for blind in (False, True):
        model, norm = converted(dataclasses.replace(form, blind=blind))
        if norm.transition is not None:  # a matrix of zeros passes nothing back
            with torch.no_grad():
                norm.transition.matrix.fill_(0.1)
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        own, before = norm.gain_logit, model[3].weight  # a belief passes through the convolution
        if norm.transition is not None:
            own, before = norm.transition.matrix, model[0].weight
        y = model(x)
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), [own, before])])
    torch.testing.assert_close(found[0][:2], found[1][:2])
    assert found[0][1].any()
    assert not torch.allclose(found[0][2], found[1][2], rtol=1e-3)


def test_starts_noises_and_ranks_of_a_learned_transition():
    form = Form(kind="kalman", m=2, transition="learned")
    _, norm = converted(dataclasses.replace(form, start="identity"))
    assert torch.equal(norm.transition.dense(), torch.eye(8))
    _, norm = converted(dataclasses.replace(form, start="small"))
    assert 0 < norm.transition.dense().abs().max() < 0.1
    _, norm = converted(dataclasses.replace(form, rank=4))
    assert norm.transition.left.shape == (8, 4)
    for noise, count in (("layer", 1), ("channel", 8)):
        model = CELLS["cifar10"].net()
        dataclasses.replace(form, noise=noise).apply(model, torch.randn(2, 3, 32, 32), 10)
        norms = [m for m in model.modules() if isinstance(m, kalmannorm.BatchKalmanNorm) and m.transition]
        noises = [m.transition.shared_noise() for m in norms]
        assert len({id(each) for each in noises}) == len(norms) > 5
        assert [len(each) for each in noises] == [1 if count == 1 else m.num_features for m in norms]


INTERRUPTED = [
    Form(kind="kalman", m=2, closing=True, means="average", close=(0.2, 0.7)),
    Form(kind="kalman", m=2, transition="learned"),
    Form(kind="time", m=1),
    Form(kind="moving", m=2),
    Form(kind="online", m=1),
]


@pytest.mark.parametrize("stop", [3, 15, 26])
@pytest.mark.parametrize("form", INTERRUPTED, ids=lambda form: form.name)
def test_a_resumed_training_equals_an_uninterrupted_one(form, stop, tmp_path):
    whole, first = made_up(form, epochs=5, evaluations=4), made_up(form, epochs=5, evaluations=4)
    train([whole])
    for _ in range(stop):
        first.step()
    torch.save(first.saved(), tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    second = made_up(form, epochs=5, evaluations=4, saved=saved)
    train([second])
    assert second.done == whole.done and list(map(tuple, second.reached)) == whole.reached
    assert torch.equal(second.losses, whole.losses)
    expected = whole.model.state_dict()
    for name, value in second.model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def worked(tmp_path, monkeypatch, runs, **options):
    """The queue on made-up images and nets, with these runs."""
    labels = torch.arange(120) % 2
    images = (torch.randint(0, 100, (120, 3, 8, 8)) + 100 * labels.view(-1, 1, 1, 1)).byte()
    monkeypatch.setitem(CELLS, "cifar10", Cell("cifar10", "cifar10", net, 8, 1, 3))
    tested = images[:20], labels[:20]
    monkeypatch.setattr(queue, "absent", lambda cell, *_, test: [] if cell.images == "cifar10" else ["tiny100-a"])
    monkeypatch.setattr(queue, "load", lambda *_, test, both: split(images, labels, tested, test=test, device="cpu"))
    usual = {
        "budget": math.inf,
        "together": 2,
        "workers": 1,
        "records": tmp_path,
        "unfinished": tmp_path / "unfinished",
    }
    arguments = argparse.Namespace(packs=tmp_path, commit="abc", **{**usual, **options})
    queue.Queue(arguments).work(command.left(runs, None, "", tmp_path))
    path = tmp_path / "smoke.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def test_the_queue_goes_on_after_an_interruption_and_keeps_failed_runs(tmp_path, monkeypatch):
    forms = [Form(kind="ghost", m=2), Form(kind="kalman", m=2), Form(kind="ghost", m=4)]
    runs = [("smoke", Run("cifar10", form, both=True, batch=12)) for form in forms]
    runs.append(("smoke", Run("cifar10", Form(kind="kalman", m=2, gain=7.0), both=True, batch=12)))
    monkeypatch.setattr(training, "LOOKED_EVERY", 5)
    monkeypatch.setattr(queue, "affordable", lambda waiting, *_: waiting)
    clock = iter(range(10**6))
    monkeypatch.setattr(training.time, "perf_counter", lambda: float(next(clock)))
    assert worked(tmp_path, monkeypatch, runs, budget=4.0) == []
    assert len(list((tmp_path / "unfinished").glob("*.pt"))) == 2
    rows = worked(tmp_path, monkeypatch, runs)
    assert [row["key"] for row in rows if "failed" not in row] == [run.key for _, run in runs[:3]]
    (failed,) = (row for row in rows if "failed" in row)
    assert "gain" in failed["failed"] and failed["key"] == runs[3][1].key
    assert rows[0]["tested"].keys() == rows[0]["held_out"].keys() and rows[0]["batch"] == 12
    assert not list((tmp_path / "unfinished").glob("*.pt"))
    assert len(worked(tmp_path, monkeypatch, runs)) == len(rows) + 1, "only the failed run is tried again"


def test_the_queue_begins_no_run_that_would_not_end(capsys):
    runs = [("smoke", Run("cifar10", Form(kind="ghost", m=2), seed=seed, test=True, epochs=30)) for seed in range(5)]
    seconds = 1e-3 * CELLS["cifar10"].step * 30 * 50_000 / 128
    assert queue.affordable(runs, queue.PREPARING + 3.5 * seconds, 8) == runs[:3]
    assert "no time for 2 runs" in capsys.readouterr().out
    assert queue.affordable(runs, 1.0, 8) == runs[:1], "it is saved, and the next call goes on"
    unknown = [("smoke", Run("digits", Form(kind="ghost", m=2), seed=seed)) for seed in range(5)]
    assert queue.affordable(unknown, 100.0, 2) == unknown[:2]


def test_a_run_that_ended_has_a_record_when_time_is_over(tmp_path, monkeypatch, capsys):
    runs = [("smoke", Run("cifar10", Form(kind="ghost", m=2), epochs=epochs, both=True, batch=12)) for epochs in (1, 9)]
    monkeypatch.setattr(training, "LOOKED_EVERY", 20)
    monkeypatch.setattr(queue, "affordable", lambda waiting, *_: waiting)
    clock = iter(range(10**6))
    monkeypatch.setattr(training.time, "perf_counter", lambda: float(next(clock)))
    (row,) = worked(tmp_path, monkeypatch, runs, budget=5.0)
    assert row["key"] == runs[0][1].key and row["steps"] == 9
    assert "out of time with 1 runs to do" in capsys.readouterr().err
    assert len(list((tmp_path / "unfinished").glob("*.pt"))) == 1
    assert [row["key"] for row in worked(tmp_path, monkeypatch, runs)] == [run.key for _, run in runs]


def test_the_planned_time_of_a_step_is_the_measured_one():
    with (table.RECORDS / "steps-h200.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == timing.COLUMNS
    last = [float(row["ms"]) for row in rows if (row["cell"], row["what"]) == ("cifar10", "side by side")][-1]
    assert CELLS["cifar10"].step == CELLS["cifar100"].step == pytest.approx(last, rel=0.05)


def test_workers_share_the_runs(tmp_path):
    """Digits are read by the workers, which are processes of their own."""
    runs = [
        Run("digits", Form(kind="ghost", m=2), seed=seed, epochs=1, batch=64, test=True, rate=rate)
        for seed in range(2)
        for rate in (0.1, 0.2)
    ]
    usual = {"budget": math.inf, "together": 1, "workers": 2, "records": tmp_path, "unfinished": tmp_path}
    arguments = argparse.Namespace(packs=tmp_path, commit="abc", **usual)
    queue.Queue(arguments).work([("smoke", run) for run in runs])
    rows = [json.loads(line) for line in (tmp_path / "smoke.jsonl").read_text().splitlines()]
    assert sorted(row["key"] for row in rows) == sorted(run.key for run in runs)


def test_the_queue_skips_runs_without_packs_and_tries_failed_ones_last(tmp_path, monkeypatch, capsys):
    good, bad = Form(kind="ghost", m=2), Form(kind="kalman", m=2)
    runs = [("smoke", Run(cell, form, both=True, batch=12)) for cell in ("tiny100", "cifar10") for form in (bad, good)]
    (tmp_path / "smoke.jsonl").write_text(json.dumps({"key": runs[2][1].key, "failed": "once"}) + "\n")
    assert [run.form for _, run in command.left(runs, ["cifar10"], "", tmp_path)] == [good, bad]

    def broken(self):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Training, "step", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        worked(tmp_path, monkeypatch, runs)
    assert "no pack tiny100-a: 2 runs are skipped" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "smoke.jsonl").read_text().splitlines()]
    assert [row["failed"] for row in rows[1:]] == ["beside 1 others: RuntimeError: out of memory"] * 2


def test_the_queue_has_every_run_of_the_evidence_once():
    assert len({(name, run.key) for name, run in QUEUE}) == len(QUEUE) == sum(map(len, EVIDENCE.values()))
    assert set(QUEUE) == {(name, run) for name, runs in EVIDENCE.items() for run in runs}
    for name, runs in EVIDENCE.items():
        assert ROUNDS[name] is runs
    firsts = [run.form for _, run in QUEUE[:3]]
    assert firsts == [methods(128)["groups"], methods(2)["groups"], methods(2)["BKN learned"]]
    sizes = {(run.cell, run.form.m) for run in EVIDENCE["sizes"] if run.form.kind == "kalman"}
    assert len(sizes) == 4 * len(SIZES)
    settings = {(run.batch, run.form.m) for run in EVIDENCE["settings"]}
    assert settings == set(PAPER)
    assert {run.form for run in EVIDENCE["ablations"]} == set(ABLATIONS.values())


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
            images = score.setting.images
            assert round(100 * round(accuracy * images / 100) / images, 2) == accuracy


def test_first_losses_are_those_of_the_training():
    """They are the means of every 25 steps. A training that is shorter has fewer."""
    whole = made_up(Form(kind="ghost", m=2), epochs=6, batch=16)
    train([whole])
    assert 25 < whole.steps < 50
    expected = [round(float(part.mean()), 3) for part in (whole.losses[:25], whole.losses[25:])]
    assert early.losses(whole.run, whole.cell, whole.data, 1000) == expected
    assert early.losses(whole.run, whole.cell, whole.data, 25) == expected[:1]


def test_packs_become_the_files_of_the_lab(tmp_path, monkeypatch):
    """Pixels by channel, in the order of the packs. The lab itself compares them with known checksums."""
    images = torch.randint(0, 256, (50_000, 3, 2, 2), dtype=torch.uint8)
    monkeypatch.setattr(pack, "unpacked", lambda names, *_: (images[: 10_000 * (5 if len(names) == 2 else 1)],) * 2)
    monkeypatch.setattr(pack, "_save_batch", lambda path, own, _: saved.update({path.name: own}))
    saved = {}
    pack.lab(tmp_path)
    assert list(saved) == [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    assert torch.equal(torch.cat([saved[f"data_batch_{number}"] for number in range(1, 6)]), images)
    monkeypatch.undo()
    pack._save_batch(tmp_path / "batch", images[:2], torch.tensor([3, 4]))
    record = pickle.loads((tmp_path / "batch").read_bytes())
    assert record["labels"] == [3, 4] and (record["data"] == images[:2].reshape(2, 12).numpy()).all()
