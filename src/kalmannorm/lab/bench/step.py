"""Time, kernels and peak memory of a training step, compared with the same network and nn.BatchNorm2d.

A step is forward, loss, backward and optimizer, on a batch that is already on the device. On a GPU it is captured once
as a CUDA graph and replayed. First every contender is checked, and nothing is timed if one is wrong. Then they take
turns.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from kalmannorm.lab.bench.step_checks import check, check_replay
from kalmannorm.lab.bench.step_contenders import Case, Contender, Entry
from kalmannorm.lab.bench.timing import Timed, count_kernels, timed
from kalmannorm.lab.bench.turns import Watch, check_rounds, processor_ratios, ratios, spread, take_turns
from kalmannorm.lab.files.records import Record

SAMPLE = 2e-2
"""Seconds of one sample on a GPU, which is a few replays. On a CPU a sample is one step."""


def bench(case: Case, entries: Sequence[Entry], rounds: int = 15, *, watch: Watch = lambda _: None) -> list[Record]:
    """One record per contender. `entries` begins with nn.BatchNorm, the baseline."""
    check_rounds(rounds)
    case.checked()
    images, labels = case.batch()
    contenders = []
    for entry in entries:
        watch(f"building {entry}")
        contender = Contender(case, entry, case.build(entry), images, labels)
        watch(f"checking {entry}")
        check(case, contender)
        contenders.append(contender)
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True  # shapes are constant, so all contenders use the same fastest algorithms
    try:
        return _rows(case, contenders, rounds, watch)
    finally:
        torch.backends.cudnn.benchmark = before


def _rows(case: Case, contenders: Sequence[Contender], rounds: int, watch: Watch) -> list[Record]:
    ready: dict[str, Timed] = {}
    # Only one graph runs at a time, so all can use the same memory.
    pool = torch.cuda.graph_pool_handle() if case.cuda_graph else None
    for contender in contenders:
        watch(f"warming up {contender.entry}")
        ready[str(contender.entry)] = _timed(case, contender, pool)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    times = take_turns({name: one.seconds for name, one in ready.items()}, rounds, watch)
    base = times[str(contenders[0].entry)]
    rows, peaks = [], []
    for contender in contenders:
        watch(f"memory of {contender.entry}")
        entry, own = contender.entry, times[str(contender.entry)]
        peaks.append(contender.peak())
        rows.append(
            {
                "model": case.model,
                "setting": str(entry.setting),
                "shape": "x".join(map(str, contender.images.shape)),
                "layout": "NHWC" if case.channels_last else "NCHW",
                "precision": case.precision,
                "device": str(case.device),
                "cuda_graph": case.cuda_graph,
                "method": entry.method,
                "way": entry.way,
                **spread("ms", [1e3 * seconds.clock for seconds in own]),
                **spread("ratio", ratios(own, base)),
                **spread("processor_ratio", processor_ratios(own, base)),
                "kernels": count_kernels(contender.step, case.device),
                "peak_mib": round(peaks[-1] / 2**20, 1),
                "peak_ratio": round(peaks[-1] / peaks[0], 3),
                "parameters": sum(parameter.numel() for parameter in contender.model.parameters()),
                "rounds": rounds,
                "load": None if load is None else round(load, 1),
            }
        )
    return rows


def _timed(case: Case, contender: Contender, pool: object) -> Timed:
    sample = SAMPLE if case.device.type == "cuda" else 0.0
    ready = timed(lambda: (contender.step(),), case.device, graph=case.cuda_graph, sample=sample, pool=pool)
    if case.cuda_graph:
        check_replay(contender, ready)
    return ready
