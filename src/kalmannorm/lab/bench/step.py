"""Time, kernels and peak memory of a training step, compared with the same network and nn.BatchNorm2d.

A step is forward, loss, backward and optimizer, on a batch that is already on the device. On a GPU it is captured once
as a CUDA graph and replayed. The step of a closing phase follows outside of the graph. Then the same steps are timed
eagerly, as an ordinary training loop runs them, and under `torch.compile` if a mode is given. First every contender is
checked, and nothing is timed if one is wrong. Then they take turns.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from kalmannorm.lab.bench.step_checks import check, check_replay
from kalmannorm.lab.bench.step_compiled import Compiled, check_mode, compiled
from kalmannorm.lab.bench.step_contenders import Case, Contender, Entry
from kalmannorm.lab.bench.timing import Timed, count_kernels, timed
from kalmannorm.lab.bench.turns import Seconds, Watch, check_rounds, processor_ratios, ratios, spread, take_turns
from kalmannorm.lab.files.records import Record

SAMPLE = 2e-2
"""Seconds of one sample on a GPU, which is a few replays. On a CPU a sample is one step."""
EAGER_SAMPLE = 1e-1
"""Seconds of one eager sample on a GPU. Its steps vary more than replays."""


def bench(
    case: Case,
    entries: Sequence[Entry],
    rounds: int = 15,
    *,
    eager: bool = False,
    compile_mode: str | None = None,
    watch: Watch = lambda _: None,
) -> list[Record]:
    """One record per contender. `entries` begins with nn.BatchNorm, the baseline.

    `eager`: if steps are replayed as CUDA graphs, also time them without. `compile_mode`: also time them under
    `torch.compile` in this mode.
    """
    check_rounds(rounds)
    if compile_mode is not None:
        check_mode(compile_mode)
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
        return _rows(case, contenders, rounds, eager, compile_mode, watch)
    finally:
        torch.backends.cudnn.benchmark = before


def _rows(
    case: Case, contenders: Sequence[Contender], rounds: int, eager: bool, compile_mode: str | None, watch: Watch
) -> list[Record]:
    ready: dict[str, Timed] = {}
    # Only one graph runs at a time, so all can use the same memory.
    pool = torch.cuda.graph_pool_handle() if case.cuda_graph else None
    for contender in contenders:
        watch(f"warming up {contender.entry}")
        ready[str(contender.entry)] = _timed(case, contender, pool)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    times = take_turns({name: one.seconds for name, one in ready.items()}, rounds, watch)
    base = times[str(contenders[0].entry)]
    direct = _eager(case, contenders, rounds, watch) if eager and case.cuda_graph else {}
    direct_base = direct.get(str(contenders[0].entry), [])
    built = compiled(contenders, compile_mode, rounds, watch) if compile_mode else {}
    rows, peaks = [], []
    for contender in contenders:
        watch(f"memory of {contender.entry}")
        entry, own = contender.entry, times[str(contender.entry)]
        own_direct, own_built = direct.get(str(entry), []), built.get(str(entry))
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
                "way": entry.ways,
                **spread("ms", [1e3 * seconds.clock for seconds in own]),
                **spread("ratio", ratios(own, base)),
                **spread("processor_ratio", processor_ratios(own, base)),
                **spread("eager_ms", [1e3 * seconds.clock for seconds in own_direct]),
                **spread("eager_ratio", ratios(own_direct, direct_base)),
                **_compiled_columns(compile_mode, own_built, built.get(str(contenders[0].entry))),
                "kernels": count_kernels(contender.step, case.device),
                "peak_mib": round(peaks[-1] / 2**20, 1),
                "peak_ratio": round(peaks[-1] / peaks[0], 3),
                "parameters": sum(parameter.numel() for parameter in contender.model.parameters()),
                "rounds": rounds,
                "load": None if load is None else round(load, 1),
            }
        )
    return rows


def _compiled_columns(mode: str | None, own: Compiled | None, base: Compiled | None) -> Record:
    """None in every column if nothing was compiled."""
    seconds = [] if own is None else own.steps
    return {
        "compile_mode": mode,
        "compile_s": None if own is None else round(own.cold, 2),
        "compile_cached_s": None if own is None else round(own.cached, 2),
        **spread("compiled_ms", [1e3 * each.clock for each in seconds]),
        **spread("compiled_ratio", ratios(seconds, [] if base is None else base.steps)),
    }


def _eager(case: Case, contenders: Sequence[Contender], rounds: int, watch: Watch) -> dict[str, list[Seconds]]:
    """Seconds of eager steps, in rounds of their own. The graphs are still there, but do not run."""
    ready: dict[str, Timed] = {}
    for contender in contenders:
        watch(f"warming up {contender.entry}, eager")
        ready[str(contender.entry)] = timed(contender.timed, case.device, graph=False, sample=EAGER_SAMPLE)
    return take_turns({name: one.seconds for name, one in ready.items()}, rounds, watch)


def _timed(case: Case, contender: Contender, pool: object) -> Timed:
    sample = SAMPLE if case.device.type == "cuda" else 0.0
    if not case.cuda_graph:
        return timed(contender.timed, case.device, graph=False, sample=sample)
    ready = timed(contender.graphed, case.device, graph=True, sample=sample, pool=pool, after=contender.close)
    check_replay(contender, ready)
    return ready
