#!/usr/bin/env python3
"""Stands in for Slurm's srun on one machine: starts the tasks of a job, each with the variables that Slurm documents.

Like srun, it passes signals on to the tasks, and ends with the highest of their exit statuses. Its own process id is in
the file $SRUN_PID.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


def main() -> int:
    count, each = int(os.environ["SLURM_NTASKS"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
    tasks = []
    signal.signal(signal.SIGTERM, lambda number, _: [task.send_signal(number) for task in tasks])
    for rank in range(count):
        place = {"PROCID": rank, "LOCALID": rank % each, "NODEID": rank // each, "STEP_ID": 0}
        own = {f"SLURM_{name}": str(value) for name, value in place.items()}
        tasks.append(subprocess.Popen(sys.argv[1:], env=os.environ | own))
    Path(os.environ["SRUN_PID"]).write_text(str(os.getpid()))
    return max(task.wait() for task in tasks)


if __name__ == "__main__":
    sys.exit(main())
