"""Digests of the files in a folder: a flipped bit, a lost sector or a half copy is found when a file is read.

    FOLDER/manifest.json    {"format": 1, "files": {"model.safetensors": {"bytes": …, "sha256": …}, …}, "sha256": …}

The last digest is that of the other entries, so that damage to the manifest itself is not taken for damage to a file.

Every number that a run is judged by is in its recipe.json, its log.jsonl, its result.json or its weights, so these have
digests: the recipe from the start, the others from the end of the run on, and both files of every checkpoint. Each
checkpoint holds the digest of the log up to it, which is verified when the run is resumed; until then the report reads
the log of an unfinished run as it is. The other files have none: evaluation.json and analysis/ can be measured again,
and wiring.svg and tensorboard/ are pictures that no number is read from.

A folder without a manifest is read as it is: so are runs of format 0, and so may a user have a file that was changed on
purpose, by deleting the manifest.
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
    """What the manifest of a folder holds, by the names of the files; nothing where there is none."""
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
        raise DamagedError(path, "its files are no sizes and digests", UNVERIFIED)
    return files


def _is_entry(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    size, digest = value.get("bytes"), value.get("sha256", 0)
    return type(size) is int and (digest is None or isinstance(digest, str))


def verified(folder: Path, name: str, remedy: str | None = None) -> bytes:
    """The content of a file: the one that was written, as far as the manifest knows; `remedy` is what to do else."""
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
    """How a content is not what an entry says, in words; "" where it is. An entry without a digest has a size alone."""
    if len(content) != known["bytes"]:
        return f"it has {len(content)} bytes, and {known['bytes']} were written"
    if known["sha256"] not in (None, hashlib.sha256(content).hexdigest()):
        return "its sha256 is not that of what was written"
    return ""


def _digest(record: Any) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
