"""Builds the kernels of many launches at once, in several processes, into Triton's own cache.

Triton builds a kernel at its first launch, one after the other. Much of that time is Python, so threads would not help.
Here each launch is described as Triton would describe it: types, alignments, constants and options. Kernels that the
cache lacks are built by processes that run `triton_worker.py`. The launches then find them in the cache.

Nothing depends on this. If a process cannot be started, dies, or takes too long, or if this version of Triton was not
tested, a kernel is built at its first launch as ever.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kalmannorm._ops import triton_worker
from kalmannorm._ops.triton_launching import ALIGNED, DIRECT, At, Ready

MOST = 8
"""Most processes."""
QUIET = 2.0
"""Seconds after which the progress is shown."""
PATIENCE = 60.0
"""Seconds without any kernel built, after which the processes are ended."""
START = 15.0
"""Seconds in which the first process must have started. What `sys.executable` names may be no Python."""
VARIABLE = "KALMANNORM_BUILD_WORKERS"
"""The environment variable with the number of processes. 0: kernels are built at their first launch."""

log = logging.getLogger("kalmannorm")


class Operand:
    """Stands for a tensor in a launch: its dtype, and an address as aligned as that of the tensor."""

    def __init__(self, dtype: torch.dtype, offset: int = 0) -> None:
        self.dtype, self.offset = dtype, offset % ALIGNED

    def data_ptr(self) -> int:
        return self.offset


def operand(given: Any) -> Any:
    """The stand-in for a tensor without memory, on the meta device. Every allocation begins aligned."""
    if isinstance(given, Tensor) and given.device.type == "meta":
        return Operand(given.dtype, int(given.storage_offset()) * given.element_size())
    return given


class Wanted(NamedTuple):
    """A launch that will be made: the prepared launch, and its arguments or stand-ins for them."""

    launch: Ready
    given: tuple[Any, ...]

    @classmethod
    def of(cls, launch: Ready, given: Iterable[Any], memory: Sequence[torch.dtype] = ()) -> Wanted:
        """`memory` has the dtypes of the tensors that `At` names."""
        return cls(
            launch,
            tuple(
                Operand(memory[each.memory], 4 * each.offset) if isinstance(each, At) else operand(each)
                for each in given
            ),
        )


class Job(NamedTuple):
    """A kernel to build: the arguments of `triton_worker.build`."""

    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]
    target: Any
    key: str


def jobs_of(wanted: Iterable[Wanted]) -> list[Job]:
    """The different kernels of these launches on the current device, as Triton's `JITFunction.run` describes them."""
    from triton.compiler import ASTSource
    from triton.runtime.cache import get_cache_key
    from triton.runtime.driver import driver
    from triton.runtime.jit import get_cache_invalidating_env_vars

    device, environment = driver.active.get_current_device(), get_cache_invalidating_env_vars()
    found: dict[Any, Job] = {}
    for launch, given in wanted:
        kernel = launch.kernel
        _, _, target, backend, bind = kernel.device_caches[device]
        keywords = dict(launch.options)
        keywords["debug"] = keywords.get("debug", kernel.debug) or triton.knobs.runtime.debug
        keywords["instrumentation_mode"] = triton.knobs.compilation.instrumentation_mode
        bound, specialization, options = bind(*given, *launch.numbers, **keywords)
        same = kernel.module, kernel.fn.__name__, str(specialization), str(options)
        if same in found:
            continue
        options, signature, constants, attributes = kernel._pack_args(backend, keywords, bound, specialization, options)
        source = ASTSource(kernel, signature, constants, attributes)
        parsed = backend.parse_options(dict(options.__dict__, **source.parse_options()))
        key = get_cache_key(source, backend, parsed, env_vars=environment)
        key = hashlib.sha256(key.encode("utf-8")).hexdigest()
        found[same] = Job(*same[:2], signature, constants, attributes, dict(options.__dict__), target, key)
    return list(found.values())


def missing(jobs: Sequence[Job]) -> list[Job]:
    """Those that are not in the cache."""
    from triton.runtime.cache import get_cache_manager

    if triton.knobs.compilation.always_compile:
        return []
    return [job for job in jobs if not get_cache_manager(job.key).get_group(f"{job.name[:150]}.json")]


def workers_for(jobs: int) -> int:
    """The number of processes. 0 if they would not help."""
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        return min(int(chosen), jobs) if chosen.isdecimal() else 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(cores // _ranks_here(), jobs, MOST)
    return count if count > 1 else 0


def _ranks_here() -> int:
    """Ranks on this machine, at most. torchrun tells their number; others have at most one per GPU."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    if told.isdecimal():
        return max(int(told), 1)
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    return max(min(torch.distributed.get_world_size(), torch.cuda.device_count()), 1)


def build(wanted: Iterable[Wanted]) -> int:
    """Build what these launches need and the cache lacks. Returns the number of kernels that were built. Never raises.

    The launches are those of the current device.
    """
    if not DIRECT or os.environ.get("TRITON_INTERPRET") == "1" or os.environ.get(VARIABLE) == "0":
        return 0
    if getattr(sys, "frozen", False):  # an application without an interpreter of its own: it would start itself
        return 0
    try:
        jobs = missing(jobs_of(wanted))
        workers = workers_for(len(jobs))
        return _Pool(_rotated(jobs), workers).run() if workers else 0
    except Exception as error:  # any error: the kernels are then built at their first launches
        log.debug("kernels are built one by one: %s", error)
        return 0


def _rotated(jobs: list[Job]) -> list[Job]:
    """Ranks on one machine begin at different jobs. What one has built, the others find in the cache."""
    rank, ranks = os.environ.get("LOCAL_RANK", "0"), os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not (rank.isdecimal() and ranks.isdecimal() and int(ranks)):
        return jobs
    first = int(rank) * len(jobs) // int(ranks) % max(len(jobs), 1)
    return jobs[first:] + jobs[:first]


class _Pool:
    """Processes that build jobs. A thread for each hands it one job after the other."""

    def __init__(self, jobs: list[Job], workers: int) -> None:
        self.total, self.waiting, self.workers = len(jobs), jobs[::-1], workers
        self.answers: list[str] = []
        self.started = False  # whether a process has said so
        self.processes: list[subprocess.Popen[bytes]] = []

    def run(self) -> int:
        start = time.monotonic()
        log.info("building %d kernels in %d processes; this is done once", self.total, self.workers)
        threads = list[threading.Thread]()
        try:
            for _ in range(self.workers):
                self.processes.append(self._start())
            for process in self.processes:
                threads.append(threading.Thread(target=self._serve, args=(process,), daemon=True))
                threads[-1].start()
            self._wait(threads, start)
        finally:
            self.waiting.clear()
            for process in self.processes:
                process.kill()
            for process in self.processes:
                process.wait()
            for thread in threads:
                thread.join(1.0)
            for process in self.processes:
                for stream in (process.stdin, process.stdout):
                    try:
                        if stream is not None:
                            stream.close()
                    except OSError:  # what was left to write has no reader
                        pass
        built = sum(answer.startswith("built") for answer in self.answers)
        log.info("built %d of %d kernels in %.1f s", built, self.total, time.monotonic() - start)
        for answer in self.answers:
            if answer != "built":
                log.debug("a kernel: %s", answer)
        return built

    @staticmethod
    def _start() -> subprocess.Popen[bytes]:
        # Its own file, not `-m`: the package would import torch. Isolated: nothing beside the file is found instead.
        command = [sys.executable, "-I", str(Path(triton_worker.__file__).resolve())]
        environment = os.environ | {VARIABLE: "0"}  # whatever `sys.executable` is, it starts no processes of its own
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, env=environment)

    def _serve(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        try:
            version = triton.runtime.cache.triton_key()
            pickle.dump((sys.path, triton.knobs.cache.dir, version, triton.__file__), process.stdin)
            process.stdin.flush()
            if process.stdout.readline().strip() != b"ready":
                return
            self.started = True
            while self.waiting:
                pickle.dump(self.waiting.pop()._asdict(), process.stdin)
                process.stdin.flush()
                answer = process.stdout.readline()
                if not answer:
                    return
                self.answers.append(answer.decode("utf-8", "replace").strip())
        except Exception as error:  # the process died, no job is left, or a job cannot be sent
            log.debug("a process that builds kernels ends: %r", error)

    def _wait(self, threads: Sequence[threading.Thread], start: float) -> None:
        """Until all is built, or for `PATIENCE` seconds after the last kernel, or until no process has started."""
        shown, seen, last = False, 0, start
        while alive := [thread for thread in threads if thread.is_alive()]:
            alive[0].join(0.1)
            now = time.monotonic()
            if len(self.answers) > seen:
                seen, last = len(self.answers), now
            if now - last > PATIENCE or (not self.started and now - start > START):
                break
            if now - start > QUIET and _terminal():
                shown = True
                print(f"\rkalmannorm: {seen} of {self.total} kernels built", end="", file=sys.stderr, flush=True)
        if shown:
            seconds = time.monotonic() - start
            print(
                f"\rkalmannorm: {len(self.answers)} of {self.total} kernels built in {seconds:.1f} s; they are kept in "
                f"{triton.knobs.cache.dir}",
                file=sys.stderr,
                flush=True,
            )


def _terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()
