"""Run the runs of a round that have no record yet: `python -m trials --round first --cell cifar10 --packs
trials/packs`.

Records are appended to `trials/records/ROUND.jsonl` (or `--records`) when runs end, so an interrupted round can be
continued. `--budget` is the most seconds. When they are over, finished runs are kept and running ones are lost.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from trials.cells import CELLS, load
from trials.rounds import ROUNDS
from trials.training import Training, train

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--round", choices=ROUNDS, required=True)
    parser.add_argument("--cell", choices=CELLS, required=True)
    parser.add_argument("--match", default="", help="a regular expression: only runs whose key contains it")
    parser.add_argument("--packs", type=Path, default=HERE / "packs")
    parser.add_argument("--records", type=Path, help="a file of JSON lines; trials/records/ROUND.jsonl unless given")
    parser.add_argument("--commit", default="", help="commit of the sources, if git is not available")
    parser.add_argument("--together", type=int, default=4, help="runs side by side")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds")
    arguments = parser.parse_args()
    start = time.perf_counter()
    path = arguments.records or HERE / "records" / f"{arguments.round}.jsonl"
    kept = HERE / "records" / f"{arguments.round}.jsonl"
    done = {record["key"] for record in _read(path) + _read(kept)}
    mine = (run for run in ROUNDS[arguments.round] if run.cell == arguments.cell)
    waiting = [run for run in mine if run.key not in done and re.search(arguments.match, run.key)]
    if len({run.test for run in waiting}) > 1:
        parser.error("some runs are scored on test images and some are not: choose with --match")
    cell, device = CELLS[arguments.cell], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = load(cell, arguments.packs, device, test=any(run.test for run in waiting))
    print(f"{cell.name}: {len(waiting)} runs to do, {len(data.train)} images; {time.perf_counter() - start:.0f} s")
    while waiting:
        batch, waiting = waiting[: arguments.together], waiting[arguments.together :]
        begun = time.perf_counter()
        trainings = [Training(run, cell, data, graph=device.type == "cuda") for run in batch]
        ready = time.perf_counter() - begun
        try:
            seconds = train(trainings, arguments.budget - (time.perf_counter() - start))
        except TimeoutError:
            print(f"{cell.name}: out of time with {len(batch) + len(waiting)} runs to do", file=sys.stderr)
            return
        for training in trainings:
            record = {"key": training.run.key, **_outcome(training), "seconds": round(seconds, 1)}
            record |= {"ready": round(ready, 1), "together": len(batch), **_origin(arguments.commit)}
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            print(f"{training.run.key}: {record.get('test') or record['held_out']} loss {record['loss']}", flush=True)
        print(f"  ready after {ready:.0f} s, trained in {seconds:.0f} s", flush=True)
        del trainings, training


def _outcome(training: Training) -> dict[str, Any]:
    run, loss = training.run, training.loss()
    return {
        "cell": run.cell,
        "seed": run.seed,
        "epochs": training.epochs,
        "rate": training.rate,
        "form": vars(run.form),
        "decay": training.decay,
        "test" if run.test else "held_out": training.score(),
        "loss": round(loss, 4) if math.isfinite(loss) else None,
        "curve": training.curve(),
        "weights": training.weights(),
    }


def _origin(commit: str) -> dict[str, str]:
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    if not commit:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
        commit = found.stdout.strip() or "unknown"
    return {"hardware": hardware, "torch": torch.__version__, "commit": commit}


def _read(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


if __name__ == "__main__":
    main()
