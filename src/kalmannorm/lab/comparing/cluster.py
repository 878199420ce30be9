"""Runs tasks on the workers of a Dask cluster, which may be on other machines. It stands in for the pool of processes.

Dask gives each task to one worker, and gives the task of a lost worker to another one. Dask runs a task in a thread.
But a task needs a main thread for its signals, and a crash must not take the worker with it. So the worker runs the
task in a pool of one process, and passes on what this pool reports. If the worker or the client is lost, this process
saves a checkpoint and ends. The lock on its output makes the next process wait for that.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kalmannorm.lab.comparing.pool import TICK, Interrupts, Listener, Outcome, interrupts_counted, perform, seats
from kalmannorm.lab.comparing.worker import Task
from kalmannorm.lab.errors import LabError, first_line
from kalmannorm.lab.files.records import Record

if TYPE_CHECKING:
    from distributed import Client, Future, Worker

PATIENCE = 30
"""Seconds that a scheduler has to answer."""


@contextlib.contextmanager
def connected(address: str) -> Iterator[Cluster]:
    """The cluster whose scheduler has this address, or has written this file."""
    try:
        from distributed import Client
    except ModuleNotFoundError:
        raise LabError("--cluster needs Dask: pip install 'kalmannorm[cluster]'") from None
    place: dict[str, Any] = {"address": address}
    if "://" not in address:
        if not Path(address).is_file():
            raise LabError(
                f"--cluster {address} is no file: give the address of a Dask scheduler, such as tcp://10.0.0.5:8786, "
                "or the file of its --scheduler-file"
            )
        place = {"scheduler_file": address}
    try:
        client = Client(**place, timeout=PATIENCE, set_as_default=False)
    except (OSError, ValueError) as error:
        raise LabError(f"--cluster {address}: no Dask scheduler answers ({first_line(error)})") from None
    with client:
        yield Cluster(client)


class Cluster:
    """A connection to a scheduler."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.name = uuid.uuid4().hex
        """Of this comparison. Several may share a cluster."""

    @property
    def workers(self) -> int:
        """The number of tasks that the cluster runs at a time now. Workers may come and go."""
        return sum(self.client.nthreads().values())

    def perform(
        self, tasks: Sequence[Task], device: str, threads: int | None, output: Path, listener: Listener
    ) -> list[Outcome]:
        """The outcome of every task, as `pool.perform` returns it."""
        output.mkdir(parents=True, exist_ok=True)  # which the workers look for
        news: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        self.client.subscribe_topic(self.name, lambda event: news.put(event[1]))
        futures = [
            self.client.submit(
                _work, self.name, number, task, device, threads, output, key=f"{task.name}-{self.name}", pure=False
            )
            for number, task in enumerate(tasks)
        ]
        for number, future in enumerate(futures):
            future.add_done_callback(lambda _, number=number: news.put(("ended", number, None)))
        outcomes: dict[int, Outcome] = {}
        begun: set[int] = set()
        passed_on = 0
        with interrupts_counted() as interrupts:
            while len(outcomes) < len(tasks):
                if interrupts.count > passed_on:
                    passed_on = interrupts.count
                    listener.interrupted()
                    self.client.run(_interrupt, self.name, on_error="ignore")
                    waiting = [number for number in range(len(tasks)) if number not in begun | outcomes.keys()]
                    outcomes |= dict.fromkeys(waiting, Outcome("interrupted"))
                    self.client.cancel([futures[number] for number in waiting])
                    if passed_on > 1:
                        break
                with contextlib.suppress(queue.Empty):
                    kind, number, content = news.get(timeout=TICK)
                    if number in outcomes:
                        continue
                    if kind == "started":
                        begun.add(number)
                        listener.started(number)
                    elif kind == "heard":
                        listener.heard(number, content)
                    else:
                        outcomes[number] = _outcome(futures[number], stopping=passed_on > 0)
                        listener.ended(number, outcomes[number])
                listener.tick()
        return [outcomes.get(number, Outcome("interrupted")) for number in range(len(tasks))]


def _outcome(future: Future[Outcome], *, stopping: bool) -> Outcome:
    from distributed import KilledWorker

    if future.status == "finished":
        return future.result()
    if stopping:
        return Outcome("interrupted")
    if future.status != "error":
        return Outcome("failed", "the connection to the cluster was lost")
    error = future.exception()
    if isinstance(error, KilledWorker):
        return Outcome("failed", "its worker was lost again and again, perhaps because memory was short")
    return Outcome("failed", f"{type(error).__name__}: {first_line(error)}")


_ASKED: Counter[str] = Counter()
"""In a worker: how often each comparison was interrupted."""


def _interrupt(comparison: str) -> None:
    """Runs in every worker, beside its tasks."""
    _ASKED[comparison] += 1


def _work(comparison: str, number: int, task: Task, device: str, threads: int | None, output: Path) -> Outcome:
    """Runs in a worker: the task in a process of its own."""
    from distributed import get_worker

    worker = get_worker()
    if multiprocessing.current_process().daemon:
        return Outcome("failed", "a worker with a nanny cannot start processes: give dask worker --no-nanny")
    if not output.is_dir():
        return Outcome("failed", f"{worker.address} has no {output.parent}: give an --out that all machines share")
    interrupts = Interrupts(_ASKED[comparison])
    if interrupts.count:
        return Outcome("interrupted")
    passing_on = _PassingOn(comparison, number, worker, interrupts)
    place = seats(device, worker.state.nthreads, threads)[:1]
    (outcome,) = perform([task], place, output, passing_on, interrupts)
    return outcome


class _PassingOn(Listener):
    """Tells the client what the pool of one process tells, and interrupts this pool if the client or Dask wants it."""

    def __init__(self, comparison: str, number: int, worker: Worker, interrupts: Interrupts) -> None:
        self.comparison, self.number, self.worker, self.interrupts = comparison, number, worker, interrupts
        self.key = worker.get_current_task()

    def started(self, task: int) -> None:
        self.worker.log_event(self.comparison, ("started", self.number, None))

    def heard(self, task: int, record: Record) -> None:
        self.worker.log_event(self.comparison, ("heard", self.number, record))

    def tick(self) -> None:
        self.interrupts.count = max(_ASKED[self.comparison], int(self._unwanted()), self.interrupts.count)

    def _unwanted(self) -> bool:
        """Whether the worker ends, or the client is gone."""
        from distributed.core import Status

        known = self.worker.state.tasks.get(self.key)
        ends = self.worker.status in (Status.closing, Status.closing_gracefully, Status.closed, Status.failed)
        return ends or known is None or known.state == "cancelled"
