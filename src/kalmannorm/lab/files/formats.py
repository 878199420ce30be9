"""Format versions of the files in a run's folder. Older formats are upgraded on reading, newer ones are refused.

0    files without a "format"
1    recipe.json, resume.pt and model.safetensors have a "format". A checkpoint has the digest of the log. Weights have
     the versions of their modules (torch's `_version`). Digests of the files are in manifest.json
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kalmannorm.lab.errors import DamagedError, LabError

FORMAT = 1

Upgrade = Callable[[dict[str, Any]], dict[str, Any]]


def upgraded(record: dict[str, Any], path: Path, upgrades: Sequence[Upgrade] = ()) -> dict[str, Any]:
    """Upgrade a record of any known format to the current one. `upgrades[n]` turns format n into format n + 1.

    Without upgrades all known formats differ only in their number.
    """
    found = record.get("format", 0)
    if type(found) is not int or found < 0:
        raise DamagedError(path, f"its format cannot be {found!r}", "restore it from a copy")
    if found > FORMAT:
        raise LabError(
            f"{path} has format {found}, but this version of kalmannorm reads formats up to {FORMAT}: update kalmannorm"
        )
    for upgrade in upgrades[found:]:
        record = upgrade(record)
    return {**record, "format": FORMAT}
