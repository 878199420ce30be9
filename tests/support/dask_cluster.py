"""A real Dask cluster on loopback: a scheduler and workers in processes of their own, as `dask` starts them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from support.lab_runs import ENVIRONMENT

DASK = str(Path(sys.executable).parent / "dask")
LOCAL = ["--host", "127.0.0.1", "--port", "0"]
QUIET = ["--no-dashboard"]


class LocalCluster:
    """`file` is the scheduler's. Workers are started one by one, and may be killed by their process ids."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "scheduler.json"
        self.workers: list[subprocess.Popen[bytes]] = []
        self.scheduler = self._start("scheduler", *LOCAL, *QUIET, "--scheduler-file", str(self.file))
        end = time.monotonic() + 60
        while not self.file.is_file():
            assert self.scheduler.poll() is None and time.monotonic() < end, "no scheduler"
            time.sleep(0.05)

    def hire(self, *options: str) -> subprocess.Popen[bytes]:
        usual = ["--no-nanny", "--nthreads", "1", *QUIET] if not options else list(options)
        place = ["--scheduler-file", str(self.file), "--host", "127.0.0.1", "--local-directory", str(self.folder)]
        self.workers.append(self._start("worker", *place, *usual))
        return self.workers[-1]

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        # Workers unpickle functions of the tests.
        environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
        with (self.folder / f"{words[0]}-{len(self.workers)}.txt").open("wb") as log:
            return subprocess.Popen([DASK, *words], env=environment, stdout=log, stderr=log, cwd=self.folder)

    def close(self) -> None:
        for process in [*self.workers, self.scheduler]:
            process.kill()
            process.wait()
