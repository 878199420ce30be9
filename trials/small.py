"""True small batches: the images of an optimizer step are one statistics batch, of 1, 2 or 4.

| round | question |
| --- | --- |
| `small` | three learning rates for every method and batch |
| `small-edges` | one more rate where the highest or the lowest was the best |
| `small-seeds` | two more seeds at the best rate |

A run has 4,000 images of CIFAR-10 and four epochs, as `benchmarks/small_batches.py`. It trains on images of the nine
tenths, and is scored on held-out and on test images. Rates are chosen by the accuracy on held-out images, and only the
test score of a chosen rate is reported. `small-edges` and `small-seeds` follow from the records (`chosen.py`).

The middle rate is four times 0.1 / 128 times the batch. In batches of 2 it is 0.00625, and the square root rule would
give 0.0125. The others are a quarter and four times as much. All methods have the same warm-up. Statistics have a
momentum of 0.01 per image, as the averages of gradients in a closing phase. Online Normalization has decays of its own,
per image.
"""

from __future__ import annotations

from trials.forms import Form
from trials.training import Run

CELL = "cifar10-small"
BATCHES = (2, 4, 1)
"""In the order in which they run."""
FACTORS = (4.0, 1.0, 16.0)
"""Learning rates, in units of 0.1 / 128 times the batch, in the order in which they run."""
STEP = 4.0
"""From one learning rate to the next."""
MOST_RATES = 5
"""The most learning rates of a method and batch, with those of `small-edges`."""
SEEDS = (1, 2)
"""Besides 0."""
WARMUP = 0.05


def methods(batch: int) -> dict[str, Form]:
    """The compared methods, by the names of the lab."""
    momentum = 0.01 * batch
    closing = {"closing": True, "means": "average", "momentum": momentum, "gradient_alpha": momentum}
    return {
        "bkn-ws": Form(kind="kalman", m=batch, filters="scaled", close=(0.02, 0.12), fade=1.0, **closing),  # type: ignore[arg-type]
        "bkn": Form(kind="kalman", m=batch, close=(0.3, 0.6), **closing),  # type: ignore[arg-type]
        "bn": Form(kind="ghost", m=batch, momentum=momentum),
        "mabn": Form(kind="moving", m=batch, momentum=momentum),
        "gn": Form(kind="group", m=1),
        "gn-ws": Form(kind="standardized", m=1),
        "on": Form(kind="online", m=1),
    }


def run_of(form: Form, batch: int, rate: float, seed: int = 0) -> Run:
    return Run(CELL, form, seed=seed, rate=rate, warmup=WARMUP, batch=batch, both=True)


def rate_of(batch: int, factor: float) -> float:
    return factor * 0.1 * batch / 128


RATE_RUNS = [
    run_of(form, batch, rate_of(batch, factor))
    for batch in BATCHES
    for factor in FACTORS
    for form in methods(batch).values()
]
