"""A whole network in inference, as it is deployed, without gradients.

    BatchNorm folded        norms folded into the convolutions before them: the baseline
    BatchNorm               as trained, in eval mode
    BKN population folded   converted and folded: the same plain network again
    BKN population          converted, in eval mode
    GroupNorm               converted to GroupNorm, which cannot be folded
    BKN example             every example with its own posterior, with constant priors (`freeze_priors`)
    BKN example fused       the same after `fuse`, if requested

Logits are compared first: folded with unfolded, population with BatchNorm, and all with the same network in float64.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kalmannorm._model.deploy import fold, freeze_priors
from kalmannorm._model.fusion import fuse
from kalmannorm._model.settings import set_inference
from kalmannorm.lab.bench.step_checks import TOLERANCE
from kalmannorm.lab.bench.step_contenders import BASELINE, Case, Entry, full_float32
from kalmannorm.lab.bench.timing import Call, Timed, count_kernels, timed
from kalmannorm.lab.bench.turns import Watch, check_rounds, processor_ratios, ratios, spread, take_turns
from kalmannorm.lab.errors import LabError
from kalmannorm.lab.files.records import Record
from kalmannorm.lab.recipes.methods import normalized
from kalmannorm.lab.recipes.setting import Setting

FOLDED, GROUPNORM = "BatchNorm folded", "GroupNorm"
SAMPLE = {"cuda": 2e-2, "cpu": 0.0}
"""Seconds. On a CPU a sample is one forward."""
FEW = 4


def measure(
    case: Case, statistics_batch: int, rounds: int, *, fused: bool = False, watch: Watch = lambda _: None
) -> list[Record]:
    """One record per contender, the folded BatchNorm first."""
    check_rounds(rounds)
    case.checked()
    images, _ = case.batch()
    watch("building and checking")
    with torch.no_grad(), full_float32():
        nets = _nets(case, images, statistics_batch, fused)
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        return _rows(case, nets, images, statistics_batch, rounds, watch)
    finally:
        torch.backends.cudnn.benchmark = before


def _rows(
    case: Case, nets: dict[str, nn.Module], images: Tensor, statistics_batch: int, rounds: int, watch: Watch
) -> list[Record]:
    calls = {name: _forward(case, net, images) for name, net in nets.items()}
    ready: dict[str, Timed] = {}
    for name, call in calls.items():
        watch(f"warming up {name}")
        ready[name] = timed(call, case.device, graph=case.cuda_graph, sample=SAMPLE[case.device.type])
        _require(name, "its logits are not finite", bool(ready[name].results()[0].isfinite().all()))
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    times = take_turns({name: one.seconds for name, one in ready.items()}, rounds, watch)
    return [
        {
            "model": case.model,
            "setting": str(Setting(len(images), statistics_batch)),
            "shape": "x".join(map(str, images.shape)),
            "layout": "NHWC" if case.channels_last else "NCHW",
            "precision": case.precision,
            "device": str(case.device),
            "cuda_graph": case.cuda_graph,
            "contender": name,
            **spread("ms", [1e3 * seconds.clock for seconds in own]),
            **spread("ratio", ratios(own, times[FOLDED])),
            "ratio_groupnorm": spread("ratio", ratios(own, times[GROUPNORM]))["ratio"],
            **spread("processor_ratio", processor_ratios(own, times[FOLDED])),
            "kernels": count_kernels(calls[name], case.device),
            "rounds": rounds,
            "load": None if load is None else round(load, 1),
        }
        for name, own in times.items()
    ]


def _forward(case: Case, net: nn.Module, images: Tensor) -> Call:
    def call() -> Sequence[Tensor]:
        with torch.no_grad(), case.autocast():
            return (net(images),)

    return call


def _nets(case: Case, images: Tensor, statistics_batch: int, fused: bool) -> dict[str, nn.Module]:
    """Every network in eval mode, with the statistics of one batch, and checked."""
    example, few = images[:2], images[:FEW]
    whole = Setting(len(images), len(images))
    plain = case.build(Entry(BASELINE, whole))
    plain(images)
    plain.eval()
    # Conversion copies the statistics of the BatchNorms, so both are the same network in population mode.
    population = normalized(copy.deepcopy(plain), "bkn", example, statistics_batch=statistics_batch, steps=1).eval()
    by_example = copy.deepcopy(population).train()
    by_example(images)  # `example` needs observed statistics, which a BatchNorm does not keep
    set_inference(by_example.eval(), "example")
    nets = {
        FOLDED: fold(plain, example),
        "BatchNorm": plain,
        "BKN population folded": fold(population),
        "BKN population": population,
        GROUPNORM: case.build(Entry("gn", whole)).eval(),
        "BKN example": freeze_priors(by_example),
    }
    if fused:
        nets["BKN example fused"] = fuse(nets["BKN example"], example)
    truths = {net: _logits(copy.deepcopy(net).double(), few.double()) for net in (plain, nets[GROUPNORM], by_example)}
    for name, net in nets.items():
        truth = truths[by_example if "example" in name else nets[GROUPNORM] if name == GROUPNORM else plain]
        error = float((_logits(net, few) - truth).abs().max() / truth.abs().max())
        _require(name, f"its logits are off by {error:.1e}", error < TOLERANCE)
    return nets


def _logits(net: nn.Module, images: Tensor) -> Tensor:
    logits: Tensor = net(images)
    return logits.double()


def _require(name: str, fault: str, right: bool) -> None:
    if not right:
        raise LabError(f"{name} is wrong, so nothing is timed: {fault}")
