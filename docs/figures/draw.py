"""Draws the figures of the README and the site, as `NAME-light.svg` and `NAME-dark.svg`: `make figures`.

Nothing is trained here: `measure.py` makes the records. Every number is read from them or from the library.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import accuracy
import decision
import inference
import life
import mechanism
import sigma
from look import DARK, HERE, LIGHT, ROOT, digest
from matplotlib import pyplot as plt

PICTURES = {
    "mechanism": mechanism,
    "sigma": sigma,
    "accuracy": accuracy,
    "inference": inference,
    "life": life,
    "decision": decision,
}


def sources(picture: ModuleType) -> tuple[str, ...]:
    """Files that decide what the picture shows: its records, and the module that draws it."""
    assert picture.__file__ is not None
    return (*picture.RECORDS, str(Path(picture.__file__).resolve().relative_to(ROOT)))


def main(folder: Path = HERE, names: tuple[str, ...] = tuple(PICTURES)) -> None:
    for name in names:
        picture = PICTURES[name]
        for theme in (LIGHT, DARK):
            figure = picture.draw(theme)
            metadata = {"Date": None, "Description": f"sources {digest(sources(picture))}"}
            figure.savefig(folder / f"{name}-{theme.name}.svg", transparent=True, metadata=metadata)
            plt.close(figure)


if __name__ == "__main__":
    main()
