"""True small batches in trials/: several steps in one graph, the images of a run, its rounds, and what follows from
their records."""

import argparse
import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import kalmannorm
from trials import __main__ as command
from trials import chosen, queue, small, table
from trials.cells import BATCH, CELLS, Cell, Data, subset
from trials.forms import Form
from trials.rounds import ROUNDS
from trials.training import MOST_STEPS, Run, Training, steps_per_graph, train

ROOT = Path(__file__).parents[2]


def net():
    block = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))


def made_up(form, batch, count=None, images=60, **changes):
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(images) % 2
    pictures = (torch.randint(0, 100, (images, 3, 8, 8), generator=rng) + 100 * labels.view(-1, 1, 1, 1)).byte()
    one = torch.ones(1, 3, 1, 1)
    data = Data(pictures, labels, pictures[:20], labels[:20], one / 60, -one * 1.6)
    cell = Cell("made up", "made up", net, 8, 1, 2, rate=0.01, count=count)
    return Training(Run("made up", form, batch=batch, **changes), cell, data, graph=False)


class Replay:
    """Stands for a graph: a replay makes as many steps as the graph contains."""

    def __init__(self, training):
        self.training, self.replays = training, 0

    def replay(self):
        self.replays += 1
        for _ in range(self.training.several):
            self.training._step()


CLOSING = {"closing": True, "means": "average", "momentum": 0.02, "gradient_alpha": 0.05}
FORMS = {
    "early phase, fading prior": Form(kind="kalman", m=2, filters="scaled", close=(0.02, 0.37), fade=1.0, **CLOSING),
    "phase, some noise stays": Form(kind="ghost", m=2, close=(0.3, 0.6), top=0.9, **CLOSING),
    "moving average": Form(kind="moving", m=2, real=8, momentum=0.02),
}


@pytest.mark.parametrize("name", FORMS)
def test_several_steps_in_a_graph_are_single_steps(name, monkeypatch):
    """Where the norms change their way, and at the end, single steps fill the gaps."""
    single, joined = (made_up(FORMS[name], 2, evaluations=3) for _ in range(2))
    captured = []
    monkeypatch.setattr(Training, "_captured", lambda self: captured.append(self.done) or self.graph)
    joined.graph = graph = Replay(joined)
    train([single])
    train([joined])
    assert single.done == joined.done == joined.steps == 60
    assert joined.several == MOST_STEPS and 3 <= graph.replays < 60 / MOST_STEPS
    assert captured == sorted(joined.turns - {60})
    assert single.reached == joined.reached and [step for step, _ in joined.reached] == [20, 40, 60]
    assert torch.equal(single.losses, joined.losses)
    expected = single.model.state_dict()
    for key, value in joined.model.state_dict().items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("name", list(FORMS)[:2])
def test_the_phase_inside_a_step_is_the_phase_of_the_library(name):
    """Against `ClosingPhase.step` after every step."""
    inside, outside = (made_up(FORMS[name], 2) for _ in range(2))
    train([inside])
    phase, outside.phase = outside.phase, None
    strengths = []
    for _ in range(outside.steps):
        strengths.append(phase.strength)
        outside.step()
        phase.step()
    assert 0 < max(strengths) == inside.phase.strength and len(set(strengths)) > 10
    expected = outside.model.state_dict()
    for key, value in inside.model.state_dict().items():
        torch.testing.assert_close(value, expected[key], msg=key)
    assert any("closing.averages" in key for key in expected)


def test_a_phase_has_the_momentum_of_its_form():
    phases = [made_up(form, 2).phase for form in (FORMS["early phase, fading prior"],)]
    assert phases[0].momentum == 0.05 and phases[0].fade_prior
    plain = dataclasses.replace(FORMS["early phase, fading prior"], gradient_alpha=None)
    assert made_up(plain, 2).phase.momentum == 0.1


def test_scaled_filters_are_those_of_the_library():
    training = made_up(FORMS["early phase, fading prior"], 2)
    expected = kalmannorm.convert(net(), torch.randn(2, 3, 8, 8), statistics_batch_size=2, weight_standardization=True)
    assert [type(module) for module in training.model.modules()] == [type(module) for module in expected.modules()]


def test_how_many_steps_a_graph_has():
    assert [steps_per_graph(batch) for batch in (1, 2, 4, 8, 16, 128)] == [8, 8, 4, 2, 1, 1]


def test_a_run_sees_the_same_share_of_every_class():
    labels = torch.arange(1000) % 10
    numbers = subset(labels, 200)
    assert len(numbers.unique()) == 200 and labels[numbers].bincount().tolist() == [20] * 10
    assert torch.equal(subset(labels, 200), numbers)
    assert subset(labels, None).tolist() == subset(labels, 2000).tolist() == list(range(1000))


def test_a_run_trains_on_these_images_alone():
    one, other = (made_up(FORMS["moving average"], 2, count=20, seed=seed) for seed in (0, 1))
    mine = subset(one.data.train_labels, 20).sort().values
    for training in (one, other):
        assert training.steps == 20 and training.order.shape == (20, 2)
        for epoch in training.order.split(10):
            assert torch.equal(epoch.flatten().sort().values, mine)
    assert not torch.equal(one.order, other.order)


def test_recalibration_joins_small_batches():
    training = made_up(Form(kind="ghost", m=2), 2, images=300)
    assert [len(images) for images in training._batches()] == [BATCH, BATCH, 300 - 2 * BATCH]


def test_the_round_has_every_method_rate_and_batch():
    runs = ROUNDS["small"]
    assert len(set(runs)) == len({run.key for run in runs}) == 7 * 3 * 3
    for batch in (1, 2, 4):
        own = [run for run in runs if run.batch == batch]
        assert {run.form for run in own} == set(small.methods(batch).values())
        assert sorted({run.rate for run in own}) == [factor * 0.1 * batch / 128 for factor in (1, 4, 16)]
        assert {run.form.m for run in own if run.form.kind in ("kalman", "ghost", "moving")} == {batch}
        assert {run.form.momentum for run in own if run.form.kind in ("kalman", "ghost", "moving")} == {0.01 * batch}
    assert all(run.both and not run.test and run.seed == 0 for run in runs)
    cell = CELLS[small.CELL]
    assert cell.count * cell.epochs == 16_000
    assert not [step for batch in (1, 2, 4) for step in turning(batch) if step % steps_per_graph(batch)]


def turning(batch):
    """The steps after which a phase of the round begins or ends."""
    steps = 16_000 // batch
    return [round(share * steps) for form in small.methods(batch).values() for share in form.close if form.closing]


def recorded(run, accuracy, round_="small", loss=1.0):
    return {
        "key": run.key, "cell": run.cell, "seed": run.seed, "epochs": 4, "rate": run.rate, "form": vars(run.form),
        "decay": 5e-4, "batch": run.batch, "held_out": {"population": accuracy},
        "tested": {"population": accuracy - 1}, "loss": loss, "round": round_,
    }  # fmt: skip


def rows_of(name, batch, accuracies):
    """Records of a method at the rates of the round, in rising order. None: the run diverged."""
    runs = sorted((run for run in ROUNDS["small"] if run.form == small.methods(batch)[name]), key=lambda run: run.rate)
    runs = [run for run in runs if run.batch == batch]
    return [
        recorded(run, value or 10.0, loss=None if value is None else 1.0)
        for run, value in zip(runs, accuracies, strict=True)
    ]


def test_a_rate_is_chosen_on_held_out_images_and_more_seeds_follow():
    rows = json.loads(json.dumps(rows_of("bkn", 2, [40.0, 50.0, 45.0]) + rows_of("gn", 4, [30.0, 31.0, 29.0])[:2]))
    point = chosen.small_points(rows)["bkn", 2]
    assert point.score.setting.rate == 0.00625 and point.edge is None and point.tested() == {0: 49.0}
    assert list(chosen.small_points(rows)) == [("bkn", 2)]
    assert chosen.small_edges(rows) == []
    seeds = chosen.small_seeds(rows)
    assert [(run.seed, run.rate, run.batch, run.form) for run in seeds] == [
        (seed, 0.00625, 2, small.methods(2)["bkn"]) for seed in (1, 2)
    ]
    rows += [recorded(run, 52.0, "small-seeds") for run in seeds]
    lines = chosen.small_lines(rows)
    assert lines[1] == ["bkn", "2", "0.00625", "0.0015625 0.00625 0.025", "50.0", "49.0 51.0 51.0", "50.33"]


def test_the_page_tells_the_chosen_rates(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import results_small

    assert results_small.small_rates([]).startswith("No run has a record yet")
    made = {"bkn-ws": [40.0, 50.0, 45.0], "bkn": [40.0, 48.0, 60.0], "bn": [40.0, 45.0, 42.0], "gn": [None] * 3}
    rows = [row for name, values in made.items() for row in rows_of(name, 2, values)]
    rows += rows_of("bkn-ws", 4, [30.0, 20.0, 10.0])
    for seed, (ours, theirs) in {1: (51.0, 45.0), 2: (52.0, 45.5)}.items():
        for name, value in (("bkn-ws", ours), ("bn", theirs)):
            rows.append(recorded(small.run_of(small.methods(2)[name], 2, 0.00625, seed), value, "small-seeds"))
    origin = {"commit": "0123456789", "hardware": "made up", "torch": "2.10.0"}
    text = " ".join(results_small.small_rates([row | origin for row in rows]).split())
    assert "| batch norm | – | 44.2 ± 0.3 (3), 0.00625 | – |" in text
    assert "fading prior | 29.0 (1), 0.003125, at the edge | 50.0 ± 1.0 (3), 0.00625 | – |" in text
    assert "| group norm | – | diverged | – |" in text
    assert "In batches of 2 the best form of BKN is *BKN, closing phase*" in text, "on held-out images"
    assert "group norm diverged at every rate" in text and "*At the edge*" in text
    rows = [row | origin for row in rows if row["form"]["filters"] == "scaled" or row["form"]["kind"] != "kalman"]
    text = " ".join(results_small.small_rates(rows).split())
    assert "fading prior*: it is 5.83 ± 1.90 points above batch norm" in text


@pytest.mark.parametrize(
    ("accuracies", "rate"),
    {
        "the highest": ([40.0, 45.0, 50.0], 0.1),
        "the lowest": ([50.0, 45.0, 40.0], 0.000390625),
        "the highest that did not diverge": ([40.0, 50.0, None], None),
    }.values(),
    ids=["highest", "lowest", "next to one that diverged"],
)
def test_a_best_rate_at_the_edge_asks_for_a_further_one(accuracies, rate):
    rows = rows_of("mabn", 2, accuracies)
    edges = chosen.small_edges(rows)
    assert [run.rate for run in edges] == ([] if rate is None else [rate])
    assert bool(chosen.small_seeds(rows)) == (rate is None)
    for run in edges:
        assert run.form == small.methods(2)["mabn"] and (run.batch, run.seed, run.both) == (2, 0, True)
        worse = [*rows, recorded(run, 30.0, "small-edges")]
        assert chosen.small_edges(worse) == [] and len(chosen.small_seeds(worse)) == 2
        better = [*rows, recorded(run, 60.0, "small-edges")]
        (further,) = chosen.small_edges(better)
        last = chosen.small_edges([*better, recorded(further, 70.0, "small-edges")])
        assert last == [], "five rates are enough"
        assert len(chosen.small_seeds([*better, recorded(further, 70.0, "small-edges")])) == 2


def test_nothing_is_chosen_before_all_rates_were_run():
    rows = rows_of("bn", 1, [9.0, 10.0, 11.0])
    assert chosen.small_points(rows[:2]) == {} and chosen.small_seeds(rows[:2]) == []
    diverged = rows_of("bn", 1, [None, None, None])
    assert chosen.small_points(diverged) == {("bn", 1): None} and chosen.small_seeds(diverged) == []
    assert chosen.small_lines(diverged)[1][4] == "diverged"


def test_rounds_that_follow_from_records_wait_for_the_others():
    assert command.parts(["small", "sizes", "small-edges", "small-seeds", "rates"]) == [
        ["small", "sizes"], ["small-edges"], ["small-seeds", "rates"]
    ]  # fmt: skip


def test_the_command_reads_records_of_both_folders(tmp_path, monkeypatch):
    shared, own = tmp_path / "shared", tmp_path / "own"
    rows = rows_of("bkn", 2, [40.0, 50.0, 45.0])
    for folder, part in ((shared, rows[:2]), (own, rows[2:])):
        folder.mkdir()
        (folder / "small.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    monkeypatch.setattr(table, "RECORDS", shared)
    monkeypatch.setattr(table.records, "__defaults__", (shared,))
    assert command.runs_of("small-seeds", shared) == []
    assert len(command.runs_of("small-seeds", own)) == 2


def test_runs_of_different_batches_are_not_side_by_side(tmp_path, monkeypatch):
    """The shorter ones would wait for the longer ones."""
    batches = []
    monkeypatch.setattr(queue, "absent", lambda *_, **__: [])
    monkeypatch.setattr(queue.Queue, "_train", lambda self, batch: batches.append({run.batch for _, run in batch}) or 0)
    usual = {"packs": tmp_path, "records": tmp_path, "together": 30, "workers": 1, "budget": math.inf}
    queue.Queue(argparse.Namespace(**usual)).work([("small", run) for run in ROUNDS["small"]])
    assert batches == [{2}, {4}, {1}]


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_the_methods_of_the_round_train(batch):
    for form in small.methods(batch).values():
        found = command.dry(command.small(small.run_of(form, batch, 0.001)))
        assert "tested" in found
