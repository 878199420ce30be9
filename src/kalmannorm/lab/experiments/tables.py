"""The tables of a trained experiment: our numbers and the paper's, gains, and steps to an accuracy."""

from __future__ import annotations

from typing import Any

from kalmannorm.lab.experiments.planning import Plan
from kalmannorm.lab.experiments.results import Finished, Results, averaged, of_cells
from kalmannorm.lab.experiments.spec import Arm, Claim, Role
from kalmannorm.lab.files.records import Record

Table = Record
"""{"title", "columns": [str], "rows": [[cell]], "note"}."""
PAPER = "paper"
"""The heading of the paper's number, after the column that it belongs to."""
PAPERS_BKN = "the paper's BKN is BKN learned here"
GAPS = {
    "mean_abs": "mean |gap|",
    "spread": "spread over groups",
    "observed_mean_abs": "raw: mean |gap|",
    "observed_spread": "raw: spread",
}


def models_column(plan: Plan) -> list[str]:
    """The heading of the column of networks. A single network is in the title instead."""
    return ["model"] if len(plan.models) > 1 else []


def row_start(plan: Plan, role: Role) -> list[Any]:
    return [plan.models[role]] if len(plan.models) > 1 else []


def on_what(plan: Plan, *datasets: str) -> str:
    return f"{' and '.join(plan.models.values())} on {', '.join(datasets)}"


def accuracy_tables(plan: Plan, results: Results) -> list[Table]:
    """One table per data set: a row per network and arm, and the paper's number after each way of inference."""
    return [_accuracy_table(plan, results, dataset) for dataset in plan.datasets]


def _accuracy_table(plan: Plan, results: Results, dataset: str) -> Table:
    experiment = plan.experiment
    known = {
        mode
        for mode, _ in experiment.columns
        for arm in plan.arms
        for role in plan.models
        if experiment.paper(arm.key, mode, role, dataset) is not None
    }
    columns = [*models_column(plan), "method", "setting"]
    for mode, title in experiment.columns:
        columns += [title, PAPER] if mode in known else [title]
    counts = {
        (arm, role): experiment.paper(arm.key, "parameters", role, dataset) for arm in plan.arms for role in plan.models
    }
    told = any(count is not None for count in counts.values())
    columns += ["parameters", *([PAPER] if told else [])] if experiment.counted else []
    rows: list[list[Any]] = []
    for role in plan.models:
        for arm in plan.arms:
            found = of_cells(plan.of(arm, role, dataset), results)
            row = [*row_start(plan, role), arm.name, arm.place]
            for mode, _ in experiment.columns:
                row.append(averaged([run.accuracy(mode) for run in found]))
                if mode in known:
                    row.append(experiment.paper(arm.key, mode, role, dataset))
            if experiment.counted:
                own = [run.result["parameters"] for run in found]
                row += [own[0] if own else None, *([counts[arm, role]] if told else [])]
            rows.append(row)
    note = f"The numbers of the paper are from its {experiment.source}; {PAPERS_BKN}." if known else ""
    if known and plan.stand_in:
        note += " They are for another data set or network: compare the order of the methods, not the values."
    return {"title": f"Test accuracy of {on_what(plan, dataset)}, %", "columns": columns, "rows": rows, "note": note}


def claims_table(plan: Plan, results: Results) -> list[Table]:
    """BKN's gain over another method: the paper's number, and ours for each pair of runs with the same seed.

    Pairs in which a run is no better than guessing, or too short, are omitted.
    """
    experiment = plan.experiment
    arms = {arm.key: arm for arm in plan.arms}
    claims = [claim for claim in experiment.claims if claim.role in plan.models and claim.over in arms]
    if not claims:
        return []
    ours = [arm for arm in plan.arms if arm.method.startswith("bkn")]
    rows = []
    for claim in claims:
        for dataset in plan.datasets:
            over = arms[claim.over]
            row = [*row_start(plan, claim.role), over.label, claim.mode, _when(claim), claim.points]
            row += [averaged(_gains(plan, results, arm, over, claim, dataset)) for arm in ours]
            rows.append(row)
    return [
        {
            "title": f"Gain over another method, points: {on_what(plan, *plan.datasets)}",
            "columns": [
                *models_column(plan),
                "over",
                "inference",
                "after training",
                f"BKN in the {PAPER}",
                *(arm.name for arm in ours),
            ],
            "rows": rows,
            "note": f"Differences are taken seed by seed; {PAPERS_BKN}. Pairs with a run at chance level, or with one "
            "that is too short, are omitted.",
        }
    ]


def _when(claim: Claim) -> str:
    return "all of it" if claim.at is None else f"{claim.at:.0%}"


def _gains(plan: Plan, results: Results, arm: Arm, over: Arm, claim: Claim, dataset: str) -> list[float | None]:
    pairs = zip(plan.of(arm, claim.role, dataset), plan.of(over, claim.role, dataset), strict=True)
    gains = []
    for ours, theirs in pairs:
        if ours.folder in results and theirs.folder in results:
            pair = results[ours.folder], results[theirs.folder]
            a, b = (run.accuracy(claim.mode, claim.at) for run in pair)
            gains.append(None if a is None or b is None or any(run.lost for run in pair) else a - b)
    return gains


def steps_table(plan: Plan, results: Results, mode: str = "population") -> list[Table]:
    """Steps to the best accuracy of the arm named by `steps_to`, seed by seed."""
    experiment = plan.experiment
    baseline = next((arm for arm in plan.arms if arm.key == experiment.steps_to), None)
    if baseline is None:
        return []
    rows = []
    for dataset in plan.datasets:
        for role in plan.models:
            for arm in plan.arms:
                races = _races(plan, results, arm, baseline, role, dataset, mode)
                steps = [race.steps for race in races]
                row = [*row_start(plan, role), arm.name, averaged([race.target for race in races]), averaged(steps)]
                row += [experiment.paper(arm.key, "steps", role, dataset)]
                row += [f"{sum(step is not None for step in steps)} of {len(steps)}"]
                row += [None if arm == baseline else averaged([race.fewer for race in races])]
                row += [experiment.paper(arm.key, "fewer steps", role, dataset)]
                rows.append(row)
    return [
        {
            "title": f"Steps to the best accuracy of {baseline.label}: {on_what(plan, *plan.datasets)}",
            "columns": [
                *models_column(plan),
                "method",
                "accuracy to reach, %",
                "steps",
                PAPER,
                "seeds that reach it",
                "fewer steps, %",
                PAPER,
            ],
            "rows": rows,
            "note": f"In {mode} inference: the first evaluated step at which a seed reaches the best accuracy that "
            f"{baseline.name} has with the same seed; averages are over the seeds that reach it.",
        }
    ]


class _Race:
    """One seed of an arm compared with the same seed of the baseline."""

    def __init__(self, run: Finished, baseline: Finished, mode: str) -> None:
        self.target = baseline.best(mode)
        self.steps = None if self.target is None else run.steps_to(mode, self.target)
        pace = None if self.target is None else baseline.steps_to(mode, self.target)
        self.fewer = None if not self.steps or not pace else 100 * (1 - self.steps / pace)


def _races(plan: Plan, results: Results, arm: Arm, baseline: Arm, role: Role, dataset: str, mode: str) -> list[_Race]:
    pairs = zip(plan.of(arm, role, dataset), plan.of(baseline, role, dataset), strict=True)
    return [
        _Race(results[ours.folder], results[theirs.folder], mode)
        for ours, theirs in pairs
        if ours.folder in results and theirs.folder in results
    ]


def gap_tables(plan: Plan, results: Results) -> list[Table]:
    """The variance gap of each arm over all layers, and layer by layer."""
    if not plan.experiment.analysed:
        return []
    rows: list[list[Any]] = []
    layers: dict[str, dict[str, list[float | None]]] = {}
    for dataset in plan.datasets:
        for arm in plan.arms:
            records = [
                run.run.analysis("variance-gap") for run in of_cells(plan.of(arm, "inception", dataset), results)
            ]
            found = [record for record in records if record is not None]
            rows.append([arm.name, *(averaged([record["overall"][kind] for record in found]) for kind in GAPS)])
            for record in found:
                for layer in record["layers"]:
                    layers.setdefault(layer["name"], {}).setdefault(arm.key, []).append(layer["mean_abs"])
    note = "(variance that training normalizes with - moving variance) / moving variance, per channel and group."
    return [
        {
            "title": f"Variance gap over the training set: {on_what(plan, *plan.datasets)}",
            "columns": ["method", *GAPS.values()],
            "rows": rows,
            "note": f"{note} Raw is the observation of the mini-batch alone, before the prior corrects it.",
        },
        {
            "title": "Mean |variance gap| of each layer",
            "columns": ["layer", *(arm.name for arm in plan.arms)],
            "rows": [[name, *(averaged(by.get(arm.key, [])) for arm in plan.arms)] for name, by in layers.items()],
            "note": note,
        },
    ]
