"""Digests of the files in a folder. They reveal a flipped bit, a lost sector or a partial copy when a file is read.

    FOLDER/manifest.json    {"format": 1, "files": {"model.safetensors": {"bytes": …, "sha256": …}, …}, "sha256": …}

The last digest covers the other entries. It distinguishes damage to the manifest from damage to a file.

All results of a run are in recipe.json, log.jsonl, result.json and the weights. These files have digests: the recipe
from the start, the others from the end of the run. Both files of every checkpoint have digests, too. Each checkpoint
also holds the digest of the log so far, which is verified when the run is resumed. Until then the report reads the log
of an unfinished run without verification. The other files have no digest: evaluation.json and analysis/ can be measured
again, and no number is read from wiring.svg and tensorboard/.

A folder without a manifest is read without verification. Runs of format 0 have none. A user who changed a file on
purpose can delete the manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kalmannorm.lab.errors import DamagedError
from kalmannorm.lab.files.formats import FORMAT, upgraded

NAME = "manifest.json"
UNVERIFIED = "delete it to read the files beside it unverified"

Entry = dict[str, Any]
"""{"bytes": …, "sha256": …} of a file."""


def entry(content: bytes) -> Entry:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def written(files: Mapping[str, Entry]) -> bytes:
    """The manifest of these files."""
    return sealed({"format": FORMAT, "files": dict(files)})


def sealed(record: dict[str, Any]) -> bytes:
    """A record with its own digest."""
    return (json.dumps({**record, "sha256": _digest(record)}, indent=1) + "\n").encode()


def entries(folder: Path) -> dict[str, Entry]:
    """The entries in the manifest of a folder, by file name; empty if there is no manifest."""
    path = folder / NAME
    try:
        record = json.loads(path.read_bytes())
        intact = record.pop("sha256") == _digest(record)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError, AttributeError, TypeError, KeyError):
        intact = False
    if not intact:
        raise DamagedError(path, "its own sha256 differs", UNVERIFIED)
    files = upgraded(record, path).get("files")
    if not isinstance(files, dict) or not all(map(_is_entry, files.values())):
        raise DamagedError(path, "its entries are not sizes and digests", UNVERIFIED)
    return files


def _is_entry(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    size, digest = value.get("bytes"), value.get("sha256", 0)
    return type(size) is int and (digest is None or isinstance(digest, str))


def verified(folder: Path, name: str, remedy: str | None = None) -> bytes:
    """The content of a file, verified if the manifest has an entry for it. An error about damage ends with `remedy`."""
    path = folder / name
    known = entries(folder).get(name)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DamagedError(path, error.strerror or str(error), remedy or "restore it from a copy") from error
    difference = "" if known is None else differs(content, known)
    if difference:
        accept = f"restore it from a copy, or delete {folder / NAME} to accept it as it is"
        raise DamagedError(path, difference, remedy or accept)
    return content


def differs(content: bytes, known: Entry) -> str:
    """How the content differs from its entry, in words; "" if it does not. An entry may have a size and no digest."""
    if len(content) != known["bytes"]:
        return f"it has {len(content)} bytes instead of {known['bytes']}"
    if known["sha256"] not in (None, hashlib.sha256(content).hexdigest()):
        return "its sha256 differs from the recorded one"
    return ""


def _digest(record: Any) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
