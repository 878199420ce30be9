"""Steps under `torch.compile`: how long compiling takes, and how long a compiled step takes.

Every net is compiled several times, starting from an empty cache on disk. After the first time torch finds its kernels
in the cache, as a second run of a script does.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from kalmannorm.lab.bench.step_checks import check_compiled
from kalmannorm.lab.bench.step_contenders import Contender
from kalmannorm.lab.bench.timing import Timed, timed
from kalmannorm.lab.bench.turns import Seconds, Watch, take_turns
from kalmannorm.lab.errors import LabError

MODES = ("default", "reduce-overhead")
TIMES_CACHED = 3
"""How often a net is compiled with a full cache."""
SAMPLE = 1e-1
"""Seconds of one sample on a GPU."""


class Compiled(NamedTuple):
    """Seconds of the first step with an empty cache and with a full one (the median), and of compiled steps."""

    cold: float
    cached: float
    steps: list[Seconds]


def check_mode(mode: str) -> None:
    if mode not in MODES:
        raise LabError(f"--compile-mode {mode!r}: choose {' or '.join(MODES)}")


def compiled(contenders: Sequence[Contender], mode: str, rounds: int, watch: Watch) -> dict[str, Compiled]:
    """Compile and time all contenders. Afterwards they run as before."""
    check_mode(mode)
    plain = [contender.run for contender in contenders]
    first, ready = dict[str, tuple[float, float]](), dict[str, Timed]()
    device = contenders[0].images.device
    try:
        with _empty_cache():
            _compile_something(device)
            for contender in contenders:
                watch(f"compiling {contender.entry}")
                cold = _first_step(contender, mode, device)
                cached = [_first_step(contender, mode, device) for _ in range(TIMES_CACHED)]
                first[str(contender.entry)] = cold, statistics.median(cached)
            for contender in contenders:
                watch(f"warming up {contender.entry}, compiled")
                _first_step(contender, mode, device, forget=False)
                check_compiled(contender)
                sample = SAMPLE if device.type == "cuda" else 0.0
                ready[str(contender.entry)] = timed(contender.timed, device, graph=False, sample=sample)
            times = take_turns({name: one.seconds for name, one in ready.items()}, rounds, watch)
    finally:
        for contender, run in zip(contenders, plain, strict=True):
            contender.run = run
        torch.compiler.reset()
    return {name: Compiled(*first[name], times[name]) for name in first}


def _first_step(contender: Contender, mode: str, device: torch.device, *, forget: bool = True) -> float:
    if forget:
        torch.compiler.reset()
    chosen: Any = None if mode == "default" else mode
    contender.run = torch.compile(contender.model, dynamic=False, mode=chosen)
    _wait(device)
    start = time.perf_counter()
    contender.step()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _empty_cache() -> Iterator[None]:
    """A cache of torch's compiler that is empty at first, for this context alone."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


def _compile_something(device: torch.device) -> None:
    """The compiler's own start must not count for the first net."""
    x = torch.ones(64, device=device)
    torch.compile(lambda x: x.sin() + 1)(x)
