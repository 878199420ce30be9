"""Worker processes that live over many tasks: each imports torch once, is heard live, and is missed when it dies.

A task runs in a process of its own, so that neither a crash nor the memory it needs touches the others. Ctrl-C is
counted here and passed on: a worker's task gets SIGINT, as it would in a terminal, saves what it has and ends. Workers
are no part of the terminal's process group, or the terminal would interrupt them a second time while they save.
What a task prints goes to a file of its own; the screen belongs to the parent.
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
"""Seconds between two looks at workers that say nothing."""


class Outcome(NamedTuple):
    """How a task ended; `reason` is one line for people."""

    kind: Literal["done", "failed", "interrupted"]
    reason: str = ""


class Listener:
    """What a pool tells while it runs; tasks go by their number."""

    def started(self, task: int) -> None: ...

    def heard(self, task: int, record: Record) -> None: ...

    def ended(self, task: int, outcome: Outcome) -> None: ...

    def interrupted(self) -> None: ...

    def tick(self) -> None:
        """Some time has passed."""


class Seat(NamedTuple):
    """Where a worker computes."""

    device: str
    threads: int


def seats(device: str, jobs: int | None, threads: int | None = None) -> list[Seat]:
    """One worker per GPU; without GPUs one per core, with one thread: small nets gain nothing from more.

    `jobs` is another number of workers: they share the GPUs, or the cores, as evenly as can be. `threads` is another
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
    """The parent's side of a worker; it is given its first task at once, so that every death ends a task."""

    def __init__(self, seat: Seat, output: Path, number: int, task: Task) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.seat = seat
        self.connection, far_end = spawn.Pipe()
        # Not a daemon: those may have no children, and readers of image folders are.
        self.process = spawn.Process(target=serve, args=(far_end, seat.device, seat.threads, output))
        with _interrupts_ignored():  # the child inherits it: no traceback where Ctrl-C comes while it still imports
            self.process.start()
        far_end.close()
        self.give(number, task)

    def give(self, number: int, task: Task | None) -> None:
        self.number = number
        with contextlib.suppress(OSError):  # it has died: that is seen at the next look
            self.connection.send(task)

    def interrupt(self) -> None:
        """Said as well as signalled: the signal does nothing between two tasks."""
        with contextlib.suppress(OSError):
            self.connection.send(None)
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGINT)

    def messages(self) -> Iterator[tuple[str, Any]]:
        """All that has come."""
        with contextlib.suppress(EOFError, OSError):
            while self.connection.poll():
                yield self.connection.recv()

    @property
    def death(self) -> str:
        code = self.process.exitcode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = ", perhaps for lack of memory" if name == "SIGKILL" else ""
            return f"its process was killed by {name}{hint}"
        return f"its process ended with status {code}"


@dataclass
class _Interrupts:
    count: int = 0


@contextlib.contextmanager
def _interrupts_counted() -> Iterator[_Interrupts]:
    """Ctrl-C must not break off a message half read, or a table half drawn."""
    interrupts = _Interrupts()
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


def perform(tasks: Sequence[Task], places: Sequence[Seat], output: Path, listener: Listener) -> list[Outcome]:
    """The outcome of every task. After a Ctrl-C those that ran are interrupted, and those that waited too.

    What a task prints is kept in the folder `output`. A second Ctrl-C waits no longer.
    """
    return _Pool(tasks, output, listener).run(places)


class _Pool:
    def __init__(self, tasks: Sequence[Task], output: Path, listener: Listener) -> None:
        self.tasks, self.output, self.listener = tasks, output, listener
        self.waiting = deque(range(len(tasks)))
        self.outcomes: dict[int, Outcome] = {}
        self.workers: list[_Worker] = []
        self.stopping = False

    def run(self, places: Sequence[Seat]) -> list[Outcome]:
        with _interrupts_counted() as interrupts:
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
            alive = worker.process.is_alive()  # asked first: what a dead worker said is then all there
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
        """The task that a worker died with has failed; another worker goes on with the rest."""
        self.workers.remove(worker)
        worker.process.join()
        worker.connection.close()
        if worker.number not in self.outcomes:
            self._end(worker.number, Outcome("interrupted") if self.stopping else Outcome("failed", worker.death))
        self._hire(worker.seat)
