"""The rounds that are evidence for users, and the order of all their runs.

| round | question | cells |
| --- | --- | --- |
| `sizes` | accuracy against m, for every method | CIFAR-10, CIFAR-100, ResNet-32 on CIFAR-10, Tiny-ImageNet |
| `rates` | two more learning rates for every method at m = 2 and 1 | CIFAR-10, Tiny-ImageNet |
| `seeds` | two more seeds at m = 2 and 1, where the lines cross | those of `sizes` |
| `ablations` | which parts of BKN matter | CIFAR-10, m = 2 |
| `ablations-digits` | the same, on a CPU | digits, m = 2 and 1 |
| `settings` | the paper's ImageNet settings; steps to the accuracy of batch norm | BN-Inception on Tiny-ImageNet |
| `table3` | the paper's CIFAR table: 30 epochs, 3 seeds, test images | both CIFAR, plain and wide |

`table3` and `ablations-digits` train on all training images. The other rounds train on nine tenths. Choices are made by
the accuracy on the tenth that was held out. The same run is scored on the test images, and only the score of a chosen
setting is reported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from trials.cells import CELLS
from trials.forms import Form
from trials.training import Run

CELLS_BY_SIZE = ("cifar10", "tiny100", "cifar10-resnet32", "cifar100")
SIZES = (2, 1, 8, 4, 32, 128)
"""In the order in which they run."""
DECAYS = {"tiny100": 1e-3, "tiny100-inception": 1e-3}
"""Weight decays that were best for batch norm. Elsewhere that of the cell."""
WARMUP = 0.07
"""About an epoch of 15. Group norm did not always learn without it."""

CLOSING = {"closing": True, "means": "average"}
RECIPE = {**CLOSING, "filters": "scaled", "close": (0.02, 0.12)}
"""Of docs/recipe.md: what `convert` does to filters with `weight_standardization`, and an early phase."""


def methods(m: int) -> dict[str, Form]:
    """Every method whose training depends on m, the most telling first."""
    return {
        "groups": Form(kind="ghost", m=m),
        "BKN, closing phase": Form(kind="kalman", m=m, **CLOSING, close=(0.3, 0.6)),
        "BKN, recipe": Form(kind="kalman", m=m, **RECIPE, fade=1.0, gain=0.1 if m == 1 else None),
        "BKN": Form(kind="kalman", m=m),
        "BKN learned": Form(kind="kalman", m=m, transition="learned"),
        "groups, recipe": Form(kind="ghost", m=m, **RECIPE),
        "groups, closing phase": Form(kind="ghost", m=m, **CLOSING, close=(0.05, 0.35)),
        "renorm": Form(kind="renorm", m=m),
        "moving": Form(kind="moving", m=m),
    }


SINGLE = {
    "group": Form(kind="group", m=1),
    "standardized": Form(kind="standardized", m=1),
    "online": Form(kind="online", m=1),
}
"""Methods that know no groups of examples."""
BASELINE = "groups", 128
"""Batch norm at 128: one group of the whole batch."""


def _run(cell: str, form: Form, **changes: object) -> Run:
    warm = WARMUP if form.kind in ("group", "standardized") else 0.0
    run = Run(cell, form, warmup=warm, decay=DECAYS.get(cell), both=True)
    return dataclasses.replace(run, **changes)  # type: ignore[arg-type]


def _by_size(cell: str, sizes: Iterable[int]) -> list[Run]:
    return [_run(cell, form) for m in sizes for form in methods(m).values()]


def _first(cell: str) -> list[Run]:
    """The baseline, all methods at m = 2, and those without m."""
    baseline = _run(cell, methods(BASELINE[1])[BASELINE[0]])
    return [baseline, *_by_size(cell, SIZES[:1]), *(_run(cell, form) for form in SINGLE.values())]


def _unique(runs: Iterable[Run]) -> list[Run]:
    return list(dict.fromkeys(runs))


SIZE_RUNS = _unique(
    [
        *(run for cell in CELLS_BY_SIZE for run in _first(cell)),
        *(run for m in SIZES[1:] for cell in CELLS_BY_SIZE for run in _by_size(cell, [m])),
    ]
)

RATES = (0.05, 0.2)
"""Besides the cell's 0.1."""
RATE_RUNS = [
    *(
        _run(cell, form, rate=rate)
        for m in SIZES[:2]
        for cell in ("cifar10", "tiny100")
        for rate in RATES
        for form in (*methods(m).values(), *(SINGLE.values() if m == SIZES[0] else ()))
    ),
    *(_run(cell, methods(128)["groups"], rate=rate) for cell in ("cifar10", "tiny100") for rate in RATES),
    # The weight decay that was best for BKN with a closing phase.
    *(_run("tiny100", methods(m)["BKN, closing phase"], decay=2e-3) for m in SIZES[:2]),
]

CROSSING = ("groups", "BKN, closing phase", "BKN", "groups, closing phase", "BKN learned")
SEED_RUNS = [
    _run(cell, form, seed=seed)
    for seed in (1, 2)
    for cell in CELLS_BY_SIZE
    for form in (methods(128)["groups"], *(methods(m)[name] for m in SIZES[:2] for name in CROSSING))
]


def ablations(m: int) -> dict[str, Form]:
    """One change at a time, against BKN and against BKN learned, both without a closing phase."""
    named = methods(m)
    weights, learned, groups = named["BKN"], named["BKN learned"], named["groups"]
    return {
        "BKN": weights,
        "BKN learned": learned,
        "BKN, gain from 0.1": dataclasses.replace(weights, gain=0.1),
        "BKN, gain from 0.2": dataclasses.replace(weights, gain=0.2),
        "BKN, gain from 0.8": dataclasses.replace(weights, gain=0.8),
        "BKN, gain fixed at 0.2": dataclasses.replace(weights, gain=0.2, fixed=True),
        "BKN, gain fixed at 0.5": dataclasses.replace(weights, gain=0.5, fixed=True),
        "BKN, gain fixed at 0.8": dataclasses.replace(weights, gain=0.8, fixed=True),
        # An error of 0.003 is that of a mean of 333 values. A group of 2 has 128 to 2,048 values of a channel in CIFAR
        # Inception.
        "BKN, gain by noise, error 0.003": dataclasses.replace(weights, error=0.003, fixed=True),
        "BKN, gain by noise, error 0.03": dataclasses.replace(weights, error=0.03, fixed=True),
        "BKN, gain learned from that by noise, error 0.003": dataclasses.replace(weights, error=0.003),
        "BKN, a gain for each channel": dataclasses.replace(weights, channels=True),
        "BKN, no gradient through the prior": dataclasses.replace(weights, blind=True),
        "BKN, no total variance": dataclasses.replace(weights, total=False),
        "BKN learned, gain from 0.5": dataclasses.replace(learned, gain=0.5),
        "BKN learned, gain fixed at 0.5": dataclasses.replace(learned, gain=0.5, fixed=True),
        "BKN learned, gain fixed at 0.9": dataclasses.replace(learned, gain=0.9, fixed=True),
        "BKN learned, A from a tenth of Glorot's": dataclasses.replace(learned, start="small"),
        "BKN learned, A from the identity": dataclasses.replace(learned, start="identity"),
        "BKN learned, A of rank 4": dataclasses.replace(learned, rank=4),
        "BKN learned, A of rank 16": dataclasses.replace(learned, rank=16),
        "BKN learned, r for each layer": dataclasses.replace(learned, noise="layer"),
        "BKN learned, r for each channel": dataclasses.replace(learned, noise="channel"),
        "BKN learned, no gradient through the prior": dataclasses.replace(learned, blind=True),
        "BKN learned, no total variance": dataclasses.replace(learned, total=False),
        "batch norm": groups,
        "batch norm, no total variance": dataclasses.replace(groups, total=False),
    }


ABLATIONS = ablations(2)
VIRTUAL = (1, 4, 8, 32)
"""Sizes of the virtual group in `example` inference. m = 2 is the size of training."""
ABLATION_RUNS = [_run("cifar10", form, seed=seed, virtual=VIRTUAL) for seed in range(3) for form in ABLATIONS.values()]
DIGITS = {"batch": 64, "both": False, "test": True}
"""How runs on digits differ: the lab's batch, and nothing is chosen."""
DIGIT_SIZES = 2, 1
DIGIT_RUNS = [
    _run("digits", form, seed=seed, virtual=VIRTUAL, **DIGITS)
    for seed in range(5)
    for m in DIGIT_SIZES
    for form in ablations(m).values()
]

EPOCHS = {256: 15, 64: 10, 16: 4, 8: 2}
"""By images per step, so that no training takes more than a few minutes."""
PAPER = ((256, 32), (256, 4), (256, 1), (64, 8), (16, 4), (8, 2))
"""The paper's ImageNet settings: images per step, and m."""
RACED = ("groups", "renorm", "BKN learned", "BKN", "BKN, closing phase", "BKN, recipe")


def _at_setting(batch: int, m: int, name: str) -> Run:
    """The learning rate and the momentum of running statistics are proportional to the images per step."""
    form = methods(m)[name]
    if batch < 128:
        form = dataclasses.replace(form, momentum=0.1 * batch / 128)
    return _run("tiny100-inception", form, batch=batch, epochs=EPOCHS[batch], rate=0.1 * batch / 256, evaluations=20)


SETTING_RUNS = [_at_setting(batch, m, name) for batch, m in PAPER for name in RACED]

TABLE3: dict[str, Form] = {
    "batch norm (128, 128)": methods(128)["groups"],
    "batch norm (128, 2)": methods(2)["groups"],
    "BKN learned (128, 2)": methods(2)["BKN learned"],
    "BKN (128, 2)": methods(2)["BKN"],
    "BKN (128, 2), closing phase": methods(2)["BKN, closing phase"],
    "batch norm (128, 2), closing phase": methods(2)["groups, closing phase"],
    "batch norm (128, 2), closing phase of BKN": dataclasses.replace(
        methods(2)["groups, closing phase"], close=methods(2)["BKN, closing phase"].close
    ),
    "batch norm (128, 128), standardized filters": dataclasses.replace(methods(128)["groups"], filters="scaled"),
    "BKN (128, 2), recipe": methods(2)["BKN, recipe"],
    "batch norm (128, 2), recipe": methods(2)["groups, recipe"],
    "batch renorm (128, 2)": methods(2)["renorm"],
    "Moving Average Batch Norm (128, 2)": methods(2)["moving"],
    "group norm": SINGLE["group"],
    "group norm with standardized weights": SINGLE["standardized"],
}
WIDE = ("batch norm (128, 128)", "batch norm (128, 2)")
"""The rows that also have a network widened to the parameters of BKN learned."""
LONG = 30
"""Epochs of the table, those of `kalmannorm reproduce cifar`."""
TABLE3_RUNS = [
    _run(cell, form, seed=seed, epochs=LONG, both=False, test=True)
    for seed in range(3)
    for data in ("cifar10", "cifar100")
    for cell, names in ((data, tuple(TABLE3)), (f"{data}-wide", WIDE))
    for form in (TABLE3[name] for name in names)
]
TABLE3_RUNS.sort(key=lambda run: run.cell.endswith("-wide"))  # they take more than twice as long

EVIDENCE = {
    "sizes": SIZE_RUNS,
    "rates": RATE_RUNS,
    "seeds": SEED_RUNS,
    "ablations": ABLATION_RUNS,
    "ablations-digits": DIGIT_RUNS,
    "settings": SETTING_RUNS,
    "table3": TABLE3_RUNS,
}


def _queue() -> list[tuple[str, Run]]:
    """All runs of these rounds, each with its round: the most telling first."""
    small = [run for run in SIZE_RUNS if run.form.m in (2, 1) or run == _first(run.cell)[0]]
    narrow = [run for run in TABLE3_RUNS if not run.cell.endswith("-wide")]
    parts = [
        ("table3", narrow),
        ("sizes", small),
        ("settings", SETTING_RUNS),
        ("ablations", [run for run in ABLATION_RUNS if run.seed == 0]),
        ("sizes", SIZE_RUNS),
        ("rates", RATE_RUNS),
        ("seeds", SEED_RUNS),
        ("table3", TABLE3_RUNS),
        ("ablations", ABLATION_RUNS),
        ("ablations-digits", DIGIT_RUNS),
    ]
    return list(dict.fromkeys((name, run) for name, runs in parts for run in runs))


QUEUE = _queue()

assert all(run.cell in CELLS for _, run in QUEUE)
