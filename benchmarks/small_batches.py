"""True small batches: the gradient batch is the statistics batch, 1, 2 or 4 examples.

    python benchmarks/small_batches.py                        # digits: an hour on two cores; can be interrupted
    python benchmarks/small_batches.py --data cifar10         # CIFAR-10, shortened: two hours

Runs use SGD with Nesterov momentum 0.9 and a cosine schedule. A record contains the test accuracy in %. `closing` is
the share of training at which a closing phase begins. It is complete 0.3 later. With standardized filters (`bkn-ws`,
`bn-ws`) it is complete 0.1 later, priors fade, and running statistics have a momentum of 0.01 per example of a batch.
`gain` is the initial gain. Without it, it is the lab's 0.5. `rate` is a factor of the learning rate.

| data | network | training images | test images | steps | learning rate |
| --- | --- | --: | --: | --- | --- |
| digits | digits-net | 900 | 896 | 900 for every batch | 0.006 times the root of the batch |
| CIFAR-10 | ResNet-20 | 4,000 | 2,000 | 4 epochs | 0.1 / 128 times the batch |
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from kalmannorm.lab.errors import DivergedError
from kalmannorm.lab.machine.origin import origin
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.training.train import train

HERE = Path(__file__).parent
RECORD = HERE / "records" / "small-batches.jsonl"


class Form(NamedTuple):
    """A method, the start of its closing phase, the initial gain, and a factor of the learning rate."""

    method: str
    closing: float | None = None
    gain: float | None = None
    rate: float = 1.0


FORMS: dict[str, list[Form]] = {
    "digits": [
        Form("bkn", 0.3),
        Form("bn"),
        Form("gn"),
        Form("bkn"),
        Form("mabn"),
        Form("on"),
        Form("bn", 0.3),
        Form("gn-ws"),
        Form("bkn-ws", 0.02),
        Form("bn-ws", 0.02),
        Form("bkn", None, 0.1),
        Form("bkn", 0.3, 0.1),
        Form("bkn-ws", 0.02, 0.1),
        Form("bkn", None, 0.05),
        Form("bkn", None, 0.2),
    ],
    "cifar10": [
        Form("bkn", 0.3),
        Form("bn"),
        Form("gn"),
        Form("mabn"),
        Form("bkn-ws", 0.02),
        Form("bkn", 0.3, 0.1),
        Form("bkn-ws", 0.02, 0.1),
        Form("bkn-ws", 0.02, rate=4),
        Form("mabn", rate=4),
        Form("bkn", 0.3, rate=4),
        Form("bn", rate=4),
        Form("gn", rate=4),
    ],
}
"""What is compared, by data."""
SEEDS = {"digits": 3, "cifar10": 1}


def recipe_of(data: str, form: Form, batch: int, seed: int) -> Recipe:
    method, closing, gain, rate = form
    shared = Recipe(
        method=method,
        gradient_batch=batch,
        statistics_batch=batch,
        seed=seed,
        evaluate_every=0,
        closing_start=closing,
        gain=gain,
    )
    if method in ("bkn-ws", "bn-ws"):
        shared = dataclasses.replace(
            shared, closing_end=closing + 0.1, fade_prior=method == "bkn-ws", statistics_momentum=0.01 * batch
        )
    if data == "digits":
        return dataclasses.replace(shared, epochs=batch, learning_rate=rate * 0.006 * math.sqrt(batch))
    return dataclasses.replace(
        shared, model="cifar-resnet-20", dataset="cifar10", epochs=4, learning_rate=rate * 0.1 * batch / 128,
        train_examples=4000, test_examples=2000, channels_last=True,
    )  # fmt: skip


def key_of(data: str, form: Form, batch: int, seed: int) -> str:
    more = "" if form.gain is None else f" | gain={form.gain}"
    more += "" if form.rate == 1 else f" | rate={form.rate:g}"
    words = f"{form.method} | closing={form.closing}{more} | batch={batch} | seed={seed}"
    return words if data == "digits" else f"{data} | {words}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=FORMS, default="digits")
    parser.add_argument("--seeds", type=int, help="3 for digits, 1 for CIFAR-10 unless given")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 2, 1])
    parser.add_argument("--match", default="", help="a regular expression: only runs whose key contains it")
    parser.add_argument("--runs", type=Path, default=HERE.parent / "runs" / "small-batches", help="folder of the runs")
    options = parser.parse_args()
    data = options.data
    lines = RECORD.read_text(encoding="utf-8").splitlines() if RECORD.is_file() else []
    done = {json.loads(line)["key"] for line in lines}
    for seed in range(SEEDS[data] if options.seeds is None else options.seeds):
        for batch in options.batches:
            for form in FORMS[data]:
                key = key_of(data, form, batch, seed)
                if key in done or not re.search(options.match, key):
                    continue
                recipe = recipe_of(data, form, batch, seed)
                row: dict[str, Any] = {"key": key, "data": data, **form._asdict(), "batch": batch, "seed": seed}
                try:
                    result = train(
                        recipe,
                        options.runs / f"{recipe.name}-{recipe.digest}",
                        Execution(device="cpu", threads=options.threads),
                        resume=True,
                    )
                    row["accuracy"] = {mode: round(value, 2) for mode, value in result["accuracy"].items()}
                except DivergedError as error:
                    row["failed"] = str(error)
                with RECORD.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**row, "epochs": recipe.epochs, **origin()}) + "\n")
                print(f"{key}: {row.get('accuracy', row.get('failed'))}", flush=True)


if __name__ == "__main__":
    main()
