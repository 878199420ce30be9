"""What the page calls a difference: more than seeds and test images explain; and what it calls the best."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from scipy.stats import t, ttest_ind_from_stats

from kalmannorm.lab.files.records import read_json
from kalmannorm.lab.machine.origin import hardware, in_words
from kalmannorm.lab.recipes.methods import METHODS
from kalmannorm.lab.recipes.recipe import Recipe
from kalmannorm.lab.report import write
from kalmannorm.lab.report.collecting import collect
from kalmannorm.lab.report.comparison import chapters, compare
from kalmannorm.lab.report.difference import difference
from kalmannorm.lab.report.glossary import glossary
from kalmannorm.lab.report.sentences import findings
from kalmannorm.lab.report.tables import results
from kalmannorm.lab.words.spread import Spread
from support.report_runs import make_run

MODES = ("population", "batch", "example")


def test_seeds_are_compared_by_welchs_t():
    one = Spread(98.0, 0.3, 3)
    for std, n in ((0.4, 4), (3.0, 2), (0.0, 5)):
        margin = difference(one, Spread(0.0, std, n), None).seeds
        for size, beyond in ((1.001 * margin, True), (0.999 * margin, False)):
            other = Spread(98.0 - size, std, n)
            assert bool(ttest_ind_from_stats(*one_side(one), *one_side(other), equal_var=False).pvalue < 0.05) is beyond
            assert difference(one, other, None).beyond_chance is beyond


def one_side(value: Spread) -> tuple[float, float, int]:
    return value.mean, value.std, value.n


def test_two_seeds_tell_little():
    """Twice the standard error, as it was before, is 68 % with one degree of freedom."""
    one, other = Spread(98.0, 1.0, 2), Spread(94.0, 1.0, 2)
    assert difference(one, other, 10_000).beyond_chance is False
    assert difference(one, other, 10_000).reason == f"2 seeds leave ± {t.ppf(0.975, 2):.1f} points"
    assert difference(one, Spread(93.0, 1.0, 2), 10_000).beyond_chance is True


def test_an_image_and_a_half_of_896_is_no_difference():
    exact = Spread(98.0, 0.0, 2), Spread(98.0 - 100 * 1.5 / 896, 0.0, 2)
    found = difference(*exact, 896)
    assert found.beyond_chance is False and found.reason == "896 test images leave ± 1.4 points"
    assert difference(*exact, 1_000_000).beyond_chance is True
    assert difference(*exact, None).beyond_chance is True


def test_the_error_of_test_images_is_binomial():
    p = 85 / 100
    margin = difference(Spread(85.0, 0.1, 3), Spread(85.0, 0.1, 3), 10_000).images
    assert margin == pytest.approx(100 * 1.96 * math.sqrt(2 * p * (1 - p) / 10_000), rel=1e-3)
    assert difference(Spread(100.0, 0.0, 3), Spread(100.0, 0.0, 3), 896).images > 0.2  # 100 % is not exact either


def test_a_single_seed_leaves_open_what_images_do_not_explain():
    one = Spread(98.0, None, 1)
    assert difference(one, Spread(80.0, 0.1, 3), 896).beyond_chance is None
    assert difference(one, Spread(97.8, 0.1, 3), 896).beyond_chance is False
    assert difference(one, one, None).beyond_chance is False


def test_the_largest_of_many_has_to_be_larger():
    one, other = Spread(98.0, 0.3, 3), Spread(97.2, 0.3, 3)
    assert difference(one, other, 100_000).beyond_chance is True
    assert difference(one, other, 100_000, among=6).beyond_chance is False


def add(folder: Path, method: str, m: int, seed: int, *, closing_start: float | None = None, **accuracy: float) -> None:
    recipe = Recipe(method=method, statistics_batch=m, epochs=2, seed=seed, closing_start=closing_start)
    home = make_run(folder / recipe.name, recipe)
    result = read_json(home / "result.json")
    result["accuracy"] |= accuracy
    (home / "result.json").write_text(json.dumps(result))


def told(folder: Path) -> list[str]:
    (comparison,) = compare(collect([folder]).runs)
    return findings(comparison)


def test_ways_that_tie_are_all_named(tmp_path):
    for seed in range(2):
        add(tmp_path, "bn", 1, seed, population=90.0 + seed, batch=90.0, example=89.0)
        add(tmp_path, "bkn", 1, seed, population=98.0 + seed, batch=99.0 - seed, example=98.5)
    assert told(tmp_path)[-1] == (
        "The best of 4 means at (64, 1), 98.5 %, is reached by BKN in population and example mode alike; "
        "next is BN in population mode, 90.5 ± 0.7."
    )


def test_methods_that_tie_share_the_bold(tmp_path):
    same = {"population": 98.0, "batch": 98.0, "example": 98.0}
    for method in ("bn", "bkn"):
        add(tmp_path, method, 1, 0, **same)
    assert told(tmp_path)[-1] == (
        "The best of 4 means at (64, 1), 98.0 %, is reached by BN in population and example mode and BKN in population "
        "and example mode alike."
    )
    (comparison,) = compare(collect([tmp_path]).runs)
    assert len(re.findall('class="(?:best|level)', results(comparison))) == 6


def test_a_cell_that_too_few_seeds_leave_open_is_neither_bold_nor_beaten(tmp_path):
    for seed in range(2):
        add(tmp_path, "bn", 1, seed, population=80.0 + 6 * seed, batch=98.0, example=80.0)
        add(tmp_path, "bkn", 1, seed, population=98.0, batch=98.0, example=98.0)
    (comparison,) = compare(collect([tmp_path]).runs)
    cells = {mode: re.search(rf'<td[^>]*title="BN \(64, 1\), {mode}.*?</td>', results(comparison))[0] for mode in MODES}
    assert told(tmp_path)[0] == (
        "At (64, 1) in population mode BN reaches 83.0 ± 4.2 %, BKN at 98.0 ± 0.0, but that may be chance: "
        "2 seeds leave ± 38.1 points."
    )
    assert "?</sup>" in cells["population"] and "leave ±" in cells["population"] and "level" not in cells["population"]
    assert "?</sup>" not in cells["batch"] and ("best" in cells["batch"] or "level" in cells["batch"])
    assert "?</sup>" not in cells["example"] and "level" not in cells["example"]


def test_the_headline_is_fixed_before_the_numbers_and_the_largest_gap_says_of_how_many(tmp_path):
    for seed in range(3):
        for m in (64, 1):
            add(tmp_path, "bn", m, seed, population=98.0 + seed / 10, batch=98.0 + seed / 10, example=97.0)
        add(tmp_path, "bkn", 64, seed, population=98.0, batch=98.0, example=98.0)
        add(tmp_path, "bkn", 1, seed, population=98.0, batch=50.0, example=60.0 + seed / 10)
        add(tmp_path, "bkn-learned", 1, seed, population=99.9, batch=98.0, example=98.0)
    said = told(tmp_path)
    # Not the example mode, where they differ more, and not the better of the two filters.
    assert said[0].startswith("At (64, 1) in population mode BN holds 98.1 ± 0.1 %; BKN, at 98.0 ± 0.0, does not")
    assert said[1] == (
        "The largest of 4 gaps to BN at (64, 1): in example mode BN holds 97.0 ± 0.0 %, BKN falls to 60.1 ± 0.1."
    )
    assert not any("batch mode" in each for each in said), "where the result of an image depends on others"


def test_a_row_with_a_closing_phase_is_compared_in_population_mode_only(tmp_path):
    for seed in range(3):
        add(tmp_path, "bn", 1, seed, population=90.0, batch=98.0, example=98.0)
        add(tmp_path, "bkn", 1, seed, population=97.0, batch=97.0, example=97.0)
        add(tmp_path, "bkn-learned", 1, seed, closing_start=0.02, population=98.0, batch=10.0, example=10.0)
    first, second, best = told(tmp_path)
    assert "BKN" in first and "10.0" not in first + second + best
    assert second.startswith("The largest of 3 gaps to BN at (64, 1): in population mode BN reaches 90.0 ± 0.0 %")
    assert "BKN learned, closing phase 98.0" in second and "BN, closing" not in first + second + best
    assert best.startswith("The best of 5 means at (64, 1), 98.0 %, is reached by")


def test_the_page_says_what_it_calls_a_difference(tmp_path):
    for seed in range(2):
        add(tmp_path, "bn", 1, seed)
        add(tmp_path, "bkn", 1, seed)
    (comparison,) = compare(collect([tmp_path]).runs)
    page = results(comparison)
    assert "all within the error of 896 test images, at 95 % for each pair." in page
    assert "the seeds are too few to tell (Welch&#x27;s t-test at 95 %)" in page


@pytest.mark.parametrize(
    ("recipe", "result", "images"),
    [
        ({}, {}, 896),
        ({"test_examples": 100}, {}, 100),
        ({"dataset": "cifar10"}, {}, 10_000),
        ({"dataset": "folder:/birds"}, {}, None),
        ({"dataset": "folder:/birds"}, {"test_images": 1234}, 1234),
    ],
)
def test_how_many_images_were_tested(tmp_path, recipe, result, images):
    home = make_run(tmp_path / "one", Recipe(statistics_batch=1, epochs=1, **recipe))
    (home / "result.json").write_text(json.dumps(read_json(home / "result.json") | result))
    (comparison,) = compare(collect([tmp_path]).runs)
    assert comparison.images == images


def test_settings_ways_of_inference_and_methods_are_explained_on_the_page(tmp_path):
    for method in ("bn", "gn", "bkn"):
        add(tmp_path, method, 2, 0)
    words = glossary(chapters(collect([tmp_path])))
    meanings = dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", words))
    assert list(meanings) == ["(64, 2)", "(64, –)", *MODES, "BN", "GN", "BKN"]
    assert "64 images, in groups of 2 that share their statistics" in meanings["(64, 2)"]
    assert all(meaning.endswith(".") for meaning in meanings.values())
    assert words in write([tmp_path], tmp_path / "page.html").read_text()
    assert all(method.words for method in METHODS.values())


def test_hardware_is_told_in_words(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "DEFAULT")
    assert re.fullmatch(r"64-bit ARM, \d+ CPU cores(, \d+ × .*)?", hardware())
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    assert "CPU cores, AVX2" in hardware()
    assert in_words("x86_64, 16 CPU cores, DEFAULT, 1 × NVIDIA H200") == "64-bit x86, 16 CPU cores, 1 × NVIDIA H200"
