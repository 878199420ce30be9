"""Checks the wiring of every timm family with BatchNorm, and of every torchvision classifier: `make families`.

For each model, with random weights and a noise image of its default size:

    sources      the norms that feed each norm according to `wiring`, compared with an autograd oracle
                 (family_checks.py)
    wired        how many of the norms that have a norm before them got a prior, with either transition
    step         one training step in groups of two: all values finite, a gradient for every parameter of a wired norm
    prior        the prior of `weights`, on four images and with a gain near 1. Over the norms: the median correlation
                 (over channels) of prior and observed means, the median ratio of prior to observed variance, the
                 difference of the means in standard deviations, and the share of norms that meet both targets
    seconds      of `convert`, with `weights`

Writes benchmarks/records/families.csv, and docs/families.md from it. `--check` compares with the record instead.
"""

from __future__ import annotations

import argparse
import csv
import gc
import multiprocessing
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import family_checks as checks
import family_models as models
import family_table
import torch

import kalmannorm
from kalmannorm.lab.machine.origin import origin

HERE = Path(__file__).parent
RECORD = HERE / "records" / "families.csv"
DOCUMENT = HERE.parent / "docs" / "families.md"
EXACT = ("norms", "fed", "learned", "weights", "sources", "step")
CLOSE = {"correlation": 0.05, "ratio": 0.2}
"""The largest difference between a prior and the record in `--check`. Other versions draw other weights."""

Row = dict[str, Any]


def examine(chosen: models.Chosen, device: str = "cpu") -> Row:
    """One row of the record."""
    torch.manual_seed(0)
    model = models.build(chosen).to(device)
    size = models.input_size(chosen, model)
    two, four = (models.noise(chosen, model, n).to(device) for n in (2, 4))
    start = time.perf_counter()
    by_weights = kalmannorm.convert(model, two, statistics_batch_size=2)
    seconds = time.perf_counter() - start
    weights = kalmannorm.wiring(by_weights)
    faults = [f"weights: {fault}" for fault in checks.step_faults(by_weights, four)]
    del by_weights
    by_learning = kalmannorm.convert(model, two, statistics_batch_size=2, transition="learned")
    learned = kalmannorm.wiring(by_learning)
    faults += [f"learned: {fault}" for fault in checks.step_faults(by_learning, four)]
    del by_learning
    trusting = kalmannorm.convert(model, two, gain=0.999)
    prior = checks.summary(checks.priors(trusting, four))
    del trusting
    expected = checks.fed_by(model, two[:1])
    wrong = sorted(set(checks.differences(expected, weights)) | set(checks.differences(expected, learned)))
    fed = [norm.name for norm in weights.norms if norm.sources]
    reasons = Counter(norm.reason for norm in weights.norms if norm.sources and not norm.wired)
    return {
        "library": chosen.library,
        "family": chosen.family,
        "model": chosen.model,
        "input": "x".join(map(str, size)),
        "norms": len(weights.norms),
        "fed": len(fed),
        "learned": sum(norm.wired and norm.name in fed for norm in learned.norms),
        "weights": sum(norm.wired and norm.name in fed for norm in weights.norms),
        "reason": reasons.most_common(1)[0][0] if reasons else "",
        "sources": "equal" if not wrong else f"{len(wrong)} differ: {wrong[0]}",
        "step": "fine" if not faults else f"{len(faults)} faults: {faults[0]}",
        **{key: f"{value:.3f}" if isinstance(value, float) else value or "" for key, value in prior._asdict().items()},
        "seconds": f"{seconds:.1f}",
    }


def _examine(job: tuple[models.Chosen, str, int]) -> Row | str:
    chosen, device, threads = job
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")  # warnings of the models' own code
    try:
        return examine(chosen, device)
    except Exception:
        return f"{chosen.model}: {traceback.format_exc()}"
    finally:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def source(device: str) -> dict[str, str]:
    """The origin of the figures. Each model runs with its own number of threads."""
    found = origin("timm", "torchvision")
    del found["threads"]
    return found | ({"hardware": torch.cuda.get_device_name()} if device == "cuda" else {})


def recorded() -> list[Row]:
    if not RECORD.exists():
        return []
    with RECORD.open(newline="") as file:
        return list(csv.DictReader(file))


def chosen_models(rows: list[Row], only: str | None, search: bool) -> list[models.Chosen]:
    found = [models.Chosen(row["library"], row["family"], row["model"]) for row in rows]
    if search or not found:
        found = models.search()
    if only is None:
        return found
    wanted = set(only.split(","))
    unknown = wanted - {name for chosen in found for name in (chosen.family, chosen.model)}
    if unknown:
        sys.exit(f"--only: no model or family of the record is called {', '.join(sorted(unknown))}")
    return [chosen for chosen in found if {chosen.family, chosen.model} & wanted]


def differences(old: Row, new: Row) -> list[str]:
    """The differences between a new row and the record."""
    found = [f"{key}: {old[key]} in the record, now {new[key]}" for key in EXACT if str(old[key]) != str(new[key])]
    for key, tolerance in CLOSE.items():
        was, now = (float(row[key]) if row[key] else None for row in (old, new))
        if (was is None) != (now is None) or (was is not None and abs(was - now) > tolerance):  # type: ignore[operator]
            found.append(f"{key}: {was} in the record, now {now}")
    return found


def write(rows: list[Row]) -> None:
    with RECORD.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    DOCUMENT.write_text(family_table.document(rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Wire every family of timm and torchvision, and check it.")
    parser.add_argument("--only", metavar="NAME,NAME", help="these families or models; the other rows stay")
    parser.add_argument("--check", action="store_true", help="compare with the record; write nothing")
    parser.add_argument("--search", action="store_true", help="search for families and their smallest models again")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--jobs", type=int, default=1, help="models at a time (default 1)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each (default 2)")
    options = parser.parse_args()

    before = {row["model"] + row["library"]: row for row in recorded()}
    todo = chosen_models(list(before.values()), options.only, options.search)
    made_by, fresh, failed = source(options.device), dict[str, Row](), list[str]()
    jobs = [(chosen, options.device, options.threads) for chosen in todo]
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.jobs, maxtasksperchild=4) as pool:
        for row in pool.imap(_examine, jobs):
            if isinstance(row, str):
                failed.append(row)
                print(row, flush=True)
                continue
            fresh[row["model"] + row["library"]] = {**row, **made_by}
            print(family_table.line(row), flush=True)
    if options.check:
        other = {key: found for key, row in fresh.items() if (found := differences(before[key], row))}
        failed += [f"{fresh[key]['model']}: {what}" for key, found in other.items() for what in found]
        print(f"{len(fresh) - len(other)} of {len(todo)} models are as in the record")
        sys.exit("\n".join(failed) or 0)
    kept = {} if options.search and options.only is None else before
    rows = sorted({**kept, **fresh}.values(), key=lambda row: (row["library"], row["family"], row["model"]))
    write(rows)
    seconds = statistics.median(float(row["seconds"]) for row in rows)
    print(f"{len(rows)} models, conversion {seconds:.1f} s in the median\n{family_table.totals(rows)}")
    sys.exit("\n".join(failed) or 0)


if __name__ == "__main__":
    main()
