"""Batch norm beside Batch Kalman Normalization on real digits, when few examples share their statistics: `make demo`.

In about a minute on two CPU cores it shows what batches of 1 cost: with the running statistics that a deployed net uses
("population"), batch norm falls from 98.8 to 89.7 % as 64, then 1, examples share their statistics; BKN falls from 98.8
to 97.7 % (weights) or from 98.6 to 95.6 % (learned). At 2 all hold here, digits being easy, unless inference takes the
test batch's own statistics ("batch"): 96.2 % for batch norm, 98 % for BKN. (x86, 5 seeds, standard deviation at most
2 points; every run is in docs/figures/records/accuracy.jsonl.)

Trains one small convolutional net on scikit-learn's 1,797 digits of 8×8 pixels (half to train on, half to test on) in
three ways, which share initialisation, data order, optimizer and schedule:

    BN            batch norm on groups of m examples
    BKN learned   the paper: a learned map takes the posterior of the layer before to this layer's prior
    BKN weights   no map to learn: the prior is propagated through the ReLU and the convolution between two norms

A setting (64, m) is a gradient batch of 64 whose statistics are taken from groups of m, as on devices that hold only m
examples. A trained net is tested in the three ways of inference that `kalmannorm.set_inference` describes.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import sklearn
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

import kalmannorm
from kalmannorm import moments

METHODS = ("BN", "BKN learned", "BKN weights")
MODES = ("population", "batch", "example")
GRADIENT_BATCH = 64
EPOCHS = 20
TEST_IMAGES = 896  # whole groups at every statistics batch
WIDTHS = (16, 16, 32, 32, 32)
STRIDES = (1, 1, 2, 1, 1)  # maps of 8×8 and 4×4: at m = 1 batch norm still sees 16 values per channel
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 5e-4

Record = dict[str, Any]


@functools.cache
def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels; the split is the same for every run."""
    digits = load_digits()
    train, test = train_test_split(
        range(len(digits.target)), test_size=TEST_IMAGES, stratify=digits.target, random_state=0
    )
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
    images = (images - images[train].mean()) / images[train].std()
    labels = torch.tensor(digits.target)
    return images[train], labels[train], images[test], labels[test]


def make_norm(
    method: str, channels: int, channels_before: int | None, statistics_batch: int, noise: nn.Parameter
) -> nn.Module:
    if method == "BN":
        return kalmannorm.GhostBatchNorm2d(channels, statistics_batch_size=statistics_batch)
    if channels_before is None:  # the first layer has no layer before it, hence no prior
        return kalmannorm.BatchKalmanNorm2d(channels, statistics_batch_size=statistics_batch)
    if method == "BKN learned":
        return kalmannorm.BatchKalmanNorm2d(
            channels, channels_before, statistics_batch_size=statistics_batch, transition="learned", noise=noise
        )
    return kalmannorm.BatchKalmanNorm2d(
        channels, channels, statistics_batch_size=statistics_batch, transition="weights"
    )


class DigitsNet(nn.Module):
    """Five 3×3 convolutions, each with its norm and a ReLU; then the average over the map and a linear classifier."""

    def __init__(self, method: str, statistics_batch: int) -> None:
        super().__init__()
        self.method = method
        noise = nn.Parameter(torch.ones(()))  # the r that all learned transitions share
        before = [None, *WIDTHS[:-1]]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(fan_in or 1, width, 3, stride, padding=1, bias=False)
            for fan_in, width, stride in zip(before, WIDTHS, STRIDES, strict=True)
        )
        self.norms = nn.ModuleList(
            make_norm(method, width, fan_in, statistics_batch, noise)
            for fan_in, width in zip(before, WIDTHS, strict=True)
        )
        self.classifier = nn.Linear(WIDTHS[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        before = None
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            map_size = x.shape[2:]
            x = convolution(x)
            if self.method == "BN" or before is None:
                x = norm(x)
            elif self.method == "BKN learned":
                x = norm(x, before.posterior)
            else:
                x = norm(x, prior_through_weights(before, convolution, map_size))
            x = F.relu(x)
            before = norm
        return self.classifier(x.mean((2, 3)))


def prior_through_weights(before: nn.Module, convolution: nn.Conv2d, map_size: torch.Size) -> kalmannorm.Moments:
    """What a norm's output N(β, γ²) becomes after the ReLU and the convolution that follow it."""
    belief = moments.relu(moments.belief(before.weight, before.bias))
    return moments.convolution(
        belief,
        convolution.weight,
        stride=convolution.stride,
        padding=convolution.padding,
        input_size=tuple(map_size),
    )


def train(method: str, statistics_batch: int, seed: int, epochs: int) -> DigitsNet:
    images, labels, _, _ = load_data()
    torch.manual_seed(seed)
    net = DigitsNet(method, statistics_batch)
    groups = kalmannorm.parameter_groups(net, WEIGHT_DECAY)  # γ, β, q, A and r do not decay
    optimizer = torch.optim.SGD(groups, lr=LEARNING_RATE, momentum=MOMENTUM, nesterov=True)
    steps = len(images) // GRADIENT_BATCH
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps)
    order = torch.Generator().manual_seed(seed)
    net.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(images), generator=order).split(GRADIENT_BATCH)[:steps]:
            loss = F.cross_entropy(net(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return net


@torch.no_grad()
def test(net: DigitsNet) -> dict[str, float]:
    """Accuracy in % on the test images, for each way of inference."""
    _, _, images, labels = load_data()
    net.eval()
    accuracy = {}
    for mode in MODES:
        kalmannorm.set_inference(net, mode)
        accuracy[mode] = 100 * (net(images).argmax(1) == labels).float().mean().item()
    return accuracy


def run(method: str, statistics_batch: int, seed: int, epochs: int) -> Record:
    start = time.perf_counter()
    accuracy = test(train(method, statistics_batch, seed, epochs))
    return {
        "method": method,
        "gradient_batch": GRADIENT_BATCH,
        "statistics_batch": statistics_batch,
        "seed": seed,
        "epochs": epochs,
        "accuracy": {mode: round(value, 3) for mode, value in accuracy.items()},
        "seconds": round(time.perf_counter() - start, 2),
    }


def run_all(statistics_batches: list[int], seeds: int, epochs: int) -> list[Record]:
    """Every method, setting and seed; one thread per run, one run per core: nets this small gain nothing from more."""
    cells = list(itertools.product(METHODS, statistics_batches, range(seeds)))
    workers = min(os.cpu_count() or 1, len(cells))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = [pool.submit(run, *cell, epochs) for cell in cells]
        for done, future in enumerate(as_completed(futures), 1):
            record = future.result()
            scores = ", ".join(f"{mode} {value:.1f}" for mode, value in record["accuracy"].items())
            setting = f"({GRADIENT_BATCH}, {record['statistics_batch']})"
            line = f"{done:>3}/{len(cells)}  {record['method']:<11} {setting:<8} seed {record['seed']}: {scores}"
            print(f"{line}  {record['seconds']:.1f} s", file=sys.stderr, flush=True)
        return [future.result() for future in futures]


def scores_of(records: list[Record], method: str, statistics_batch: int, mode: str) -> list[float]:
    return [
        record["accuracy"][mode]
        for record in records
        if record["method"] == method and record["statistics_batch"] == statistics_batch
    ]


def table(records: list[Record], statistics_batches: list[int]) -> str:
    """One row per method, one column per setting and way of inference."""
    modes = [f"{mode:>{max(len(mode), 8)}}" for mode in MODES]
    block = " ".join(modes)
    settings = (f"({GRADIENT_BATCH}, {m})" for m in statistics_batches)
    lines = [
        "   ".join([f"{'':<11}", *(f"{setting:<{len(block)}}" for setting in settings), "seconds"]),
        "   ".join([f"{'':<11}", *[block] * len(statistics_batches), "per run"]),
    ]
    for method in METHODS:
        row = [f"{method:<11}"]
        for m in statistics_batches:
            cells = []
            for mode, heading in zip(MODES, modes, strict=True):
                scores = scores_of(records, method, m, mode)
                spread = f"±{statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
                cells.append(f"{f'{statistics.mean(scores):.1f}{spread}':>{len(heading)}}")
            row.append(" ".join(cells))
        seconds = statistics.mean(record["seconds"] for record in records if record["method"] == method)
        lines.append("   ".join([*row, f"{seconds:>7.1f}"]))
    return "\n".join(lines)


def findings(records: list[Record], statistics_batches: list[int]) -> str:
    """What the numbers of this very run say."""

    def mean(method: str, m: int, mode: str) -> float:
        return statistics.mean(scores_of(records, method, m, mode))

    most, least = max(statistics_batches), min(statistics_batches)
    sentences = []
    if most > least:
        changes = ", ".join(
            f"{method} {mean(method, least, 'population') - mean(method, most, 'population'):+.1f}"
            for method in METHODS
        )
        sentences.append(f"From m = {most} to m = {least}, population accuracy changes by (points): {changes}.")
    gaps = [
        (mean("BKN weights", m, mode) - mean("BN", m, mode), f"({GRADIENT_BATCH}, {m}) {mode} ({{:+.1f}})")
        for m, mode in itertools.product(statistics_batches, MODES)
    ]
    (best, where_best), (worst, where_worst) = max(gaps), min(gaps)
    sentences.append(
        f"Beside BN, BKN weights does best at {where_best.format(best)} and worst at {where_worst.format(worst)}."
    )
    sentences.append(
        f"One test image is {100 / TEST_IMAGES:.1f} points: differences of a few tenths, or within the ±, are noise."
    )
    return "\n".join(sentences)


def origin(command: str) -> Record:
    """What a number depends on beside the code."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "scikit-learn": sklearn.__version__,
        "kalmannorm": kalmannorm.__version__,
        "hardware": f"{platform.machine()}, {os.cpu_count()} CPU cores",
        "command": command,
    }


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare BN and BKN at micro-batch on scikit-learn's digits.")
    parser.add_argument("--seeds", type=positive, default=2, help="runs per cell of the table (default 2)")
    parser.add_argument(
        "--epochs", type=positive, default=EPOCHS, help=f"passes over the training half (default {EPOCHS})"
    )
    parser.add_argument(
        "--statistics-batches",
        type=positive,
        nargs="+",
        default=[64, 2, 1],
        metavar="m",
        help="examples that share statistics, of the 64 in a gradient batch (default 64 2 1)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl", help="also write one JSON line per run")
    options = parser.parse_args()
    if max(options.statistics_batches) > GRADIENT_BATCH:
        parser.error(f"--statistics-batches must be at most the gradient batch, {GRADIENT_BATCH}")
    if options.output is not None and not options.output.parent.is_dir():
        parser.error(f"--output: there is no folder {options.output.parent}")

    start = time.perf_counter()
    records = run_all(options.statistics_batches, options.seeds, options.epochs)
    source = origin(shlex.join(["python", "examples/digits.py", *sys.argv[1:]]))
    if options.output is not None:
        options.output.write_text("".join(json.dumps({**record, **source}) + "\n" for record in records))
    seeds = f"{options.seeds} seed" + ("s, mean ± standard deviation" if options.seeds > 1 else "")
    print(f"Test accuracy in %, {TEST_IMAGES} images, {options.epochs} epochs, {seeds}\n")
    print(table(records, options.statistics_batches))
    print(f"\n{findings(records, options.statistics_batches)}")
    seconds = time.perf_counter() - start
    print(f"{len(records)} runs took {seconds:.0f} s on {source['hardware']}, torch {torch.__version__}.")


if __name__ == "__main__":
    main()
