"""Records of a folder of `kalmannorm reproduce`: one line for each finished run.

    python benchmarks/reproduced.py runs/cifar-cifar10 >> benchmarks/records/reproduced-cifar-h200.jsonl

docs/results.md has them beside the trials, which train the same rows of the paper's table with other code.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

from kalmannorm.lab.files.records import Run, read_json


def records(folder: Path) -> list[dict[str, Any]]:
    """By row of the table, as `--rows` names it, and by seed."""
    experiment = read_json(folder / "experiment.json")
    origin = experiment["origin"]
    words = re.sub(r" (-o|--out) \S+", "", origin["command"])
    command = f"kalmannorm {words[words.find('reproduce') :]}" if "reproduce" in words else words
    found = []
    for path in sorted(folder.glob("*/result.json")):
        run = Run.read(path.parent)
        result = run.result
        assert result is not None
        row = path.parent.name.removeprefix(f"{run.recipe.model}-").removesuffix(f"-s{run.recipe.seed}")
        losses = [event["loss"] for event in run.events("train") if event["epoch"] > run.recipe.epochs - 1]
        found.append(
            {
                "row": row,
                "data": run.recipe.dataset,
                "seed": run.recipe.seed,
                "epochs": run.recipe.epochs,
                "accuracy": result["accuracy"],
                "loss": round(statistics.fmean(losses), 4),
                "seconds": result["seconds"],
                **{name: origin[name] for name in ("hardware", "torch", "commit")},
                "command": command,
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder that the command wrote")
    for record in records(parser.parse_args().folder):
        print(json.dumps(record))


if __name__ == "__main__":
    main()
