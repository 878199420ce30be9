"""Host time of a step in eager mode, part by part: `python benchmarks/host.py [-o FILE.csv]`.

A step of small batches on a GPU waits for Python. Here kernels of BKN are not launched, and everything around them
runs, on a CPU. The net is a chain of blocks: a convolution, a norm and a ReLU, on tensors so small that computing takes
almost no time. *empty function* is a norm that is a `torch.autograd.Function` in Python and computes nothing: the least
that a norm with its own gradient can cost.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from kalmannorm import ClosingPhase, convert
from kalmannorm.lab.bench.output import check_paths, write_csv
from kalmannorm.lab.bench.turns import Seconds, ratios, spread, take_turns
from kalmannorm.lab.files.records import Record
from kalmannorm.lab.machine.origin import origin

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # as pytest does
from support.no_launches import no_launches

BLOCKS, CHANNELS = 50, 16
BASELINE = "nn.BatchNorm2d"
PARTS = ("forward", "backward", "phase")
MICRO = 1e6


class _Nothing(torch.autograd.Function):
    """Allocates what a norm has to: its output, and gradients of x, γ and β."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


class Nothing(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Nothing.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return y


def chain(norm: Callable[[int], nn.Module] | None) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(BLOCKS):
        layers.append(nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False))
        layers += [] if norm is None else [norm(CHANNELS)]
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


class Step:
    """A training step without an optimizer. `settled`: after a closing phase whose priors have faded."""

    def __init__(self, model: nn.Module, settled: bool = False) -> None:
        self.model, self.times = model, dict[str, list[float]]({part: [] for part in PARTS})
        self.x = torch.randn(2, CHANNELS, 2, 2).to(memory_format=torch.channels_last)
        self.phase = ClosingPhase(model, sys.maxsize, start=0, end=0, fade_prior=True) if settled else None

    def __call__(self) -> Seconds:
        begin = time.perf_counter()
        loss = self.model(self.x).sum()
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        if self.phase is not None:
            self.phase.step()
        end = time.perf_counter()
        self.model.zero_grad()
        for part, seconds in zip(PARTS, (forward - begin, backward - forward, end - backward), strict=True):
            self.times[part].append(seconds)
        return Seconds(end - begin)


class Norm(NamedTuple):
    words: str
    make: Callable[[], Step]


def norms() -> list[Norm]:
    x = torch.randn(2, CHANNELS, 2, 2)

    def bkn(filters: bool, settled: bool) -> Step:
        model = convert(chain(nn.BatchNorm2d), x, statistics_batch_size=2, weight_standardization=filters)
        return Step(model.to(memory_format=torch.channels_last), settled)

    return [
        Norm("no norm", lambda: Step(chain(None))),
        Norm(BASELINE, lambda: Step(chain(nn.BatchNorm2d))),
        Norm("empty function", lambda: Step(chain(Nothing))),
        Norm("BKN", lambda: bkn(filters=False, settled=False)),
        Norm("BKN settled", lambda: bkn(filters=False, settled=True)),
        Norm("the recipe", lambda: bkn(filters=True, settled=False)),
        Norm("the recipe settled", lambda: bkn(filters=True, settled=True)),
    ]


def measure(rounds: int) -> list[Record]:
    torch.manual_seed(0)
    steps = {norm.words: norm.make() for norm in norms()}
    found = take_turns(steps, rounds)
    rows: list[Record] = []
    for words, step in steps.items():
        row: Record = {"norm": words}
        for part in PARTS:
            row |= spread(f"{part}_us", [MICRO * seconds / BLOCKS for seconds in step.times[part][-rounds:]], 1)
        row |= spread("us", [MICRO * seconds.clock / BLOCKS for seconds in found[words]], 1)
        rows.append(row | spread("ratio", ratios(found[words], found[BASELINE])))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    if torch.cuda.is_available():
        sys.exit("kernels would run on this machine: hide its GPUs with CUDA_VISIBLE_DEVICES=")
    check_paths(given.output, None)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "kalmannorm|ClosingPhase.step")  # nothing is computed
    with pytest.MonkeyPatch.context() as patch:
        no_launches(patch)
        load = round(os.getloadavg()[0], 1)
        rows = measure(given.rounds)
    print(f"{'µs per block':20}{'forward':>9}{'backward':>10}{'phase':>7}{'all':>7}{'ratio':>7}")
    for row in rows:
        parts = (f"{row[f'{part}_us']:{width}.0f}" for part, width in zip(PARTS, (9, 10, 7), strict=True))
        print(f"{row['norm']:20}{''.join(parts)}{row['us']:7.0f}{row['ratio']:7.2f}")
    if given.output is not None:
        shared = {
            "blocks": BLOCKS,
            "channels": CHANNELS,
            "rounds": given.rounds,
            "device": "cpu",
            "load": load,
        }
        write_csv(given.output, [row | shared for row in rows], origin("torch"))


if __name__ == "__main__":
    main()
