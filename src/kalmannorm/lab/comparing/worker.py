"""The code inside a worker process: runs tasks and reports to the parent, until the parent ends it or exits."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import torch

from kalmannorm.lab.errors import Interrupted, LabError
from kalmannorm.lab.files.records import Record
from kalmannorm.lab.machine import memory
from kalmannorm.lab.machine.ranks import be_alone

Watch = Callable[[Record], None]

PATIENCE = 30.0
"""Seconds that a task waits for another process that still works on it, perhaps one whose parent was killed."""


@dataclass(frozen=True)
class Task:
    """`call(device, watch)` runs in a worker, so it must be picklable. `watch` sends records. `name` is a file name."""

    name: str
    call: Callable[[str, Watch], Any]


def serve(connection: Connection, device: str, threads: int, output: Path) -> None:
    """Run tasks from the parent. Answers are ("heard", record) and ("ended" or "left", (kind, reason))."""
    os.setpgrp()
    be_alone()
    threading.Thread(target=_interrupt_when_orphaned, daemon=True).start()
    torch.set_num_threads(threads)
    with contextlib.suppress(EOFError, OSError):  # the parent has exited, so nobody needs an answer
        while (task := connection.recv()) is not None:
            try:
                kind, outcome = _perform(task, connection, device, output)
            except KeyboardInterrupt:  # after the task, before the signal is ignored again
                kind, outcome = "ended", ("interrupted", "")
            connection.send((kind, outcome))
            if kind == "left":
                return


def _interrupt_when_orphaned() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGINT)


def _perform(task: Task, connection: Connection, device: str, output: Path) -> tuple[str, tuple[str, str]]:
    def watch(record: Record) -> None:
        with contextlib.suppress(OSError):
            connection.send(("heard", record))

    path = output / f"{task.name}.txt"
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if connection.poll():  # the parent can only have sent "no more tasks", before signals were handled
            return "ended", ("interrupted", "")
        output.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file, _claimed(file, task.name):
            task.call(device, watch)
        return "ended", ("done", "")
    except (KeyboardInterrupt, Interrupted):
        return "ended", ("interrupted", "")
    except LabError as error:
        return "ended", ("failed", str(error))
    except Exception as error:
        # Memory may still be allocated, or the device unusable, so the next task gets a new process.
        return "left", ("failed", _explained(error, path))
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _explained(error: Exception, path: Path) -> str:
    if memory.ran_out(error):
        return "out of memory: try fewer --jobs, or a --micro-batch"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'} (full output in {path})"


@contextlib.contextmanager
def _claimed(file: IO[bytes], name: str) -> Iterator[None]:
    """Write the output of the task to the file, and lock the file while the task runs."""
    _lock(file, name)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file.fileno(), stream.fileno())
    try:
        yield
    except LabError:
        raise
    except Exception:
        traceback.print_exc()
        raise
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        fcntl.flock(file, fcntl.LOCK_UN)
        if os.fstat(file.fileno()).st_size == 0:
            with contextlib.suppress(OSError):
                os.unlink(file.name)


def _lock(file: IO[bytes], name: str) -> None:
    """Allow one process at a time to work on a task. If a parent was killed, its worker may still be saving."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > end:
                raise LabError(f"another process is working on {name}: wait for it, or choose another folder") from None
            time.sleep(0.2)
