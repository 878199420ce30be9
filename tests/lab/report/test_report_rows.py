"""Which runs make a row, what it is called, and what is said where runs were too short or learned nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kalmannorm.lab.comparing.summary import summarize
from kalmannorm.lab.files.records import Log, Run, read_json, write_json
from kalmannorm.lab.recipes.recipe import Recipe
from kalmannorm.lab.recipes.setting import Setting
from kalmannorm.lab.report import write
from kalmannorm.lab.report.charts import Curves, Lines, Series
from kalmannorm.lab.report.collecting import collect
from kalmannorm.lab.report.comparison import chapters
from kalmannorm.lab.report.curves import common_steps, curve
from kalmannorm.lab.report.sentences import on_speed, sentences, what
from kalmannorm.lab.report.tables import results, settings_line
from kalmannorm.lab.words import naming
from kalmannorm.lab.words.spread import Spread
from support.report_runs import make_run


def add(folder: Path, method: str = "bkn", m: int = 1, seed: int = 0, score: float = 98.0, **fields) -> Path:
    """A run that ends with this accuracy in every way of inference; `steps` and `peak_memory` go to its result."""
    changes = {key: fields.pop(key) for key in ("steps", "peak_memory") if key in fields}
    recipe = Recipe(method=method, statistics_batch=m, seed=seed, **{"epochs": 12, **fields})
    home = make_run(folder / f"{recipe.name}-{recipe.digest}", recipe)
    result = read_json(home / "result.json")
    write_json(home / "result.json", result | changes | {"accuracy": dict.fromkeys(result["accuracy"], score)})
    return home


def compared(folder: Path):
    (chapter,) = chapters(collect([folder]))
    return chapter.comparisons[0]


def test_how_often_a_run_is_looked_at_makes_no_row(tmp_path):
    homes = [add(tmp_path, seed=0, score=97.0), add(tmp_path, seed=1, score=99.0, evaluate_every=0.0)]
    comparison = compared(tmp_path)
    (variant,) = comparison.variants
    assert variant.label == "BKN"
    assert comparison.accuracy(variant, Setting(64, 1), "population") == Spread(98.0, 2**0.5, 2)
    assert "valuate" not in settings_line(comparison)
    (row,) = summarize([Run.read(home) for home in homes])
    assert row["title"] == "BKN" and row["accuracy"]["population"]["n"] == 2


def test_of_runs_that_differ_in_that_alone_one_counts(tmp_path):
    add(tmp_path, evaluate_every=1.0)
    add(tmp_path, evaluate_every=3.0)
    assert sorted(run.state for run in compared(tmp_path).runs) == ["finished", "repeated"]


def test_a_mean_over_seeds_does_not_jump_where_one_was_not_looked_at(tmp_path):
    for seed, steps in ((0, (10, 20, 30, 40)), (1, (20, 40))):
        log = Log(add(tmp_path, seed=seed) / "log.jsonl")
        for step in steps:
            scores = {"population": {"accuracy": 40.0 * seed + step}}
            log.write("evaluate", step=step, epoch=step / 10, modes=scores)
        log.close()
    line = curve("", 0, compared(tmp_path).counting, "population", "accuracy")
    assert list(line.steps) == [20, 40] and list(line.y) == [40.0, 60.0] and set(line.n) == {2}
    assert common_steps([[10, 20, 40], [10]]) == [10, 20, 40]  # the second was looked at once
    assert common_steps([[10, 20, 40], [10, 20]]) == [10, 20, 40]  # the second diverged
    assert common_steps([[10, 20, 40], [10, 40]]) == [10, 40]


def test_epochs_that_differ_are_told_of_every_row_and_nothing_else_is(tmp_path):
    for epochs, every in ((12, 3.0), (6, 1.0), (1, 1.0)):
        for method in ("bn", "bkn") if epochs > 1 else ("bkn",):
            add(tmp_path, method, epochs=epochs, evaluate_every=every)
    add(tmp_path, "brn")
    comparison = compared(tmp_path)
    assert [variant.label for variant in comparison.variants] == [
        *("BN, 6 epochs", "BN, 12 epochs", "BRN, 12 epochs", "BKN, 1 epoch", "BKN, 6 epochs", "BKN, 12 epochs")
    ]
    assert what(comparison) == "digits-net on digits: 3 methods in 6 variants at 1 setting, 1 seed each."
    rows = summarize([run.run for run in comparison.runs])
    assert {row["title"] for row in rows} == {variant.label for variant in comparison.variants}


def test_only_what_was_trained_alike_is_compared(tmp_path):
    """BKN after 30 epochs is better than BN after 6, which says nothing of BKN."""
    for seed in range(2):
        for m in (64, 1):
            add(tmp_path, "bn", m, seed, 90.0 + seed, epochs=6)
            add(tmp_path, "bkn", m, seed, 80.0 + seed, epochs=6)
            add(tmp_path, "bkn", m, seed, 98.0 + seed, epochs=30)
    said = sentences(compared(tmp_path))
    assert said[0] == "With 6 epochs, at (64, 1) in population mode BN holds 90.5 ± 0.7 %, BKN 80.5 ± 0.7."
    assert "With 6 epochs, the best of 4 means at (64, 1), 90.5 %, is reached by BN in population and" in said[1]
    assert not any("98.5" in sentence for sentence in said)


def test_a_run_at_chance_level_is_told_first_and_compared_with_nothing(tmp_path):
    for seed in range(3):
        add(tmp_path, "bn", 1, seed, 10.0 + seed / 10)
        add(tmp_path, "bkn", 1, seed, 98.0 + seed / 10)
        add(tmp_path, "gn", 1, seed, 10.0 if seed else 97.0)
        add(tmp_path, "brn", 1, seed, 96.0)
    comparison = compared(tmp_path)
    said = sentences(comparison)
    assert said[0] == (
        "5 of 12 runs end at chance level (10 %) in every way of inference: BN (64, 1); GN (64, –), 2 of 3 seeds."
    )
    assert "is reached by BKN in" in said[1] and "next is BRN" in said[1] and len(said) == 2


def test_where_all_are_at_chance_level_nothing_is_the_best(tmp_path):
    for seed in range(2):
        add(tmp_path, "bn", 1, seed, 9.0 + seed)
        add(tmp_path, "bkn", 1, seed, 12.0 + seed)
    comparison = compared(tmp_path)
    assert sentences(comparison) == ["All runs end at chance level (10 %) in every way of inference."]
    assert not re.search('class="(best|level)', results(comparison))


@pytest.mark.parametrize(
    ("dataset", "score", "lost"),
    [
        ("digits", 14.0, True),
        ("digits", 16.0, False),
        ("cifar100", 1.4, True),
        ("cifar100", 1.6, False),
        ("imagenet", 0.4, False),  # four times what guessing gives
        ("folder:/data/birds", 1.0, False),  # who knows how many there are
    ],
)
def test_chance_is_that_of_the_data(tmp_path, dataset, score, lost):
    add(tmp_path, "bn", score=score, dataset=dataset)
    assert any("chance level" in sentence for sentence in sentences(compared(tmp_path))) is lost


def test_one_way_of_inference_at_chance_level_is_a_finding(tmp_path):
    """Batch norm at a statistics batch of 1 in population mode: that is what a comparison is for."""
    for seed in range(2):
        home = add(tmp_path, "bn", 1, seed, 96.0)
        result = read_json(home / "result.json")
        result["accuracy"]["population"] = 10.0 + seed
        write_json(home / "result.json", result)
        add(tmp_path, "bkn", 1, seed, 97.0 + seed)
    assert sentences(compared(tmp_path))[0].startswith("At (64, 1) in population mode BN reaches 10.5 ± 0.7 %")


@pytest.mark.parametrize(
    ("fields", "length"), [({"steps": 3, "epochs": 1}, "3 steps (1 epoch)"), ({"epochs": 0.5}, "epochs")]
)
def test_a_few_steps_compare_nothing(tmp_path, fields, length):
    for seed in range(2):
        add(tmp_path, "bn", 1, seed, 40.0, **fields)
        add(tmp_path, "bkn", 1, seed, 60.0, **fields)
    comparison = compared(tmp_path)
    (said,) = sentences(comparison)
    assert said.startswith("All runs were trained for") and length in said and said.endswith("too short to compare.")
    assert on_speed(comparison) == []


def test_one_is_not_many(tmp_path):
    add(tmp_path, epochs=1)
    assert what(compared(tmp_path)).endswith("1 method at 1 setting, 1 seed each, 1 epoch.")


def test_memory_is_promised_only_where_it_was_measured(tmp_path):
    add(tmp_path, peak_memory=None)
    assert "memory</h2>" not in write([tmp_path], tmp_path / "page.html").read_text()
    add(tmp_path, seed=1, peak_memory=10_000_000)
    assert "Speed and memory</h2>" in write([tmp_path], tmp_path / "page.html").read_text()


def test_the_axis_of_training_ends_where_training_does():
    def chart(*x: float) -> Curves:
        return Curves([Lines("", [Series("BN", 0, x, [1.0] * len(x))])], "epoch", "accuracy")

    ends = [chart(*x).across[0].high for x in ((1.0,), (0.1, 30.0))]
    assert ends == pytest.approx([1.02, 30.6])


def test_a_run_without_a_closing_phase_is_named_so():
    recipes = [Recipe(method="bkn"), Recipe(method="bkn", closing_start=0.3, closing_end=0.6)]
    told = naming.telling(recipes)
    assert [naming.terms(recipe, told) for recipe in recipes] == [
        "no closing phase",
        "closing start 0.3, closing end 0.6",
    ]
