"""True small batches: the gradient batch is the statistics batch, 1, 2 or 4 examples of digits.

    python benchmarks/small_batches.py           # an hour on two cores; can be interrupted

Every run has 900 steps, which is one epoch per example of the batch, of SGD with Nesterov momentum 0.9 and a cosine
schedule. The learning rate is 0.006 times the root of the batch. A record contains the test accuracy in %, on 896
images. `closing` is the share of training at which a closing phase begins. It is complete 0.3 later.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from kalmannorm.lab.errors import DivergedError
from kalmannorm.lab.machine.origin import origin
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.training.train import train

HERE = Path(__file__).parent
RECORD = HERE / "records" / "small-batches.jsonl"
FORMS: list[tuple[str, float | None]] = [
    ("bkn", 0.3),
    ("bn", None),
    ("gn", None),
    ("bkn", None),
    ("mabn", None),
    ("on", None),
    ("bn", 0.3),
    ("gn-ws", None),
]


def recipe_of(method: str, closing: float | None, batch: int, seed: int) -> Recipe:
    rate = 0.006 * math.sqrt(batch)
    return Recipe(
        method=method, gradient_batch=batch, statistics_batch=batch, epochs=batch, learning_rate=rate, seed=seed,
        evaluate_every=0, closing_start=closing,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 2, 1])
    parser.add_argument("--runs", type=Path, default=HERE.parent / "runs" / "small-batches", help="folder of the runs")
    options = parser.parse_args()
    lines = RECORD.read_text(encoding="utf-8").splitlines() if RECORD.is_file() else []
    done = {json.loads(line)["key"] for line in lines}
    for seed in range(options.seeds):
        for batch in options.batches:
            for method, closing in FORMS:
                key = f"{method} | closing={closing} | batch={batch} | seed={seed}"
                if key in done:
                    continue
                recipe = recipe_of(method, closing, batch, seed)
                row: dict[str, Any] = {"key": key, "method": method, "closing": closing, "batch": batch, "seed": seed}
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
