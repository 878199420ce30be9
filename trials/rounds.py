"""The queue: rounds of runs, in the order in which they run. A run that has a record is not run again."""

from __future__ import annotations

import dataclasses
from typing import Any

from trials.evidence import EVIDENCE
from trials.forms import Form
from trials.small import RATE_RUNS
from trials.training import Run

BATCH = Form(kind="batch")
TIME = {m: Form(kind="time", m=m) for m in (1, 2)}

# Baselines, the trial's filter again, and one change of it at a time, at m = 1, where it matters most.
FIRST = [
    BATCH,
    Form(kind="ghost", m=4),
    Form(kind="kalman", m=2),
    Form(kind="kalman", m=2, closing=True),
    TIME[1],
    TIME[2],
    Form(kind="time", m=1, level="drift"),
    Form(kind="time", m=1, backward="depth"),
    Form(kind="time", m=1, level="drift", backward="depth"),
    Form(kind="time", m=1, backward="feedback"),
    Form(kind="time", m=1, backward="none"),
    Form(kind="time", m=1, power=0.5),
    Form(kind="time", m=1, alpha=0.05),
    Form(kind="time", m=1, level="drift", alpha=0.05),
    Form(kind="time", m=1, ramp=(0.0, 0.1)),
    Form(kind="kalman", m=1, closing=True),
]

# Depth and time at m = 1. The start of training decides, because at λ = 1 the filter does not depend on m.
SECOND = [
    Run("", Form(kind="kalman", m=1, closing=True)),
    Run("", Form(kind="time", m=1, level="mixture")),
    Run("", Form(kind="time", m=1, level="mixture", ramp=(0.5, 0.8))),
    Run("", Form(kind="time", m=2, level="mixture", ramp=(0.5, 0.8))),
    Run("", Form(kind="time", m=1, ramp=(0.0, 0.02)), warmup=0.05),
    Run("", Form(kind="time", m=1, level="mixture"), warmup=0.05),
    Run("", Form(kind="kalman", m=2, closing=True), seed=1),
    Run("", BATCH, seed=1),
    Run("", Form(kind="kalman", m=1, gain=0.2, closing=True)),
    Run("", Form(kind="kalman", m=2, gain=0.2, closing=True)),
    Run("", Form(kind="time", m=1, alpha=0.2)),
    Run("", Form(kind="time", m=1, alpha=0.1, gradient_alpha=0.3)),
]

# Why a late rise of λ fails on CIFAR-10 and not on Tiny-ImageNet: one change at a time.
LATE = Form(kind="time", m=1, level="mixture", ramp=(0.5, 0.8))
THIRD = [
    dataclasses.replace(LATE, top=0.9),
    dataclasses.replace(LATE, backward="none"),
    dataclasses.replace(LATE, backward="feedback"),
    dataclasses.replace(LATE, ramp=(0.7, 0.95)),
    dataclasses.replace(LATE, ramp=(0.3, 0.6)),
    dataclasses.replace(LATE, ramp=(0.1, 0.4)),
    dataclasses.replace(LATE, gradient_alpha=0.03),
    dataclasses.replace(LATE, m=2, ramp=(0.05, 0.25)),
    dataclasses.replace(LATE, m=2, top=0.9),
    dataclasses.replace(LATE, m=2, alpha=0.05),
    Form(kind="kalman", m=1, gain=0.1, closing=True),
]

# The closing phase with a backward on moving averages: when it begins, and how it compares with batch norm on groups.
CLOSING = {m: Form(kind="kalman", m=m, closing=True, means="average") for m in (1, 2)}
FOURTH = [
    BATCH,
    CLOSING[2],
    CLOSING[1],
    dataclasses.replace(CLOSING[1], close=(0.3, 0.6)),
    dataclasses.replace(CLOSING[1], close=(0.05, 0.35)),
    dataclasses.replace(CLOSING[2], close=(0.05, 0.35)),
    Form(kind="ghost", m=2, closing=True, means="average", close=(0.05, 0.35)),
    Form(kind="ghost", m=1, closing=True, means="average", close=(0.05, 0.35)),
    Form(kind="ghost", m=2, closing=True, means="average"),
    Form(kind="ghost", m=4, closing=True),
    Form(kind="kalman"),
    Form(kind="kalman", m=2, closing=True),
    Form(kind="ghost", m=2, closing=True),
    Form(kind="kalman", m=1, closing=True, close=(0.05, 0.35)),
    Form(kind="kalman", m=2, closing=True, close=(0.05, 0.35)),
]

# BKN fits the training images better than batch norm and the held-out ones worse: learning rates for both.
FIFTH = [
    Run("", form, rate=rate)
    for rate in (0.2, 0.4, 0.05)
    for form in (
        BATCH,
        Form(kind="kalman", m=2, closing=True),
        dataclasses.replace(CLOSING[1], close=(0.3, 0.6)),
        Form(kind="ghost", m=2, closing=True, means="average", close=(0.05, 0.35)),
    )
]

# The best learning rate of BKN is between 0.1 and 0.2. Does weight decay do the same? Is a higher gain enough at m = 2?
MIDDLE = {m: dataclasses.replace(form, close=(0.3, 0.6)) for m, form in CLOSING.items()}
SIXTH = [
    Run("", MIDDLE[2], rate=0.15, decay=5e-4),
    Run("", MIDDLE[1], rate=0.15, decay=5e-4),
    Run("", MIDDLE[2], decay=1e-3),
    Run("", MIDDLE[1], decay=1e-3),
    Run("", BATCH, decay=1e-3),
    Run("", dataclasses.replace(CLOSING[2], close=(0.05, 0.35), gain=0.8)),
    Run("", MIDDLE[1], rate=0.2, seed=1),
    Run("", MIDDLE[2], rate=0.2),
    Run("", Form(kind="ghost", m=4, closing=True, means="average", close=(0.05, 0.35))),
    Run("", Form(kind="ghost", m=2, closing=True, means="average", close=(0.05, 0.35)), seed=1),
    Run("", BATCH, seed=2),
    Run("", MIDDLE[2], rate=0.2, seed=1),
]

# A weight decay of 1e-3 helped all forms: learning rates there, and a larger one.
EARLY = {m: Form(kind="ghost", m=m, closing=True, means="average", close=(0.05, 0.35)) for m in (2, 4)}
SEVENTH = [
    Run("", MIDDLE[2], rate=0.15, decay=1e-3),
    Run("", MIDDLE[1], rate=0.15, decay=1e-3),
    Run("", MIDDLE[2], rate=0.2, decay=1e-3),
    Run("", MIDDLE[1], rate=0.2, decay=1e-3),
    Run("", BATCH, decay=2e-3),
    Run("", MIDDLE[2], decay=2e-3),
    Run("", MIDDLE[1], decay=2e-3),
    Run("", MIDDLE[2], rate=0.15, decay=2e-3),
    Run("", MIDDLE[1], rate=0.15, decay=2e-3),
    Run("", BATCH, rate=0.15, decay=1e-3),
    Run("", BATCH, rate=0.05, decay=2e-3),
    Run("", MIDDLE[2], decay=1e-3),
    Run("", MIDDLE[1], decay=1e-3),
    Run("", BATCH, decay=1e-3, seed=1),
    Run("", EARLY[2], decay=1e-3),
    Run("", EARLY[4], decay=1e-3),
    Run("", EARLY[2], decay=2e-3),
    Run("", EARLY[4], decay=2e-3),
]

# BKN was best at the largest weight decay: a larger one, a lower rate there, and an earlier phase.
SOONER = {m: dataclasses.replace(form, close=(0.15, 0.45)) for m, form in CLOSING.items()}
EIGHTH = [
    Run("", MIDDLE[2], decay=3e-3),
    Run("", MIDDLE[1], decay=3e-3),
    Run("", MIDDLE[2], rate=0.07, decay=2e-3),
    Run("", MIDDLE[1], rate=0.07, decay=2e-3),
    Run("", SOONER[2], decay=2e-3),
    Run("", SOONER[1], decay=2e-3),
]

# Groups of m have sqrt(128 / m) times the noise of batch norm at 128. With λ at most 1 - sqrt(m / 128) a closing phase
# leaves the noise of 128: does it regularize as batch norm does?
NINTH = [
    Run("", dataclasses.replace(MIDDLE[2], top=0.875), decay=1e-3),
    Run("", dataclasses.replace(MIDDLE[2], top=0.875), decay=2e-3),
    Run("", dataclasses.replace(MIDDLE[1], top=0.912), decay=1e-3),
    Run("", dataclasses.replace(MIDDLE[1], top=0.912), decay=2e-3),
    Run("", dataclasses.replace(MIDDLE[2], top=0.75), decay=1e-3),
    Run("", dataclasses.replace(EARLY[2], top=0.875), decay=1e-3),
]

# BKN fits training images better than batch norm even at m = 128, so the depth prior itself regularizes less. Here it
# is only used until running statistics are known: it fades while they come in.
FADING = {m: dataclasses.replace(form, fade=1.0) for m, form in MIDDLE.items()}
TENTH = [
    Run("", FADING[2], decay=1e-3),
    Run("", FADING[1], decay=1e-3),
    Run("", FADING[2], decay=2e-3),
    Run("", FADING[1], decay=2e-3),
    Run("", dataclasses.replace(FADING[2], top=0.875), decay=1e-3),
    Run("", Form(kind="time", m=2, level="mixture", ramp=(0.5, 0.8)), decay=1e-3),
]

# The CIFAR cells: weight decay for batch norm and for the closing phase of rounds four to eight.
ELEVENTH = [Run("", form, decay=decay) for decay in (5e-4, 1e-3) for form in (BATCH, MIDDLE[2], MIDDLE[1])]

# Norms that others made for small batches, at the weight decays that were best for batch norm and BKN.
PEERS = [
    Run("", Form(kind=kind, m=m), decay=decay)
    for decay in (5e-4, 1e-3)
    for kind, m in (("moving", 2), ("moving", 1), ("online", 1), ("standardized", 1))
]

# Group norm gains most from standardized weights, and Moving Average Batch Norm centres them. What do BKN and batch
# norm gain? With a mean of 0, a filter hardly passes on the means of its inputs, which the prior gets wrong.
CLOSED: dict[str, Any] = {"closing": True, "means": "average"}
STANDARD, CENTRED = (
    {m: dataclasses.replace(form, filters=filters) for m, form in MIDDLE.items()}  # type: ignore[arg-type]
    for filters in ("standardized", "centred")
)
TWELFTH = [
    *(Run("", kind[m], decay=decay) for decay in (1e-3, 2e-3) for kind in (STANDARD, CENTRED) for m in (2, 1)),
    *(Run("", dataclasses.replace(BATCH, filters="standardized"), decay=decay) for decay in (1e-3, 2e-3)),
    *(Run("", dataclasses.replace(EARLY[2], m=m, filters="standardized"), decay=1e-3) for m in (2, 1)),
]
TWELFTH_CIFAR = [dataclasses.replace(run, decay=5e-4) for run in TWELFTH if run.decay == 1e-3] + [
    Run("", kind[1], decay=1e-3) for kind in (STANDARD, CENTRED)
]

# With standardized filters batch norm on groups gained most, and only its phase is early. Is it the early phase, or the
# statistics of observations? The depth prior fades, so that it only matters where groups are bad: at the start.
RAPID = (0.02, 0.12)
THIRTEENTH = [
    Run("", form, decay=1e-3)
    for form in (
        *(
            Form(kind="kalman", m=m, filters="standardized", **CLOSED, close=close, fade=1.0)
            for m, close in ((1, (0.05, 0.35)), (1, RAPID), (1, (0.3, 0.6)), (2, (0.05, 0.35)), (2, (0.3, 0.6)))
        ),
        *(Form(kind="ghost", m=m, filters="standardized", **CLOSED, close=RAPID) for m in (1, 2)),
        Form(kind="ghost", m=1, filters="centred", **CLOSED, close=(0.05, 0.35)),
        Form(kind="kalman", m=1, filters="standardized", **CLOSED, close=RAPID),
    )
]

SHORT = {m: Form(kind="kalman", m=m, filters="standardized", **CLOSED, close=RAPID, fade=1.0) for m in (2, 1)}
# The best forms on the test images, with the weight decays of batch norm. Batch norm with plain filters is in `confirm`
# for Tiny-ImageNet.
CONFIRM_FILTERS = [
    Run(cell, form, seed=seed, decay=decay, rate=0.1, test=True)
    for seed in range(5)
    for cell, decay in (("tiny100", 1e-3), ("cifar10", 5e-4), ("cifar100", 5e-4))
    for form in (
        *(() if cell == "tiny100" else (BATCH,)),
        SHORT[2],
        SHORT[1],
        dataclasses.replace(BATCH, filters="standardized"),
        Form(kind="ghost", m=2, filters="standardized", **CLOSED, close=RAPID),
        Form(kind="moving", m=2),
        Form(kind="moving", m=1),
    )
]

# On CIFAR-100 at m = 1 the recipe learns nothing in its first epoch: the loss stays at log 100 until λ is above one
# half. With a gain of one half every norm removes half of the difference between the means of two images. So: λ rises
# from the first step on, or the prior has more weight.
CLASSES = {"cifar100": 5e-4, "tiny100": 1e-3, "cifar10": 5e-4}
"""The cells, each with the weight decay of batch norm."""
AT_ONCE = (0.0, 0.02)
SOON = {
    m: [
        *(
            dataclasses.replace(SHORT[m], close=close, gain=gain)
            for close, gain in ((RAPID, 0.1), (AT_ONCE, 0.1), (AT_ONCE, None), (RAPID, None), (RAPID, 0.03))
        ),
        Form(kind="ghost", m=m, filters="standardized", **CLOSED, close=AT_ONCE),
    ]
    for m in (1, 2)
}
FIFTEENTH = [Run(cell, form, decay=decay) for m in (1, 2) for cell, decay in CLASSES.items() for form in SOON[m]]

# With a gain from 0.1 the recipe gained 1.4 points at m = 1 on CIFAR-100. Of the changes it was the only one that did
# not diverge on Tiny-ImageNet. The same on the test images. The recipe with a gain from 0.5 is in `confirm-filters`.
GENTLE = {m: forms[0] for m, forms in SOON.items()}
CONFIRM_GAIN = [
    Run(cell, GENTLE[m], seed=seed, decay=decay, rate=0.1, test=True)
    for m in (1, 2)
    for seed in range(5)
    for cell, decay in CLASSES.items()
]
RECIPE = {2: SHORT[2], 1: GENTLE[1]}
"""The recipe of docs/recipe.md, by m."""

# In true batches of 1 on digits BKN gained 9 points with a gain from 0.1 instead of 0.5. With a late phase it gained
# nothing in rounds two and three. Should it be the default? With plain filters, without a phase and with one.
LOWER = [
    Run(cell, dataclasses.replace(form, gain=gain), decay=decay)
    for m in (1, 2)
    for cell, decay in CLASSES.items()
    for gain in (0.1, 0.2, None)
    for form in (Form(kind="kalman", m=m), MIDDLE[m])
]

# Batch norm on groups with the filters and the phase of the recipe, on the test images: without a prior, and on larger
# groups, which need none. Groups of 2 are in `confirm-filters`.
CONTROLS = {m: Form(kind="ghost", m=m, filters="standardized", **CLOSED, close=RAPID) for m in (1, 4, 8)}
CONFIRM_GROUPS = [
    Run(cell, form, seed=seed, decay=decay, rate=0.1, test=True)
    for seed in range(5)
    for cell, decay in CLASSES.items()
    for form in CONTROLS.values()
]

# The settings that were chosen for plain filters, on the test images.
CONFIRM = [
    Run("tiny100", form, seed=seed, decay=decay, rate=0.1, test=True)
    for seed in range(5)
    for form, decay in ((BATCH, 1e-3), (MIDDLE[2], 2e-3), (MIDDLE[1], 2e-3))
]

ROUNDS = {
    "first": [Run(cell, form) for cell in ("cifar10", "tiny100") for form in FIRST],
    "second": [dataclasses.replace(run, cell=cell) for cell in ("cifar10", "tiny100") for run in SECOND],
    "third": [Run(cell, form) for cell in ("cifar10", "tiny100") for form in THIRD]
    + [Run(cell, Form(kind="kalman", m=1, closing=True), seed=1) for cell in ("cifar10", "tiny100")],
    "fourth": [Run(cell, form) for cell in ("cifar10", "tiny100") for form in FOURTH],
    "fifth": [dataclasses.replace(run, cell=cell) for cell in ("tiny100", "cifar10") for run in FIFTH],
    "sixth": [dataclasses.replace(run, cell=cell) for cell in ("tiny100", "cifar10") for run in SIXTH],
    "seventh": [dataclasses.replace(run, cell=cell) for cell in ("tiny100", "cifar10") for run in SEVENTH],
    "eighth": [dataclasses.replace(run, cell=cell) for cell in ("tiny100", "cifar10", "cifar100") for run in EIGHTH],
    "ninth": [dataclasses.replace(run, cell=cell) for cell in ("tiny100", "cifar10", "cifar100") for run in NINTH],
    "tenth": [dataclasses.replace(run, cell=cell) for cell in ("tiny100", "cifar10", "cifar100") for run in TENTH],
    "eleventh": [dataclasses.replace(run, cell=cell) for cell in ("cifar10", "cifar100") for run in ELEVENTH],
    "twelfth": [dataclasses.replace(run, cell="tiny100") for run in TWELFTH]
    + [dataclasses.replace(run, cell=cell) for cell in ("cifar10", "cifar100") for run in TWELFTH_CIFAR],
    "thirteenth": [dataclasses.replace(run, cell="tiny100") for run in THIRTEENTH]
    + [dataclasses.replace(run, cell=cell, decay=5e-4) for cell in ("cifar10", "cifar100") for run in THIRTEENTH],
    "fifteenth": FIFTEENTH,
    "sixteenth": LOWER,
    "confirm-gain": CONFIRM_GAIN,
    "confirm-filters": CONFIRM_FILTERS,
    "confirm-groups": CONFIRM_GROUPS,
    "peers": [dataclasses.replace(run, cell=cell) for cell in ("tiny100", "cifar10", "cifar100") for run in PEERS],
    "confirm": CONFIRM,
    **EVIDENCE,
    "small": RATE_RUNS,
    "smoke": [Run(cell, form, epochs=1) for cell in ("cifar10", "tiny100") for form in FIRST[:6]],
}
