"""The cost of `convert`: seconds, and the peak of resident memory compared with one forward without gradients.

    python benchmarks/conversion.py                 # ResNet-101 at 224², both transitions, in place and copied

Each figure is measured in its own process, because the peak of resident memory never decreases. `own_ratio` compares
with a forward of the same kind: if convert makes a copy, with the forward of a copy, whose memory depends on the
allocator.
"""

from __future__ import annotations

import argparse
import copy
import csv
import resource
import subprocess
import sys
import time
from pathlib import Path

from kalmannorm.lab.machine.origin import origin

RECORD = Path(__file__).parent / "records" / "conversion.csv"
TASKS = tuple(f"{what} {place}" for what in ("forward", "weights", "learned") for place in ("inplace", "copy"))


def measure(what: str, name: str, batch: int, size: int, threads: int) -> tuple[float, float, float]:
    """Wall-clock seconds, processor seconds and peak MiB of one task in this process."""
    import torch
    import torchvision

    import kalmannorm

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model, x = torchvision.models.get_model(name), torch.randn(batch, 3, size, size)
    start, worked = time.perf_counter(), time.process_time()
    transition, place = what.split()
    if transition == "forward":
        with torch.no_grad():
            run = copy.deepcopy(model) if place == "copy" else model
            run(x)
    else:
        kalmannorm.convert(model, x, transition=transition, inplace=place == "inplace", statistics_batch_size=2)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return time.perf_counter() - start, time.process_time() - worked, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet101")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        print(*measure(options.task, options.model, options.batch, options.size, options.threads))
        return
    rows = []
    peaks: dict[str, float] = {}
    for task in TASKS:
        command = [sys.executable, __file__, "--task", task, "--model", options.model]
        command += ["--batch", str(options.batch), "--size", str(options.size), "--threads", str(options.threads)]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        seconds, _, peak = map(float, out.split())
        peaks[task] = peak
        ratio, own = peak / peaks[TASKS[0]], peak / peaks[f"forward {task.split()[1]}"]
        rows.append(
            {"model": options.model, "input": f"{options.batch}x3x{options.size}x{options.size}", "task": task,
             "seconds": round(seconds, 2), "peak_mib": round(peak), "peak_ratio": round(ratio, 2),
             "own_ratio": round(own, 2)}
        )  # fmt: skip
        print(f"{task:18} {seconds:6.2f} s   {peak:7.0f} MiB   {ratio:.2f}×   {own:.2f}×")
    extra = origin("torchvision")
    with RECORD.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*rows[0], *extra])
        writer.writeheader()
        writer.writerows({**row, **extra} for row in rows)


if __name__ == "__main__":
    main()
