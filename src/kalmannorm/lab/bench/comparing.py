"""Times calls on one case. Each call is checked in the form in which it is timed. Then they take turns."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from kalmannorm.lab.bench.timing import Call, timed
from kalmannorm.lab.bench.turns import Watch, ratios, spread, take_turns
from kalmannorm.lab.files.records import Record

SAMPLE = {"cuda": 2e-3, "cpu": 1e-2}
"""Seconds."""
UNROLLED = 8
"""Calls in one CUDA graph."""


Error = Callable[[Sequence[Tensor]], float]
"""Returns the error of these results. Raises an error if it is too large."""


class Entrant(NamedTuple):
    name: str
    statistics_batch: int | str | None
    prepare: Callable[[], tuple[Call, Error]]
    """Returns the call to time, and its check."""
    passes: int
    """Reads and writes of a tensor like x that the algorithm needs at least."""


def compare(
    entrants: Sequence[Entrant],
    like: Tensor,
    rounds: int,
    *,
    copy: float,
    against: Mapping[str, str],
    watch: Watch,
) -> list[Record]:
    """One record for each entrant. The first one is the baseline of the ratios.

    `like` is a tensor of one pass. `copy` is the speed of a copy in bytes per second. `against` names additional
    columns of ratios, with their baselines.
    """
    device = like.device
    errors, timers = [], {}
    for number, entrant in enumerate(entrants):
        watch(f"checking {entrant.name}")
        gpu = device.type == "cuda"
        call, error = entrant.prepare()
        once = timed(call, device, graph=gpu, sample=SAMPLE[device.type], unrolled=UNROLLED)
        errors.append(error(once.results()))
        timers[str(number)] = once.seconds
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    times = list(take_turns(timers, rounds, watch).values())
    names = [entrant.name for entrant in entrants]
    others = {column: times[names.index(name)] if name in names else None for column, name in against.items()}
    rows = []
    for entrant, own, off in zip(entrants, times, errors, strict=True):
        us = spread("us", [1e6 * seconds.clock for seconds in own], 2)
        speed = entrant.passes * like.numel() * like.element_size() / (1e-6 * (us["us"] or 0.0))
        rows.append(
            {
                "contender": entrant.name,
                "statistics_batch": entrant.statistics_batch,
                **us,
                **spread("ratio", ratios(own, times[0])),
                **{
                    column: None if other is None else spread(column, ratios(own, other))[column]
                    for column, other in others.items()
                },
                "passes": entrant.passes,
                "gb_per_s": round(speed / 1e9, 1),
                "copy_gb_per_s": round(copy / 1e9, 1),
                "copy_percent": round(100 * speed / copy, 1),
                "error": float(f"{off:.1e}"),
                "rounds": rounds,
                "load": None if load is None else round(load, 1),
            }
        )
    return rows
