"""Versions of the files in a run's folder: an older format is upgraded as it is read, a newer one is refused.

0    files without a "format"
1    recipe.json, resume.pt and model.safetensors have one. A checkpoint has the digest of the log, weights have the
     versions of their modules (torch's `_version`), and digests of the files are in manifest.json
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kalmannorm.lab.errors import DamagedError, LabError

FORMAT = 1

Upgrade = Callable[[dict[str, Any]], dict[str, Any]]


def upgraded(record: dict[str, Any], path: Path, upgrades: Sequence[Upgrade] = ()) -> dict[str, Any]:
    """A record of any known format in the present one; `upgrades[n]` makes format n + 1 of format n.

    Without upgrades all known formats are the same but for their number.
    """
    found = record.get("format", 0)
    if type(found) is not int or found < 0:
        raise DamagedError(path, f"its format cannot be {found!r}", "restore it from a copy")
    if found > FORMAT:
        raise LabError(
            f"{path} has format {found}, and this version of kalmannorm reads formats up to {FORMAT}: update kalmannorm"
        )
    for upgrade in upgrades[found:]:
        record = upgrade(record)
    return {**record, "format": FORMAT}
