"""Worker processes that run many tasks. Each imports torch once and reports its progress; a crash of one is detected.

A task runs in a worker process, so that a crash or its memory does not affect the others. Ctrl-C is counted here and
passed on: the worker gets SIGINT, as it would in a terminal, and the task saves its state and ends. Workers are not in
the terminal's process group. Otherwise the terminal would interrupt them a second time while they save. The output of a
task goes to its own file, because only the parent writes to the screen.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from kalmannorm.lab.bounds import whole
from kalmannorm.lab.comparing.worker import Task, serve
from kalmannorm.lab.files.records import Record
from kalmannorm.lab.machine.devices import check_threads, cores, most_at_once, resolve

TICK = 0.2
"""Seconds between two checks of silent workers."""


class Outcome(NamedTuple):
    """How a task ended. `reason` is one line for people."""

    kind: Literal["done", "failed", "interrupted"]
    reason: str = ""


class Listener:
    """Called by a pool while it runs. Tasks are identified by their number."""

    def started(self, task: int) -> None: ...

    def heard(self, task: int, record: Record) -> None: ...

    def ended(self, task: int, outcome: Outcome) -> None: ...

    def interrupted(self) -> None: ...

    def tick(self) -> None:
        """Called regularly."""


class Seat(NamedTuple):
    """The device and threads of a worker."""

    device: str
    threads: int


def seats(device: str, jobs: int | None, threads: int | None = None) -> list[Seat]:
    """One worker per GPU. Without GPUs one worker per core, with one thread, because small networks gain nothing from
    more.

    `jobs` is another number of workers. They share the GPUs, or the cores, as evenly as possible. `threads` is another
    number of threads for each of them.
    """
    if jobs is not None:
        whole(1, most_at_once()).check("jobs", jobs)
    check_threads(threads)
    resolve(device)
    devices = [device]
    if device in ("auto", "cuda") and torch.cuda.is_available():
        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    elif device == "auto":
        devices = ["cpu"]
    count = jobs or (cores() if devices == ["cpu"] else len(devices))
    return [Seat(devices[index % len(devices)], threads or max(1, cores() // count)) for index in range(count)]


class _Worker:
    """The parent's side of a worker. It gets its first task immediately, so that a crash always belongs to a task."""

    def __init__(self, seat: Seat, output: Path, number: int, task: Task) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.seat = seat
        self.connection, far_end = spawn.Pipe()
        # Not a daemon: a daemon cannot have child processes, and image folders are read by child processes.
        self.process = spawn.Process(target=serve, args=(far_end, seat.device, seat.threads, output))
        with _interrupts_ignored():  # inherited by the child: no traceback if Ctrl-C comes during its imports
            self.process.start()
        far_end.close()
        self.give(number, task)

    def give(self, number: int, task: Task | None) -> None:
        self.number = number
        with contextlib.suppress(OSError):  # the worker has died, which the next check finds
            self.connection.send(task)

    def interrupt(self) -> None:
        """Send a message and a signal, because the signal has no effect between two tasks."""
        with contextlib.suppress(OSError):
            self.connection.send(None)
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGINT)

    def messages(self) -> Iterator[tuple[str, Any]]:
        """All messages that have arrived."""
        with contextlib.suppress(EOFError, OSError):
            while self.connection.poll():
                yield self.connection.recv()

    @property
    def death(self) -> str:
        code = self.process.exitcode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = ", perhaps because memory was short" if name == "SIGKILL" else ""
            return f"its process was killed by {name}{hint}"
        return f"its process ended with status {code}"


@dataclass
class Interrupts:
    """How often somebody asked to stop. The first time, running tasks save their state. Then they are killed."""

    count: int = 0


@contextlib.contextmanager
def interrupts_counted(interrupts: Interrupts | None = None) -> Iterator[Interrupts]:
    """Count Ctrl-C instead of raising an error, so that it cannot interrupt reading a message or drawing a table."""
    interrupts = interrupts or Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return

    def count(*_: Any) -> None:
        interrupts.count += 1

    previous = signal.signal(signal.SIGINT, count)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def perform(
    tasks: Sequence[Task],
    places: Sequence[Seat],
    output: Path,
    listener: Listener,
    interrupts: Interrupts | None = None,
) -> list[Outcome]:
    """The outcome of every task. After Ctrl-C all running and waiting tasks count as interrupted.

    The output of a task is written to the folder `output`. A second Ctrl-C stops without waiting. Another thread may
    count up `interrupts` to the same effect.
    """
    return _Pool(tasks, output, listener).run(places, interrupts)


class _Pool:
    def __init__(self, tasks: Sequence[Task], output: Path, listener: Listener) -> None:
        self.tasks, self.output, self.listener = tasks, output, listener
        self.waiting = deque(range(len(tasks)))
        self.outcomes: dict[int, Outcome] = {}
        self.workers: list[_Worker] = []
        self.stopping = False

    def run(self, places: Sequence[Seat], interrupts: Interrupts | None = None) -> list[Outcome]:
        with interrupts_counted(interrupts) as interrupts:
            try:
                for seat in places:
                    self._hire(seat)
                passed_on = 0
                while self.workers:
                    if interrupts.count > passed_on:
                        passed_on = interrupts.count
                        self._interrupt(at_once=passed_on > 1)
                    self._look()
                    self.listener.tick()
            finally:
                for worker in self.workers:
                    worker.process.kill()
        return [self.outcomes.get(number, Outcome("interrupted")) for number in range(len(self.tasks))]

    def _hire(self, seat: Seat) -> None:
        if self.waiting:
            number = self.waiting.popleft()
            self.workers.append(_Worker(seat, self.output, number, self.tasks[number]))
            self.listener.started(number)

    def _interrupt(self, at_once: bool) -> None:
        self.stopping = True
        self.waiting.clear()
        self.listener.interrupted()
        for worker in self.workers:
            if at_once:
                worker.process.kill()
            else:
                worker.interrupt()

    def _look(self) -> None:
        connections: list[Connection] = [worker.connection for worker in self.workers]
        wait(connections, TICK)
        for worker in list(self.workers):
            alive = worker.process.is_alive()  # first: then all messages of a dead worker have arrived
            for kind, content in worker.messages():
                if kind == "heard":
                    self.listener.heard(worker.number, content)
                    continue
                self._end(worker.number, Outcome(*content))
                if kind == "ended":
                    self._go_on(worker)
            if not alive:
                self._bury(worker)

    def _end(self, number: int, outcome: Outcome) -> None:
        self.outcomes[number] = outcome
        self.listener.ended(number, outcome)

    def _go_on(self, worker: _Worker) -> None:
        if self.waiting:
            number = self.waiting.popleft()
            worker.give(number, self.tasks[number])
            self.listener.started(number)
        else:
            worker.give(worker.number, None)

    def _bury(self, worker: _Worker) -> None:
        """The task of a dead worker has failed. A new worker continues with the remaining tasks."""
        self.workers.remove(worker)
        worker.process.join()
        worker.connection.close()
        if worker.number not in self.outcomes:
            self._end(worker.number, Outcome("interrupted") if self.stopping else Outcome("failed", worker.death))
        self._hire(worker.seat)
