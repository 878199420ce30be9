"""Modules that a relay knows of and does not keep: the model keeps them, and the relay is a part of the model.

So a deleted model is freed at once. Copies and pickles follow such a reference, as they would any other.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

from torch import nn


class Weakly:
    """A module, which somebody else keeps."""

    def __init__(self, module: nn.Module | None) -> None:
        self._reference = None if module is None else weakref.ref(module)

    def module(self) -> nn.Module | None:
        """None where it is gone."""
        return None if self._reference is None else self._reference()

    def there(self) -> Any:
        """The module, which must be there."""
        found = self.module()
        if found is None:
            raise RuntimeError(
                "kalmannorm: a prior reads a layer that was deleted with the model it was in; keep that model, or "
                "convert this part of it by itself"
            )
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Weakly:
        return Weakly(copy.deepcopy(self.module(), memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return Weakly, (self.module(),)
