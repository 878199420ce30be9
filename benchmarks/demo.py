"""How long `kalmannorm demo` takes on this machine, in a new folder.

    python benchmarks/demo.py      # adds a line to benchmarks/records/demo.jsonl

`seconds` are those of a clock. `processor_seconds` are those that all processes of the demo spent computing, on all
cores together: other programs on the machine change the first number more than the second. `load` is the load average
of a minute, before the demo began and when it had ended.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kalmannorm.lab.origin import origin

RECORD = Path(__file__).parent / "records" / "demo.jsonl"


def main() -> None:
    load, source, start = [round(os.getloadavg()[0], 1)], origin("torchvision"), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kalmannorm", "demo", "--out", folder]
        subprocess.run(command, check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures = {
        "seconds": round(time.perf_counter() - start),
        "processor_seconds": round(used.ru_utime + used.ru_stime),
        "load": [*load, round(os.getloadavg()[0], 1)],
    }
    print(figures)
    with RECORD.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**figures, **source}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
