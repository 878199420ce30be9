"""Seconds until the first training step is done: python benchmarks/first_step.py -o first-step.csv

    BatchNorm                 the net as it is
    BKN                       converted, groups of 2
    BKN fused                 converted, then `kalmannorm.fuse`
    BKN one by one            as BKN, but Triton builds each kernel at its first launch

Each row is a process of its own. With an empty cache, Triton's cache is a new folder. With a full one, it is the folder
that the process before it has filled. A row has the seconds of `convert` and `fuse` on a small example, of the first
step (forward, loss, backward and optimizer, until the GPU is done) and of the second one, and the number of kernels in
the cache afterwards. Importing torch and starting CUDA are not counted. Steps run in bf16 and channels_last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kalmannorm.lab.bench.output import write_csv
from kalmannorm.lab.files.records import Record
from kalmannorm.lab.machine.origin import origin

BATCHNORM, BKN, FUSED, ALONE = "BatchNorm", "BKN", "BKN fused", "BKN one by one"
RUNS = (
    (BATCHNORM, "empty"),
    (BKN, "empty"), (BKN, "full"),
    (FUSED, "empty"), (FUSED, "full"),
    (ALONE, "empty"),
)  # fmt: skip
"""What is measured. A full cache is that of the row before."""


def run(way: str, net: str, batch: int, size: int, device: torch.device) -> dict[str, float | None]:
    """Measure one way in this process."""
    import torchvision
    from torch.nn import functional as F

    import kalmannorm

    def timed(work: Callable[[], Any]) -> tuple[Any, float]:
        start = time.perf_counter()
        result = work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return result, round(time.perf_counter() - start, 3)

    torch.manual_seed(0)
    model = torchvision.models.get_model(net).to(device, memory_format=torch.channels_last)
    images = torch.randn(batch, 3, size, size, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,), device=device)
    example = images[:2]
    timed(lambda: images.sum())
    converting = fusing = None
    if way != BATCHNORM:
        model, converting = timed(lambda: kalmannorm.convert(model, example, statistics_batch_size=2))
    if way == FUSED:
        model, fusing = timed(lambda: kalmannorm.fuse(model, example))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    first, second = timed(step)[1], timed(step)[1]
    return {"convert_s": converting, "fuse_s": fusing, "first_step_s": first, "second_step_s": second}


def measure(arguments: argparse.Namespace) -> list[Record]:
    rows: list[Record] = []
    shape = f"{arguments.batch}x3x{arguments.image_size}x{arguments.image_size}"
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for way, cache in RUNS:
                place = Path(folder) / way.replace(" ", "-")
                environment = os.environ | {"TRITON_CACHE_DIR": str(place)}
                if way == ALONE:
                    environment["KALMANNORM_BUILD_WORKERS"] = "0"
                command = [
                    sys.executable, __file__, "--way", way, "--net", arguments.net, "--batch", str(arguments.batch),
                    "--image-size", str(arguments.image_size), "--device", arguments.device,
                ]  # fmt: skip
                start = time.perf_counter()
                done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
                found = json.loads(done.stdout.splitlines()[-1])
                rows.append(
                    {
                        "model": arguments.net, "shape": shape, "device": arguments.device, "round": number,
                        "way": way, "cache": cache, **found,
                        "process_s": round(time.perf_counter() - start, 3),
                        "kernels": len(list(place.rglob("*.cubin"))),
                    }
                )  # fmt: skip
                print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
                write_csv(arguments.output, rows, origin("triton"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", default="resnet50", help="a network of torchvision")
    parser.add_argument("--batch", type=int, default=32, help="images per step, in groups of 2")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--way", help=argparse.SUPPRESS)  # a process that this script started
    parser.add_argument("-o", "--output", type=Path, help="where to write the CSV")
    arguments = parser.parse_args()
    if arguments.way is not None:
        device = torch.device(arguments.device)
        print(json.dumps(run(arguments.way, arguments.net, arguments.batch, arguments.image_size, device)))
        return
    if arguments.output is None:
        parser.error("-o is missing: where to write the CSV")
    measure(arguments)


if __name__ == "__main__":
    main()
