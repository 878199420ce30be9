"""Time of `kalmannorm.batch_kalman_norm`, forward and backward, beside `F.batch_norm` in the same run: `make bench`.

First every contender has to be right in every case: output and all gradients are compared with
`kalmannorm.kernels.reference` in float64, and no time is printed where one is off. Then contenders take turns, round
after round, so that whatever else the machine does meets all of them alike; a ratio is the median over rounds of
(contender / F.batch_norm in that round).

    F.batch_norm        training mode, statistics of the whole batch, no running buffers
    BKN m = N           the op with a prior, one group
    BKN m = 2           the op with a prior, groups of 2 examples, each with its own statistics
    BN loop, m = 2      what one writes without this library: F.batch_norm on every 2 examples, in a Python loop
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import kalmannorm
from kalmannorm.kernels import reference
from kalmannorm.lab.origin import origin

SHAPES = ((8, 64, 24, 24), (128, 96, 16, 16), (32, 256, 28, 28))
LAYOUTS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}
EPS = 1e-5
LEAST_ROUNDS = 15
BASELINE = "F.batch_norm"

Step = Callable[[], Sequence[Tensor]]
"""One forward and backward; gives the output and the gradients of x, γ, β and, with a prior, of its mean, var and q."""


class Case(NamedTuple):
    device: str
    dtype: torch.dtype
    shape: tuple[int, int, int, int]
    layout: str

    def __str__(self) -> str:
        return f"{self.device:<5} {str(self.dtype).removeprefix('torch.'):<9} {self.shape!s:<18} {self.layout:<14}"


class Inputs:
    """One set of tensors that all contenders share."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(0)
        examples, channels = case.shape[:2]

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(case.device)

        def image() -> Tensor:
            return normal(*case.shape).to(case.dtype).contiguous(memory_format=LAYOUTS[case.layout])

        self.x, self.upstream = (0.5 + 2 * image()).requires_grad_(), image()
        self.weight, self.bias = (1 + 0.1 * normal(channels)).requires_grad_(), normal(channels).requires_grad_()
        self.mean, self.var = normal(1, channels).requires_grad_(), (1 + normal(1, channels) ** 2).requires_grad_()
        self.gain = torch.tensor(0.6, device=case.device, requires_grad=True)
        self.examples = examples

    def plain(self) -> list[Tensor]:
        return [self.x, self.weight, self.bias]

    def with_prior(self) -> list[Tensor]:
        return [*self.plain(), self.mean, self.var, self.gain]


def contenders(inputs: Inputs) -> dict[str, Step]:
    weight, bias = inputs.weight, inputs.bias

    def finish(y: Tensor, wanted: list[Tensor]) -> Sequence[Tensor]:
        return y.detach(), *torch.autograd.grad(y, wanted, inputs.upstream)

    def batch_norm() -> Sequence[Tensor]:
        return finish(F.batch_norm(inputs.x, None, None, weight, bias, True, 0.0, EPS), inputs.plain())

    def loop() -> Sequence[Tensor]:
        parts = [F.batch_norm(part, None, None, weight, bias, True, 0.0, EPS) for part in inputs.x.split(2)]
        return finish(torch.cat(parts), inputs.plain())

    def bkn(statistics_batch_size: int | None) -> Step:
        def step() -> Sequence[Tensor]:
            prior = kalmannorm.Moments(inputs.mean, inputs.var)
            y, _ = kalmannorm.batch_kalman_norm(
                inputs.x, prior, inputs.gain, weight, bias, statistics_batch_size=statistics_batch_size, eps=EPS
            )
            return finish(y, inputs.with_prior())

        return step

    return {BASELINE: batch_norm, "BKN m = N": bkn(None), "BKN m = 2": bkn(2), "BN loop, m = 2": loop}


def expected(inputs: Inputs, statistics_batch_size: int, prior: bool) -> list[Tensor]:
    """What the naive reference gives in float64: output, then gradients in the order of `Step`."""
    leaves = [t.detach().double().requires_grad_() for t in inputs.with_prior()]
    x, weight, bias, mean, var, gain = leaves
    filtered = (mean, var, gain) if prior else (None, None, None)
    y = reference.batch_kalman_norm(x, *filtered, weight, bias, statistics_batch_size, EPS)[0]
    wanted = leaves if prior else leaves[:3]
    return [y.detach(), *torch.autograd.grad(y, wanted, inputs.upstream.double())]


def check(case: Case, inputs: Inputs) -> None:
    """Stop the program where a contender is off by more than rounding, relative to the largest value of each result."""
    tolerance = 2e-2 if case.dtype == torch.bfloat16 else 1e-4
    groups = {BASELINE: (0, False), "BKN m = N": (0, True), "BKN m = 2": (2, True), "BN loop, m = 2": (2, False)}
    parts = ("output", "gradient of x", "of weight", "of bias", "of prior mean", "of prior var", "of gain")
    for name, step in contenders(inputs).items():
        for part, got, truth in zip(parts, step(), expected(inputs, *groups[name]), strict=False):
            error = ((got.double() - truth).abs().max() / truth.abs().max()).item()
            if not error < tolerance:
                where = " ".join(str(case).split())
                sys.exit(f"wrong, so not timed: {name} at {where}: {part} is off by {error:.1e}, not {tolerance:.0e}")


def measure(case: Case, steps: dict[str, Step], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of every contender in every round."""

    def once(step: Step) -> float:
        if case.device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if case.device == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start)

    for step in steps.values():
        for _ in range(3):
            once(step)
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while len(times[BASELINE]) < LEAST_ROUNDS or time.perf_counter() < end:
        for name, step in steps.items():
            times[name].append(once(step))
    return times


def summary(case: Case, times: dict[str, list[float]]) -> list[dict[str, object]]:
    rows = []
    for name, values in times.items():
        p20, _, _, p80 = statistics.quantiles(values, n=5)
        ratio = statistics.median(own / base for own, base in zip(values, times[BASELINE], strict=True))
        rows.append(
            {
                "device": case.device,
                "dtype": str(case.dtype).removeprefix("torch."),
                "shape": "x".join(map(str, case.shape)),
                "layout": case.layout,
                "contender": name,
                "median_ms": round(statistics.median(values), 4),
                "p20_ms": round(p20, 4),
                "p80_ms": round(p80, 4),
                "ratio": round(ratio, 3),
                "rounds": len(values),
            }
        )
    return rows


def cases() -> list[Case]:
    kinds = [("cpu", torch.float32)]
    if torch.cuda.is_available():
        kinds += [("cuda", torch.float32), ("cuda", torch.bfloat16)]
    return [Case(*kind, shape, layout) for kind in kinds for shape in SHAPES for layout in LAYOUTS]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the op beside F.batch_norm.")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each shape and layout (default 3)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: as torch sees fit)")
    parser.add_argument("--output", type=Path, metavar="FILE.csv", help="also write the table with its origin")
    options = parser.parse_args()
    if options.output is not None and not options.output.parent.is_dir():
        parser.error(f"--output: there is no folder {options.output.parent}")
    if options.threads is not None:
        torch.set_num_threads(options.threads)

    for case in cases():
        check(case, Inputs(case))
    source = origin()
    print(f"forward + backward, ms; {source['hardware']}, threads {source['threads']}, torch {source['torch']}\n")
    heading = f"{'':<49} {'contender':<15}{'median':>9}{'p20':>9}{'p80':>9}{'ratio':>8}"
    print(heading)
    rows: list[dict[str, object]] = []
    for case in cases():
        for row in summary(case, measure(case, contenders(Inputs(case)), options.seconds)):
            rows.append({**row, **source})
            label = str(case) if row["contender"] == BASELINE else ""
            times = "".join(f"{row[key]:>9.2f}" for key in ("median_ms", "p20_ms", "p80_ms"))
            print(f"{label:<49} {row['contender']:<15}{times}{row['ratio']:>8.2f}", flush=True)
    if options.output is not None:
        with options.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
