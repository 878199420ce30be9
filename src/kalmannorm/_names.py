"""Names by which compiled code refers to objects of this process."""

from __future__ import annotations

import itertools
import weakref
from typing import Generic, TypeVar

Kind = TypeVar("Kind")


class Names(Generic[Kind]):
    """Objects that compiled graphs refer to by name. A name is a string: compilers may treat integers as variables."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.known: weakref.WeakValueDictionary[str, Kind] = weakref.WeakValueDictionary()

    def add(self, named: Kind) -> str:
        """Give it a name. It is not kept alive."""
        name = str(next(self.numbers))
        self.known[name] = named
        return name

    def find(self, name: str) -> Kind:
        found = self.known.get(name)
        if found is None:
            raise RuntimeError(
                "kalmannorm: this compiled code belongs to a model that was deleted; compile the model again"
            )
        return found
