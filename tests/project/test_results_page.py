"""docs/results.md is what `benchmarks/results_page.py` writes from the records, and no result on it is by hand.

So are the parts of other pages that it writes.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import statistics

import pytest
import results_advice
import results_evidence
import results_filters
import results_lab
import results_page
import results_trials
import results_words
from measured import ROOT
from results_words import Difference, compared, difference, paragraph, said, signed, spread
from scipy import stats

from support.evidence_rows import accuracy, record, records
from trials import chosen
from trials.evidence import EVIDENCE, ablations, methods
from trials.forms import Form
from trials.rounds import ROUNDS

PAGE = results_page.DOCUMENT.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", results_page.PAGES, ids=lambda page: page.name)
def test_the_page_says_what_the_records_say(page):
    text = page.read_text(encoding="utf-8")
    assert results_page.written(text, page) == text, "run python benchmarks/results_page.py"


def test_no_result_is_by_hand():
    """Accuracies have a decimal. Differences are in points, shares in %."""
    text = results_page.by_hand(PAGE + results_page.TRIALS.read_text(encoding="utf-8"))
    assert "## Fine-tuning" in text and "# How the recipe" in text and "<!--" not in text
    text = re.sub(r"\]\([^)]*\)", "]", text)  # addresses of links
    told = set(re.findall(r"\d+\.\d+|\d+ (?:points|%)|5e-4", text))
    assert told == {"95 %", "0.1", "5e-4"}, "an interval, and the usual learning rate and weight decay"


TABLES = results_page.BLOCKS | results_page.OF_TRIALS | results_page.PAGES[results_page.RECIPE]


@pytest.mark.parametrize("block", TABLES)
def test_every_table_names_its_seeds_and_its_origin(block):
    text = TABLES[block]()
    if block in ("in short", "the paper", "not run", "when to use what", "trials") or "No run has a record yet" in text:
        return
    assert (
        re.search(r"torch \d", text)
        and re.search(r"\b[0-9a-f]{7}\b", text)
        and re.search(r"`(python|kalmannorm (compare|reproduce)) ", text)
    )
    assert re.search(r"\bn\b|\(n\)|n = \d|by seed", text) or block == "ideas"  # its runs have seed 0, as the page says


def edited(rows, changes):
    """The records, with the accuracy of the first run that fits changed by so many points."""
    rows = copy.deepcopy(rows)
    for wanted, points in changes:
        row = next(row for row in rows if all(row[name] == value for name, value in wanted.items()))
        row["accuracy"]["population"] += points
    return rows


def test_another_record_gives_another_page(monkeypatch):
    read = results_lab.read
    change = [({"method": "BRN", "statistics_batch": 2}, 5.0)]
    monkeypatch.setattr(
        results_lab, "read", lambda name: edited(read(name), change) if name == results_lab.DIGITS else read(name)
    )
    assert results_page.written(PAGE) != PAGE


def test_a_sentence_that_no_longer_holds_stops_the_script(monkeypatch):
    read = results_lab.read
    changes = [({"method": "BKN weights", "statistics_batch": 2, "seed": seed}, -10.0) for seed in range(3)]
    monkeypatch.setattr(
        results_lab, "read", lambda name: edited(read(name), changes) if name == results_lab.CIFAR else read(name)
    )
    with pytest.raises(SystemExit, match=r"no longer support this sentence .* At m = 2, BKN is"):
        results_lab.cifar_table()


def test_intervals_are_those_of_a_paired_t_test():
    scores, base = {0: 61.2, 1: 61.4, 2: 60.8, 3: 60.5}, {3: 61.9, 2: 61.6, 1: 61.4, 0: 61.8, 4: 10.0}
    found = difference(scores, base)
    test = stats.ttest_rel([scores[seed] for seed in range(4)], [base[seed] for seed in range(4)])
    interval = test.confidence_interval(0.95)
    assert found.half is not None
    assert (found.points - found.half, found.points + found.half) == pytest.approx((interval.low, interval.high))
    assert found.open == (test.pvalue > 0.05)
    assert difference({0: 1.0, 1: 2.0}, {0: 2.0, 1: 4.0}) == Difference(-1.5, None), "two seeds have no interval"
    assert difference({0: 1.0, 1: 2.0, 2: 3.0}, {0: 4.0, 1: 5.0, 2: 6.0}).below


def test_numbers_in_words():
    assert [signed(-0.04), signed(0.25), signed(-1.25, 2)] == ["0.0", "+0.2", "−1.25"]
    assert [spread({3: 61.25}), spread({0: 60.0, 1: 62.0})] == ["61.2", "61.0 ± 1.4"]
    assert said("It holds.", True) == "It holds."
    assert compared("A", Difference(1.0, 0.5), "B", 1) == "A is 1.0 ± 0.5 points above B"
    assert compared("A", Difference(-1.0, 0.5), "B") == "A is 1.00 ± 0.50 points below B"
    assert compared("A", Difference(-0.2, 0.5), "B", 1) == "A cannot be told from B (−0.2 ± 0.5 points)"
    assert compared("A", Difference(1.0, None), "B", 1).startswith("A has +1.0 points against B, with too few seeds")
    lines = paragraph("x" * 113 + " at m = 2 and so on").splitlines()
    assert lines == ["x" * 113 + " at", "m = 2 and so on"]


def test_digits_are_the_seeds_of_the_figure():
    """The first file that has a seed counts, there and here."""
    by_size = {row["seed"] for row in results_lab.read(results_lab.BY_SIZE)}
    both = results_lab.digits("BN", 2, "population")
    assert set(both) > by_size
    for row in results_lab.read(results_lab.BY_SIZE):
        if (row["method"], row["statistics_batch"]) == ("BN", 2):
            assert both[row["seed"]] == row["accuracy"]["population"]
    script = (ROOT / "docs" / "figures" / "accuracy.py").read_text(encoding="utf-8")
    assert script.index("digits-by-size.jsonl") < script.index("records/accuracy.jsonl")


def test_every_trial_is_on_the_page():
    """In the table of ideas, or in that of rates and decays, or as the best of a norm."""
    ideas = [score for own in results_trials.ideas().values() for score in own]
    shown = [score for cell in results_trials.cells() for score in results_trials.held_out(cell)]
    assert len(shown) == sum(not score.setting.test for score in results_trials.all_scores()), "of another length"
    for cell in results_trials.cells():
        for score in results_trials.held_out(cell):
            rated = (
                results_trials.is_plain(score.setting.form) and results_trials._kind(score) in results_trials.LEARNED
            )
            other = score.setting.form.kind in results_trials.OTHERS or score in results_filters.with_filters(cell)
            assert score in ideas or rated or other, score.setting


def test_references_differ_in_the_idea_alone():
    for own in results_trials.ideas().values():
        for score in own:
            assert min(score.rows) == 0, "the page says that all numbers are those of seed 0"
            base = results_trials.reference(score)
            if base is None:
                continue
            mine, other = score.setting, base.setting
            assert (mine.cell, mine.rate, mine.decay) == (other.cell, other.rate, other.decay)
            assert mine.form.m == other.form.m and mine.form != other.form and results_trials.is_plain(other.form)


def test_what_was_run_is_not_listed_as_not_run(monkeypatch):
    monkeypatch.setattr(results_page, "NOT_RUN", [("Run.", lambda: True), ("Not run.", lambda: False)])
    monkeypatch.setattr(results_filters, "missing", list)
    monkeypatch.setattr(results_evidence, "missing", lambda: ["A round."])
    assert results_page.not_run() == "- Not run.\n- A round.\n"


@pytest.fixture
def with_records(monkeypatch):
    """The page as if these records were there too."""

    def use(rows):
        monkeypatch.setattr(results_evidence, "rows", lambda: tuple(rows))

    return use


def table_of(text, start):
    """The cells of the first table whose first line starts so, by the words of a line."""
    lines = iter(text.splitlines())
    heading = next(line for line in lines if line.startswith(start))
    next(lines)
    found = {}
    for line in lines:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        found[tuple(cells)] = cells
    return [cell.strip() for cell in heading.strip("|").split("|")], list(found.values())


@pytest.mark.parametrize("block", ["against m", "table 3", "settings", "ablations", "ablations on digits", "not run"])
def test_every_section_of_evidence_is_written_from_all_records(block, with_records):
    with_records(records())
    text = results_page.BLOCKS[block]()
    assert ("No run has a record" not in text and "made up" in text) or block == "not run"
    if block != "not run":
        test_every_table_names_its_seeds_and_its_origin(block)
    else:
        assert "round `" not in text and "Failed" not in text
    with_records([])
    empty = results_page.BLOCKS[block]()
    assert empty.count("of 228 runs") == 1 if block == "not run" else empty.startswith("No run has a record yet")


def test_accuracy_against_m_has_the_chosen_setting_on_test_images(with_records):
    rows = records("sizes", "rates", "seeds")
    with_records(rows)
    headings, lines = table_of(results_evidence.against_m(), "| inference | CIFAR-10,")
    assert headings[2:] == [f"m = {m}" for m in (128, 32, 8, 4, 2, 1)]
    ways = {(line[0], line[1]): line[2:] for line in lines}
    run = next(run for run in EVIDENCE["sizes"] if run.cell == "cifar10" and run.form == methods(4)["BKN"])
    assert ways["population", "BKN"][3] == f"{accuracy(run) - 1:.1f} (1)"
    assert ways["population", "BKN"][4].endswith("(3)"), "three seeds at m = 2"
    best = max(("population", "recalibrated", "example"), key=lambda mode: accuracy(run, mode))
    assert ways["chosen", "BKN"][3] == f"{accuracy(run, best) - 1:.1f} (1), {best}"
    assert ways["population", "group norm"][1:] == [""] * 5, "it has no m"
    assert ("chosen", "group norm") not in ways, "it has one way"
    for row in rows:
        if row["form"]["kind"] == "kalman" and row["form"]["m"] == 4:
            row["loss"] = None
    with_records(rows)
    _, lines = table_of(results_evidence.against_m(), "| inference | CIFAR-10,")
    assert next(line for line in lines if line[1] == "BKN")[5] == "diverged"
    for row in rows:
        if row["form"]["kind"] == "renorm":
            row["loss"] = None
    with_records(rows)
    _, lines = table_of(results_evidence.against_m(), "| inference | CIFAR-10,")
    assert [line[2:] for line in lines if line[1] == "batch renorm"] == [["diverged"] * 6], "it never trained"


def test_the_best_method_is_named_with_those_that_cannot_be_told_from_it(with_records):
    run = next(run for run in EVIDENCE["sizes"] if run.cell == "cifar10" and run.form == methods(2)["BKN"])
    other = next(run for run in EVIDENCE["sizes"] if run.cell == "cifar10" and run.form == methods(2)["renorm"])
    for off, told in ((0.5, "Within two standard errors of it: batch renorm"), (3.0, "No other is within two")):
        with_records(
            [
                record("sizes", each, held_out={"population": score}, tested={"population": score})
                for each, score in ((run, 90.0), (other, 90.0 - off))
            ]
        )
        text = results_evidence.against_m().replace("\n  ", " ")
        assert f"BKN has the most: 90.0 % (one seed each). {told}" in text
        assert not re.search(r"\.\.(?!/)|,,|  ", text), "written as one sentence after another"


def test_a_training_that_diverged_is_no_win_of_the_other_norm(with_records):
    """Each norm is taken with or without a closing phase, as held-out images choose."""
    runs = {run.form: run for run in EVIDENCE["sizes"] if run.cell == "cifar10" and run.form.m == 2}
    values = {"BKN": 88.0, "BKN, closing phase": 90.0, "groups": 89.9, "groups, closing phase": 99.0}
    rows = [
        record("sizes", runs[methods(2)[name]], held_out={"population": value}, tested={"population": value})
        for name, value in values.items()
    ]

    def advice():
        with_records(rows)
        ((m, _, *measured, use),) = results_evidence.beside_groups()
        assert m == "2" and measured[:3] == ["88.0", "90.0", "89.9"]
        return measured[3], use

    assert advice() == ("99.0", "batch norm on groups, with a closing phase")
    rows[3]["loss"] = None
    assert advice() == ("diverged", "batch norm on groups, which is simpler")
    rows[2]["held_out"]["population"] = rows[2]["tested"]["population"] = 80.0
    with_records(rows)
    assert results_evidence.beside_groups()[0][-1] == "BKN, with a closing phase"


def test_ablations_are_compared_with_the_row_of_their_name(with_records):
    rows = [row for row in records("ablations") if row["seed"] == 0]
    for row in rows:
        row["tested"]["population"] = 80.0 + 2 * (row["form"]["transition"] == "learned") + 3 * row["form"]["fixed"]
    with_records(rows)
    text = results_evidence.ablations()
    _, lines = table_of(text, "| CIFAR-10, m = 2")
    differences = {line[0]: line[-1] for line in lines}
    assert differences["BKN, gain fixed at 0.5"] == differences["BKN learned, gain fixed at 0.9"] == "+3.0"
    assert differences["BKN"] == differences["BKN learned"] == ""
    headings, lines = table_of(text, "| `example`")
    assert headings[1:] == ["k = 1", "k = 2", "k = 4", "k = 8", "k = 32", "population"] and len(lines) == 3


def test_ablations_on_digits_name_the_changes_that_can_be_told_apart(with_records):
    rows = records("ablations-digits")
    for row in rows:
        form, score = Form(**{**row["form"], "close": tuple(row["form"]["close"])}), 90.0 + row["seed"]
        if form == ablations(1)["BKN, gain fixed at 0.8"]:
            score -= 3 + 0.1 * row["seed"]
        if form == ablations(1)["BKN, gain from 0.2"]:  # as much below, but not with every seed
            score -= (0, 0, 0, 0, 15)[row["seed"]]
        if form == ablations(2)["BKN, gain by noise, error 0.03"] and row["seed"] < 2:
            row["loss"] = None
        row["test"]["population"] = score
    with_records(rows)
    text = results_evidence.ablations_on_digits()
    headings, lines = table_of(text, "| digits")
    by_name = {line[0]: dict(zip(headings, line, strict=True)) for line in lines}
    assert by_name["BKN, gain fixed at 0.8"]["m = 1, difference"] == "−3.2 ± 0.2"
    assert by_name["BKN, gain from 0.2"]["m = 1, difference"] == "−3.0 ± 8.3"
    assert by_name["BKN"]["m = 1, difference"] == ""
    assert by_name["BKN, gain by noise, error 0.03"]["m = 2, population"] == "93.0 ± 1.0 (3; 2 diverged)"
    told = " ".join(text.split())
    assert "Of 24 changes at m = 1, 1 have an interval without 0: BKN, gain fixed at 0.8 (−3.20 ± 0.20)." in told
    assert "at m = 2, none has an interval without 0" in told and "by chance, and 1 do." in told


def test_steps_are_counted_to_the_best_of_batch_norm_at_the_setting(with_records):
    rows = records("settings")
    for row in rows:
        kind = row["form"]["kind"]
        top = {"ghost": 60.0, "kalman": 80.0, "renorm": 50.0}[kind]
        row["reached"] = [[step, top * step / 1000] for step in range(50, 1001, 50)]
    with_records(rows)
    _, lines = table_of(results_evidence.settings(), "| setting")
    steps = {(line[0], line[2]): line[-1] for line in lines}
    assert steps["(256, 32)", "batch norm"] == "1,000 of 1,000"
    assert steps["(8, 2)", "BKN"] == "750 of 1,000" and steps["(16, 4)", "batch renorm"] == "not reached"
    assert len(lines) == 36
    claim = results_evidence.fewer_steps()
    assert "batch norm 1,000 of 1,000, BKN learned 750 of 1,000, BKN 750 of 1,000" in claim
    with_records([row for row in rows if row["form"]["kind"] != "ghost"])
    assert results_evidence.fewer_steps() == "*BKN needs fewer steps* was not measured here."


def test_what_is_missing_is_counted_by_cell_and_failed_runs_are_named(with_records):
    rows = records()
    lost = next(row for row in rows if row["round"] == "sizes" and row["cell"] == "tiny100")
    kept = [row for row in rows if row is not lost]
    failed = {"round": "sizes", "key": lost["key"], "failed": "RuntimeError: out of memory"}
    with_records([*kept, failed])
    assert results_evidence.missing() == [
        "Accuracy against m (round `sizes`): 1 of 228 runs (ResNet-18 on 100 classes of Tiny-ImageNet 1 of 57).",
        f"Failed: `sizes: {lost['key']}`.",
    ]
    with_records([*rows, failed])
    assert results_evidence.missing() == [], "it was run again"


def test_evidence_does_not_change_the_tables_of_the_trials(monkeypatch):
    real = results_trials.table.records()
    before = results_trials.chosen_table()
    monkeypatch.setattr(results_trials.table, "records", lambda: [*real, *records()])
    results_trials.all_scores.cache_clear()
    try:
        assert results_trials.chosen_table() == before
    finally:
        monkeypatch.undo()
        results_trials.all_scores.cache_clear()


def test_the_error_of_sigma_is_that_of_the_picture():
    """It has the same layers, and the same root mean square."""
    own = [row for row in results_evidence.sigma_rows() if (row["method"], row["statistics_batch"]) == ("BN", "2")]
    squares = [float(row["rms"]) ** 2 for row in own if row["layer"] != "1"]
    assert len(squares) == 4
    expected = 100 * (sum(squares) / 4) ** 0.5
    assert results_evidence.sigma_of("BN", 2, "rms") == pytest.approx(expected)


def test_a_new_cell_needs_a_name(monkeypatch):
    (score, *_) = results_trials.all_scores()
    other = copy.deepcopy(score)
    object.__setattr__(other.setting, "cell", "new")
    monkeypatch.setattr(results_trials, "all_scores", lambda: (score, other))
    with pytest.raises(SystemExit, match=r"give these cells a name .*\['new'\]"):
        results_trials.cells()


def test_what_the_page_for_deciding_says_of_small_batches():
    page = " ".join((ROOT / "docs" / "should-i-use-it.md").read_text(encoding="utf-8").split())
    moving, ahead = results_lab.SmallForm("mabn"), []
    for rate in (1.0, results_lab.HIGHER):
        for batch in (2, 1):
            found = {form: results_lab.small_on_cifar(form, batch) for form in results_lab.SMALL_METHODS}
            means = {f: results_words.mean(scores) for f, scores in found.items() if scores and f.rate == rate}
            bkn = max(value for form, value in means.items() if form.method.startswith("bkn"))
            ahead.append(f"{means[moving._replace(rate=rate)] - bkn:.1f}")
    low, high = (" and ".join(part) + " points" for part in (ahead[:2], ahead[2:]))
    told = f"it was {low} above BKN at a low learning rate, and {high} at four times this rate (one seed)"
    assert f"In true batches of 2 and 1 on CIFAR-10 {told}" in page
    points, ahead, seeds = chosen.small_points(), {}, {}
    for batch in (4, 2, 1):
        moving, *bkn = (points[form, batch].tested() for form in ("mabn", "bkn", "bkn-ws"))
        ahead[batch] = statistics.fmean(moving.values()) - max(statistics.fmean(each.values()) for each in bkn)
        seeds[batch] = {len(moving), *map(len, bkn)}
    told = f"it was [{ahead[4]:.1f} and {ahead[2]:.1f} points above BKN](results.md#true-small-batches)"
    told += f" in batches of 4 and 2 (3 seeds), and {ahead[1]:.1f} points in batches of 1"
    assert f"{told} (one seed; the lowest rate was the best for both)" in page
    assert points["mabn", 1].edge is not None and points["bkn-ws", 1].edge is not None
    assert seeds == {4: {3}, 2: {3}, 1: {1}}
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    told = f"{min(ahead.values()):.1f} to {max(ahead.values()):.1f} points above BKN"
    assert f"{told} (3 seeds; one in batches of 1, where the lowest rate was the best)" in readme
    for batch in (4, 2, 1):
        recipe, *others = (statistics.fmean(points[form, batch].tested().values()) for form in ("bkn-ws", "bn", "gn"))
        assert recipe > max(others)


def test_standard_errors():
    assert results_words.standard_error(50.0, 10_000) == pytest.approx(0.5)


ROUNDS_ON_TEST = results_filters.CONFIRMING
ROUND_OF = {run.key: name for name in ROUNDS_ON_TEST for run in ROUNDS[name]}
FILTERED = [run for name in ROUNDS_ON_TEST for run in ROUNDS[name]]
RECIPES = [("tiny100", form) for form in results_filters.RECIPE.values()]
STANDARDIZED = Form(kind="batch", filters="standardized")


@pytest.fixture
def with_confirmed(monkeypatch):
    """The page as if the recipe on Tiny-ImageNet and these runs were all that has computed filters on test images."""
    known = [run.key for run in FILTERED if (run.cell, run.form) in RECIPES]
    every = results_trials.table.records()
    real = [row for row in every if row["round"] not in ROUNDS_ON_TEST or row["key"] in known]

    def use(runs, score=accuracy, **changes):
        rows = [
            record(ROUND_OF.get(run.key, ROUNDS_ON_TEST[0]), run, test={"population": score(run)}, **changes)
            for run in runs
        ]
        monkeypatch.setattr(results_trials.table, "records", lambda: [*real, *rows])
        results_trials.all_scores.cache_clear()

    use([])
    yield use
    monkeypatch.undo()
    results_trials.all_scores.cache_clear()


def runs_of(cell, *forms):
    """Those of the rounds, without the recipe on Tiny-ImageNet, which has records."""
    own = [run for run in FILTERED if run.cell == cell and (cell, run.form) not in RECIPES]
    return [run for run in own if not forms or run.form in forms]


def likely(**points):
    """Accuracies about as high as the real ones, with points for a kind of norm that has computed filters."""
    bases = {"tiny100": 61.6, "cifar10": 89.0, "cifar100": 65.0}

    def score(run):
        more = 0 if run.form == Form(kind="batch") else points.get(run.form.kind, 0)
        return bases[run.cell] + more + 0.1 * (run.seed * run.form.m % 3)

    return score


def told_of_filters():
    """Every text about computed filters, on one line each."""
    texts = [TABLES[name]() for name in ("confirmed filters", "measured")]
    return [" ".join(text.split()) for text in texts]


@pytest.mark.parametrize("count", [0, 1, 8, 31, len(FILTERED)])
def test_every_page_is_written_from_a_part_of_the_runs_with_computed_filters(count, with_confirmed):
    others = ("confirmed", "chosen", "rates and decays", "ideas")
    before = [TABLES[name]() for name in others]
    runs = [run for run in FILTERED if run in runs_of(run.cell)]
    with_confirmed(runs[:count], likely(kalman=1.0))
    for page in results_page.PAGES:
        results_page.written(page.read_text(encoding="utf-8"), page)
    assert [TABLES[name]() for name in others] == before
    left = [ROUND_OF[run.key] for run in runs[count:]]
    for name in ROUNDS_ON_TEST:
        own = f"Computed filters on test images: {left.count(name)} of {len(ROUNDS[name])} runs of `{name}`"
        assert any(told.startswith(own) for told in results_filters.missing()) == (name in left)


def test_a_sentence_on_what_was_not_run_goes_when_it_is_run(with_confirmed):
    not_run = "has not been run on test images yet"
    for text in told_of_filters():
        assert f"Batch norm at 128 with standardized filters {not_run}. On held-out images it gained" in text
        assert f"Batch norm on groups of 2 with the same filters and the same phase {not_run}." in text
        assert "difference to batch norm at 128 with standardized filters" not in text
    assert "with either norm; batch norm on groups is simpler" in results_advice.when()
    with_confirmed(runs_of("tiny100"), likely(batch=3.0, ghost=-1.0, moving=0.5))
    for text in told_of_filters():
        assert not_run not in text
        assert re.search(r"Batch norm at 128 with standardized filters is 3[\d.]+ ± [\d.]+ points above", text)
        assert re.search(r"BKN at m = 2 is [\d.]+ ± [\d.]+ points below batch norm at 128 with standardized", text)
        assert re.search(r"same filters and the same phase is 2[\d.]+ ± [\d.]+ points below BKN at m = 2", text)
    text = " ".join(results_filters.confirm_table().split())
    assert "Moving Average Batch Norm at m = 1 cannot be told from BKN at m = 1" in text
    assert "with either norm" not in results_advice.when()


@pytest.mark.parametrize(
    ("points", "advice"),
    [
        ({"ghost": 4.0}, ["batch norm on groups, with the filters and the phase of [the recipe](recipe.md)", "BKN by"]),
        ({"ghost": 1.5}, ["[the recipe](recipe.md), with either norm; batch norm on groups is simpler", "BKN by"]),
        ({"ghost": 4.0, "moving": 5.0}, ["Moving Average Batch Norm", "Moving Average Batch Norm"]),
        ({}, ["BKN by [the recipe](recipe.md)", "BKN by"]),
    ],
    ids=["groups", "either", "moving average", "BKN"],
)
def test_advice_follows_the_test_images(points, advice, with_confirmed):
    with_confirmed(runs_of("tiny100"), likely(**points))
    _, lines = table_of(results_advice.when(), "| m | net and images | measured")
    two, one = (line for line in lines if line[1] == "ResNet-18 on 100 classes of Tiny-ImageNet, test")
    assert [two[0], one[0]] == ["2", "1"]
    assert two[-1] == advice[0] and one[-1].startswith(advice[1])


def test_the_table_of_computed_filters_has_both_differences(with_confirmed):
    with_confirmed(runs_of("tiny100"), likely(batch=3.0))
    headings, lines = table_of(results_filters.confirm_table(), "| Tiny-ImageNet, test accuracy")
    plain, same, *others = lines
    assert [plain[0], same[0]] == ["batch norm at 128, plain filters", "batch norm at 128, standardized filters"]
    assert [heading.split()[-2] for heading in headings[-2:]] == ["plain", "standardized"] and len(others) == 10
    assert plain[-2:] == ["", ""] and same[-2].startswith("+3.") and same[-1] == ""
    own = {score.setting.form: score.accuracies() for score in results_trials.on_test_images("tiny100", filters=True)}
    for line, form in zip(others[:4:2], (results_filters.RECIPE[m] for m in (2, 1)), strict=True):
        assert line[0].startswith(f"BKN, m = {form.m}, standardized filters")
        assert line[-1] == difference(own[form], own[STANDARDIZED]).shown(2)
        assert line[-2] == difference(own[form], results_trials.tested("tiny100", "batch", 128, phase=False)).shown(2)
    assert others[-1][0] == "Moving Average Batch Norm, m = 1" and others[-1][-1] == "", "its filters are centred"


def test_few_seeds_have_no_interval(with_confirmed):
    with_confirmed(runs_of("tiny100", STANDARDIZED)[:2], likely())
    assert all("with too few seeds for an interval" in text for text in told_of_filters())


def test_seeds_that_no_other_run_has_make_no_difference(with_confirmed):
    with_confirmed([dataclasses.replace(run, seed=9) for run in runs_of("tiny100", STANDARDIZED)], likely())
    _, lines = table_of(results_filters.confirm_table(), "| Tiny-ImageNet, test accuracy")
    assert lines[1][0] == "batch norm at 128, standardized filters" and lines[1][-2:] == ["", ""]


def test_runs_that_diverged_are_shown(with_confirmed):
    with_confirmed(runs_of("tiny100"), likely(), loss=None)
    _, lines = table_of(results_filters.confirm_table(), "| Tiny-ImageNet, test accuracy")
    assert lines[-1][0] == "Moving Average Batch Norm, m = 1" and lines[-1][2:5] == ["0", "diverged", "–"]
    for text in told_of_filters():
        assert "Batch norm at 128 with standardized filters diverged" in text and "same phase diverged" in text


def test_the_readme_has_every_run_in_its_table(with_confirmed):
    """What was not run, or diverged, is said so. Groups of 4 and 8 appear when they were run."""
    headings, lines = table_of(results_page.of_recipe(), "|  | ResNet-18")
    assert (
        headings[1:] == ["ResNet-18 on 100 classes of Tiny-ImageNet"]
        and "scored on one data set" in results_page.of_recipe()
    )
    cells = {line[0]: line[1] for line in lines}
    assert [name for name, cell in cells.items() if cell == "not run"] == list(cells)[1:2] + list(cells)[4:]
    assert not any("groups of 4" in name for name in cells)
    runs = [run for run in runs_of("tiny100") if run.form != STANDARDIZED or run.seed < 4]
    with_confirmed(runs, likely(batch=3.0))
    cells = {line[0]: line[1] for line in table_of(results_page.of_recipe(), "|  | ResNet-18")[1]}
    assert re.fullmatch(
        r"64\.\d \(\+[23]\.\d\d ± \d\.\d\d; 4 seeds\)", cells["batch norm at 128, standardized filters"]
    )
    assert "not run" not in cells.values() and any("groups of 8" in name for name in cells)
    with_confirmed(runs, likely(), loss=None)
    assert table_of(results_page.of_recipe(), "|  | ResNet-18")[1][-1][1] == "diverged"
    short = {line[0] for line in table_of(results_page.of_recipe(short=True), "|  | ResNet-18")[1]}
    assert set(cells) - short == {"BKN by the first recipe, m = 1 (gain from 0.5)"}


def test_a_cell_without_held_out_images_says_nothing_of_them(with_confirmed):
    with_confirmed([run for run in runs_of("cifar100") if run.form != STANDARDIZED], likely(kalman=1.0))
    tiny, cifar = results_filters.confirm_table().split("CIFAR Inception on CIFAR-100, 15 epochs")
    assert "On held-out images" in tiny and "On held-out images" not in cifar
    assert "Measured on 2 data sets." in results_filters.recipe_table()


def test_what_is_said_of_all_data_sets_follows_the_runs(with_confirmed):
    headings, lines = table_of(results_filters.comparisons(), "| BKN by the recipe")
    assert headings[1:] == ["Tiny-ImageNet"] and len(lines) == 2, "only batch norm with plain filters was run"
    assert results_filters.changed_gain() == ""
    assert "on Tiny-ImageNet has not been run on test images yet" in results_filters.without_prior()[0]
    with_confirmed([run for run in FILTERED if run in runs_of(run.cell)], likely(kalman=-2.0, ghost=1.0))
    headings, lines = table_of(results_filters.comparisons(), "| BKN by the recipe")
    assert headings[1:] == ["Tiny-ImageNet", "CIFAR-10", "CIFAR-100"] and len(lines) == 5
    assert all(re.fullmatch(r"[+−]?[\d.]+ ± [\d.]+", cell) for line in lines for cell in line[1:])
    assert lines[0][0] == "m = 2, minus batch norm at 128, plain filters" and lines[0][3].startswith("−2.")
    (grouped,) = (line for line in lines if "by the recipe" in line[0])
    assert re.match(r"−[23]\.", grouped[3]), "BKN minus groups, not groups minus BKN"
    assert results_filters.without_prior() == []
    assert results_filters.changed_gain() == "", "the new gain is as far below"


def test_the_change_of_the_recipe_is_told_on_every_page_that_has_its_score():
    told = "not an independent confirmation"
    for page in ("README.md", "docs/results.md", "docs/recipe.md"):
        assert told in " ".join((ROOT / page).read_text(encoding="utf-8").split())
