"""Plans of the paper's experiments: which data, nets, lengths and seeds, and what is refused before anything runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kalmannorm.lab.errors import LabError
from kalmannorm.lab.experiments import planning
from kalmannorm.lab.experiments.catalogue import experiment
from kalmannorm.lab.experiments.planning import Wanted, plan
from kalmannorm.lab.recipes.recipe import Execution, Recipe

EXECUTION = Execution(device="cpu")


def cells_of(name: str, **wanted) -> dict[str, Recipe]:
    return {cell.folder: cell.recipe for cell in plan(experiment(name), Wanted(**wanted), EXECUTION).cells}


def test_the_budget_scales_the_length_and_the_paper_decides_the_rest():
    full = cells_of("moderate", dataset="digits", seeds=1)
    tenth = cells_of("moderate", dataset="digits", seeds=1, budget=0.1)
    assert {recipe.epochs for recipe in full.values()} == {20} and {r.epochs for r in tenth.values()} == {2.0}
    assert {recipe.evaluate_every for recipe in tenth.values()} == {0.1}
    paper = plan(experiment("moderate"), Wanted("digits", paper_only=True, seeds=1), EXECUTION)
    assert [arm.method for arm in paper.arms] == ["bn", "bkn-learned"]
    assert len({cell.folder for cell in paper.cells}) == 2


def pretend(monkeypatch, classes: int, train_size: int) -> None:
    """Data sets that are not here, as far as a plan asks for them."""
    shown = SimpleNamespace(classes=classes, train_size=train_size, shape=(3, 32, 32))
    monkeypatch.setattr(planning, "_data", lambda *_: shown)


def test_imagenet_is_the_papers_own(monkeypatch):
    pretend(monkeypatch, 1000, 1_281_167)
    chosen = plan(experiment("moderate"), Wanted(), EXECUTION)
    assert chosen.stand_in is False and chosen.models == {"inception": "bn-inception", "resnet": "resnet101"}
    assert [(cell.recipe.epochs, cell.recipe.seed) for cell in chosen.cells] == [(34, 0)] * 6  # no GN, one seed
    assert plan(experiment("moderate"), Wanted("folder:/my/imagenet"), EXECUTION).stand_in is False
    assert plan(experiment("moderate"), Wanted(model="resnet18"), EXECUTION).stand_in is True
    pretend(monkeypatch, 100, 126_000)
    assert plan(experiment("moderate"), Wanted("folder:/my/birds"), EXECUTION).stand_in is True


def test_each_cell_has_a_folder_of_its_own(monkeypatch):
    pretend(monkeypatch, 10, 50_000)
    both = plan(experiment("cifar"), Wanted(seeds=2), EXECUTION)
    assert both.stand_in is False and both.datasets == ["cifar10", "cifar100"]
    assert len({cell.folder for cell in both.cells}) == len(both.cells) == 2 * 15 * 2
    paper = plan(experiment("cifar"), Wanted(seeds=3, paper_only=True), EXECUTION)
    assert len(paper.cells) == 30, "as docs/experiments.md says"


def test_rows_are_chosen_by_name(monkeypatch):
    pretend(monkeypatch, 10, 50_000)
    some = plan(experiment("cifar"), Wanted("cifar10", rows=("bkn-closing-128x2", "bn-128x2")), EXECUTION)
    assert [arm.key for arm in some.arms] == ["bn-128x2", "bkn-closing-128x2"] and len(some.cells) == 6
    with pytest.raises(LabError, match=r"cifar has no row 'bkn-128x4': use some of bn-128x128, bn-wide-128x128, "):
        plan(experiment("cifar"), Wanted(rows=("bn-128x2", "bkn-128x4")), EXECUTION)
    with pytest.raises(LabError, match="the other options leave out every row of --rows bkn-128x2"):
        plan(experiment("cifar"), Wanted(rows=("bkn-128x2",), paper_only=True), EXECUTION)


def test_arms_that_the_options_exclude_are_left_out(monkeypatch):
    """Only the lab's own networks can be widened, and frozen statistics at the end exclude a closing phase."""
    pretend(monkeypatch, 10, 50_000)
    keys = {arm.key for arm in plan(experiment("cifar"), Wanted(seeds=1), EXECUTION).arms}
    other = {arm.key for arm in plan(experiment("cifar"), Wanted(model="resnet18", seeds=1), EXECUTION).arms}
    assert keys - other == {"bn-wide-128x128", "bn-wide-128x2"}
    finished = Wanted(seeds=1, changes={"finish_epochs": 1.0})
    frozen = plan(experiment("cifar"), finished, EXECUTION)
    assert keys - {arm.key for arm in frozen.arms} == {
        f"{method}-closing-128x2" for method in ("bkn", "bkn-ws", "bn", "bn-ws")
    }
    with pytest.raises(LabError, match="width scales only the lab's own networks"):
        plan(experiment("parameters"), Wanted(model="resnet18", seeds=1), EXECUTION)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"dataset": "digits", "changes": {"train_examples": 200}}, "gradient batch of 256 is larger than the 200"),
        ({"dataset": "digits", "budget": 0.0}, "--budget must be a positive number"),
        ({"dataset": "digits", "seeds": 0}, "--seeds must be a whole number from 1"),
        ({"dataset": "digits", "model": "nonsense"}, "unknown model 'nonsense'"),
        ({"dataset": "digitz"}, "did you mean 'digits'"),
        ({"dataset": "digits", "changes": {"precision": "half"}}, "unknown precision"),
    ],
)
def test_mistakes_are_told_before_anything_runs(wanted, message):
    with pytest.raises(LabError, match=message) as error:
        cells_of("moderate", **wanted)
    assert "\n" not in str(error.value)
