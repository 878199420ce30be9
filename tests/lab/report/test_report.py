"""What the report says of runs: nothing unlike is averaged, nothing is hidden, and every word follows from records."""

from __future__ import annotations

import base64
import csv
import hashlib
import itertools
import json
import os
import re
import shutil
import statistics
from pathlib import Path

import pytest

from kalmannorm.lab.errors import LabError
from kalmannorm.lab.files.records import read_json, write_json
from kalmannorm.lab.recipes.recipe import Recipe
from kalmannorm.lab.recipes.setting import Setting
from kalmannorm.lab.report import summarize, svg, write
from kalmannorm.lab.report.charts import Map, spaced
from kalmannorm.lab.report.collecting import collect
from kalmannorm.lab.report.comparison import chapters, compare
from kalmannorm.lab.report.curves import curve
from kalmannorm.lab.report.sentences import on_gains, on_speed, sentences
from kalmannorm.lab.report.tables import results
from kalmannorm.lab.words.spread import Spread, spread
from kalmannorm_command.app import run as command
from support.report_runs import (
    EPOCHS,
    FINAL,
    METHOD_NAMES,
    SETTINGS,
    accuracies,
    make_comparison,
    make_experiment,
    make_run,
)


def recipe(method: str = "bkn", m: int = 1, seed: int = 0, **fields) -> Recipe:
    return Recipe(method=method, statistics_batch=m, epochs=EPOCHS, seed=seed, **fields)


def add(folder: Path, one: Recipe, population: float | None = None, **options) -> Path:
    """A run; `population` replaces the accuracy of its result."""
    made = make_run(folder / f"{one.name}-{one.digest}", one, **options)
    if population is not None:
        result = read_json(made / "result.json")
        result["accuracy"]["population"] = population
        write_json(made / "result.json", result)
    return made


def compared(folder: Path):
    (only,) = compare(collect([folder]).runs)
    return only


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return make_comparison(tmp_path_factory.mktemp("runs") / "demo")


def test_spread_is_of_the_sample_and_one_seed_has_none():
    values = [97.0, 98.0, 99.5, None, float("nan")]
    assert spread(values) == Spread(statistics.fmean(values[:3]), statistics.stdev(values[:3]), 3)
    assert spread([97.0]) == Spread(97.0, None, 1)
    assert spread([None]) is None


def test_cells_average_the_seeds_that_finished(whole):
    comparison = compared(whole)
    assert [variant.method for variant in comparison.variants] == list(METHOD_NAMES)
    assert [tuple(setting) for setting in comparison.settings] == list(SETTINGS)
    by_method = {variant.method: variant for variant in comparison.variants}
    scores = [accuracies("bn", 2, seed)["batch"] for seed in range(3)]
    assert comparison.accuracy(by_method["bn"], Setting(64, 2), "batch") == spread(scores)
    scores = [accuracies("bkn-learned", 2, seed)["batch"] for seed in range(2)]  # the third is unfinished
    assert comparison.accuracy(by_method["bkn-learned"], Setting(64, 2), "batch") == spread(scores)
    line = curve("", 0, comparison.seeds(by_method["bkn-learned"], Setting(64, 2)), "batch", "accuracy")
    assert set(line.n) == {2}


def test_a_diverged_run_counts_as_what_it_is(whole):
    comparison = compared(whole)
    brn = next(variant for variant in comparison.variants if variant.method == "brn")
    found = comparison.accuracy(brn, Setting(64, 1), "population")
    assert found.n == 3 and found.mean < FINAL["brn"][1][0] - 20
    assert comparison.diverged(brn, Setting(64, 1)) == 1
    cell = re.search(r'<td[^>]*title="BRN \(64, 1\), population[^>]*>', results(comparison))[0]
    assert "1 diverged" in cell and "best" not in cell and "level" not in cell
    line = curve("BRN", 4, comparison.cells[brn, Setting(64, 1)], "population", "accuracy")
    assert set(line.n) == {3}  # it does not drop out of the average after it diverged
    assert line.y[-1] < 70


def test_a_method_without_groups_stands_at_every_setting_and_adds_none(tmp_path, whole):
    comparison = compared(whole)
    gn = next(variant for variant in comparison.variants if variant.method == "gn")
    scores = spread(accuracies("gn", 64, seed)["population"] for seed in range(3))
    assert {comparison.accuracy(gn, setting, "population") for setting in comparison.settings} == {scores}
    assert len(comparison.counting) == len({run.place for run in comparison.counting})
    add(tmp_path, recipe("gn", 64))
    assert compared(tmp_path).settings == [(64, 64)]
    add(tmp_path, recipe("bn", 2))
    assert compared(tmp_path).settings == [(64, 2)]


def test_unlike_runs_are_not_averaged(tmp_path):
    for seed in range(2):
        add(tmp_path, recipe(seed=seed), 98.0)
        add(tmp_path, recipe(seed=seed, gain=0.9), 90.0)
    comparison = compared(tmp_path)
    assert [variant.label for variant in comparison.variants] == ["BKN, q₀ by default", "BKN, q₀ 0.9"]
    means = [comparison.accuracy(variant, Setting(64, 1), "population").mean for variant in comparison.variants]
    assert means == [98.0, 90.0]
    assert len({variant.colour for variant in comparison.variants}) == 2


def test_what_differs_only_between_methods_or_settings_makes_no_rows_but_is_said(tmp_path):
    add(tmp_path, recipe("bn", 64, width=1.5))
    add(tmp_path, recipe("bkn", 64))
    add(tmp_path, recipe("bkn", 1, learning_rate=0.01))
    comparison = compared(tmp_path)
    assert [variant.label for variant in comparison.variants] == ["BN", "BKN"]
    assert comparison.differing == {"width": [1.0, 1.5], "learning_rate": [0.01, 0.1]}


def test_other_models_data_and_examples_are_other_comparisons(tmp_path):
    add(tmp_path, recipe())
    add(tmp_path, recipe(model="cifar-inception", dataset="cifar10"))
    add(tmp_path, recipe(train_examples=100))
    assert len(compare(collect([tmp_path]).runs)) == 3


def test_of_the_same_recipe_the_last_run_counts(tmp_path):
    first, second = add(tmp_path / "a", recipe(), 90.0), add(tmp_path / "b", recipe(), 98.0)
    os.utime(second / "result.json", (1, 1))
    (chapter,) = chapters(collect([tmp_path]))
    assert [run.state for run in chapter.runs] == ["finished", "repeated"]
    (variant,) = chapter.comparisons[0].variants
    assert chapter.comparisons[0].accuracy(variant, Setting(64, 1), "population") == Spread(90.0, None, 1)
    assert any("was repeated" in sentence for sentence in sentences(chapter.comparisons[0]))
    assert first.exists()


def test_folders_that_overlap_give_each_run_once(whole):
    places = [run.place for run in collect([whole, whole.parent, whole]).runs]
    assert len(places) == len(set(places)) == ((len(METHOD_NAMES) - 1) * len(SETTINGS) + 1) * 3  # GN at one setting


def test_the_first_sentence_tells_who_falls_and_who_holds(whole):
    said = sentences(compared(whole))
    assert said[0] == "At (64, 1) in population mode BN falls to 86.3 ± 4.0 % from 98.8 ± 0.2, BKN holds 97.9 ± 0.2."
    assert "1 run diverged and counts with its final accuracy: BRN (64, 1) seed 2." in said
    assert "1 run is unfinished and enters no average: BKN learned (64, 2) seed 2." in said


def test_sentences_follow_the_numbers(tmp_path):
    """The same words with other numbers would be a lie: turn the result round and see the words turn."""
    for seed in range(3):
        for m, bn, bkn in ((64, 98.0, 98.0), (1, 98.0, 80.0)):
            add(tmp_path, recipe("bn", m, seed), bn + 0.1 * seed)
            add(tmp_path, recipe("bkn", m, seed), bkn + 0.1 * seed)
    assert sentences(compared(tmp_path))[0] == (
        "At (64, 1) in population mode BN holds 98.1 ± 0.1 %, BKN falls to 80.1 ± 0.1."
    )


def test_a_difference_within_the_spread_is_called_that(tmp_path):
    for seed in range(3):
        for m in (64, 1):
            add(tmp_path, recipe("bn", m, seed), 97.0 + seed)
            add(tmp_path, recipe("bkn", m, seed), 97.2 + seed)
    assert "does not differ beyond chance: 3 seeds leave ± 2.3 points" in sentences(compared(tmp_path))[0]


def test_one_seed_says_that_the_spread_is_unknown(tmp_path):
    for m, bn, bkn in ((64, 98.0, 98.0), (1, 80.0, 98.0)):
        add(tmp_path, recipe("bn", m), bn)
        add(tmp_path, recipe("bkn", m), bkn)
    assert sentences(compared(tmp_path))[0] == (
        "At (64, 1) in population mode BN falls to 80.0 % from 98.0, BKN holds 98.0 (one seed: the spread is unknown)."
    )
    assert "single seeds" in results(compared(tmp_path))


def test_gains_and_speed_are_told_from_results(whole):
    comparison = compared(whole)
    told = " ".join(on_gains(comparison))
    cell = next(runs for (variant, s), runs in comparison.cells.items() if variant.method == "bkn" and s[1] == 1)
    mean = statistics.fmean(q for run in cell for q in run.result["gains"].values())
    assert f"{mean:.2f} at (64, 1)" in told
    assert "GN 0.9" in " ".join(on_speed(comparison))


def test_speeds_that_vary_between_seeds_are_not_compared(tmp_path):
    for seed, speed in ((0, 1000.0), (1, 2000.0)):
        for method in ("bn", "bkn"):
            made = add(tmp_path, recipe(method, seed=seed))
            write_json(made / "result.json", read_json(made / "result.json") | {"images_per_second": speed})
    assert on_speed(compared(tmp_path)) == [
        "Seeds of one method differ in speed by up to 47% (standard deviation): too much to compare."
    ]


def test_a_speed_of_zero_is_not_compared(tmp_path):
    """As a damaged result may have it."""
    add(tmp_path, recipe("bn"))
    made = add(tmp_path, recipe("bkn"))
    write_json(made / "result.json", read_json(made / "result.json") | {"images_per_second": 0.0})
    assert on_speed(compared(tmp_path)) == []


def test_speeds_of_different_machines_are_not_compared(tmp_path):
    add(tmp_path, recipe("bn"))
    other = add(tmp_path, recipe("bkn"))
    record = read_json(other / "recipe.json")
    record["origin"]["hardware"] = "another machine"
    write_json(other / "recipe.json", record)
    assert on_speed(compared(tmp_path)) == []
    assert "do not compare their speeds" in write([tmp_path], tmp_path / "page.html").read_text()


def test_one_damaged_file_does_not_stop_the_report(tmp_path):
    analysed, good, bad = (add(tmp_path, recipe(seed=seed)) for seed in range(3))
    (bad / "result.json").write_text('{"accuracy"')
    (analysed / "analysis" / "layers.json").write_text("[")
    found = collect([tmp_path])
    assert {run.run.folder for run in found.runs} == {good, analysed}
    assert len(found.damaged) == 2
    page = write([tmp_path], tmp_path / "page.html").read_text()
    assert page.count("is damaged") == 2


def test_only_unfinished_runs_still_make_a_page(tmp_path):
    add(tmp_path, recipe(), unfinished=True)
    page = write([tmp_path], tmp_path / "page.html").read_text()
    assert "No run has finished yet." in page and "epoch 6.0 of 12" in page


def test_no_runs_and_no_folder_are_one_line(tmp_path):
    with pytest.raises(LabError, match=r"there are no runs in .*kalmannorm demo"):
        write([tmp_path], tmp_path / "page.html")
    with pytest.raises(LabError, match="there is no folder"):
        write([tmp_path / "nowhere"], tmp_path / "page.html")


def test_the_page_is_one_file_of_modest_size_that_asks_for_nothing(whole, tmp_path):
    page = write([whole], tmp_path / "page.html").read_text()
    assert len(page.encode()) < 1_000_000
    assert not re.search(r'(?:src|href)="(?!#)', page)
    links = set(re.findall(r"https?://[^\s\"'<>)]+", page))
    assert links == {"http://www.w3.org/2000/svg"}
    for value in ("kalmannorm compare --methods bkn", "0123456789abcdef", "seed", "hardware", "torch"):
        assert value in page


def test_the_policy_names_exactly_the_scripts_and_the_style(whole, tmp_path):
    page = write([whole], tmp_path / "page.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    blocks = re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", page, re.S)
    hashes = {base64.b64encode(hashlib.sha256(block.encode()).digest()).decode() for block in blocks}
    assert hashes == set(re.findall(r"sha256-([^']+)'", policy)) and len(hashes) == 3
    assert not re.search(r"<[^>]+ (?:on\w+|style)=", page.split("<main")[1].split("<script")[0])


def test_every_figure_is_written_as_png_svg_and_csv(tmp_path):
    for method, m in (("bn", 64), ("bn", 1), ("bkn", 64), ("bkn", 1)):
        add(tmp_path / "runs", recipe(method, m))
    page = write([tmp_path / "runs"], tmp_path / "report.html", figures=tmp_path / "report-figures").read_text()
    links = re.findall(r'href="(report-figures/[^"]+)"', page)
    assert len(links) == 3 * page.count("<figure")
    for link in links:
        content = (tmp_path / link).read_bytes()
        assert content.startswith({"png": b"\x89PNG", "svg": b"<?xml"}.get(link[-3:], b"")) and len(content) > 100
    with (tmp_path / "report-figures" / "accuracy.csv").open() as file:
        rows = list(csv.DictReader(file))
    one = next(row for row in rows if row["series"] == "BN" and row["setting"] == "(64, 1)" and "pop" in row["panel"])
    assert float(one["test accuracy, %"]) == accuracies("bn", 1, 0)["population"]
    names = {path.stem for path in (tmp_path / "report-figures").glob("*.png")}
    assert {"training-accuracy-population", "training-loss-training", "variance-gap-64-1-features-8"} <= names
    assert (tmp_path / "report-figures" / "wiring-1.svg").is_file()


def test_an_experiment_shows_its_tables_beside_the_papers(tmp_path):
    make_experiment(tmp_path / "micro")
    page = write([tmp_path], tmp_path / "page.html").read_text()
    assert "Does BKN hold its accuracy" in page and "stand-in" in page and "The stand-in has 8×8 images." in page
    assert re.search(r'<td class="paper" data-value="76.4"[^>]*>76.4</td>', page)
    assert re.search(r'title="n = 2"[^>]*>98.8 ± 0.2</td>', page)
    assert "Validation accuracy" in page and "Batch variance minus moving variance" in page
    (chapter,) = summarize([tmp_path])["chapters"]
    assert chapter["experiment"]["name"] == "micro-256-4" and len(chapter["runs"]) == 6


def test_an_experiment_without_runs_is_shown(tmp_path):
    make_experiment(tmp_path)
    shutil.rmtree(tmp_path / "runs")
    assert "Top-1 accuracy" in write([tmp_path], tmp_path / "page.html").read_text()


def test_thinning_keeps_both_ends_and_spreads_evenly():
    assert spaced(5, 10) == [0, 1, 2, 3, 4]
    kept = spaced(1000, 11)
    assert kept[0] == 0 and kept[-1] == 999 and len(kept) == 11
    assert max(b - a for a, b in itertools.pairwise(kept)) <= 101


def test_packed_maps_hold_thousandths_and_gaps():
    packed = base64.b64decode(Map("", [[0.1234, None], [-99.0, 2.0]], [0, 1], ["a", "b"]).packed())
    values = [int.from_bytes(packed[i : i + 2], "little", signed=True) for i in range(0, 8, 2)]
    assert values == [123, -32768, -32767, 2000]


def test_of_a_foreign_drawing_only_shapes_are_taken(tmp_path):
    path = tmp_path / "wiring.svg"
    path.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" onload="a()" width="10"><script>b()</script><style>*{}</style>'
        '<foreignObject><p>c</p></foreignObject><path d="M0,0" marker-end="url(#tip)" fill="url(http://x/)"/>'
        '<a href="javascript:d()"><text>e</text></a><text id="tip">&lt;script&gt;</text></svg>'
    )
    assert svg.inlined(svg.read(path), 0) == (
        '<svg width="10"><path d="M0,0" marker-end="url(#wiring-0-tip)"></path>'
        '<text id="wiring-0-tip">&lt;script&gt;</text></svg>'
    )
    for other in ('<!DOCTYPE svg [<!ENTITY x "y">]><svg>&x;</svg>', "<svg", "<p/>", "<svg>" * 200 + "</svg>" * 200):
        path.write_text(other)
        with pytest.raises(LabError, match=r"is damaged|is not a .*drawing"):
            svg.read(path)


def test_the_command_writes_the_page_and_prints_json(tmp_path, capsys):
    add(tmp_path / "runs", recipe("bn"), 91.5)
    page = tmp_path / "out" / "page.html"
    assert command(["report", str(tmp_path / "runs"), "-o", str(page), "--no-draw", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["page"] == str(page) and page.is_file() and printed["figures"] is None
    (cell,) = printed["chapters"][0]["comparisons"][0]["cells"]
    assert cell["setting"] == [64, 1] and cell["accuracy"]["population"] == {"mean": 91.5, "std": None, "n": 1}
    assert not list(page.parent.glob("*-figures"))
    assert command(["report", str(tmp_path / "nowhere"), "-o", str(page)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
