"""Pickled models of other versions. Missing attributes raise when the model is loaded, not later in a forward.

A pickle of a whole model contains the attributes of all its objects, as the version that wrote it had them. A state
dict contains only tensors and their names, so later versions can read it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from importlib.abc import MetaPathFinder
from typing import Any, NoReturn

REMEDY = (
    "save model.state_dict() with the version that pickled it, and load it into a freshly converted model: "
    "kalmannorm.convert(model, example).load_state_dict(state)"
)


def check_complete(unpickled: object, names: Iterable[str]) -> None:
    """Raise unless the unpickled object has these attributes."""
    _check_none_missing(unpickled, (name for name in names if not hasattr(unpickled, name)))


def _check_none_missing(unpickled: object, missing: Iterable[str]) -> None:
    names = ", ".join(map(repr, sorted(missing)))
    if names:
        raise ValueError(
            f"this pickled {type(unpickled).__name__} has no {names}: another version of kalmannorm pickled it. "
            f"Pickles of whole models are for one version; {REMEDY}"
        )


def check_known(unpickled: object, version: int, known: int) -> None:
    """Raise for a pickle of a newer version."""
    if version > known:
        raise ValueError(
            f"this pickled {type(unpickled).__name__} has version {version}, and this kalmannorm knows versions up to "
            f"{known}: update kalmannorm, or {REMEDY}"
        )


class Complete:
    """Base of dataclasses that are pickled with a model. Unpickling raises if a field is missing."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # Compare with `state`, not with attributes: a default of the class would hide a missing field.
        names = {field.name for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        _check_none_missing(self, names - set(state))


MOVED = frozenset({"baselines", "fused", "graph", "norm", "others", "transition"})
"""Modules of version 0.1.0 with classes that occur in pickled models. They have other names now."""


def refuse_moved(module: str, name: str, moved: frozenset[str]) -> NoReturn:
    """For `__getattr__` of a module from which classes have moved that occur in pickled models."""
    if name in moved:  # pickle would replace the text of an AttributeError
        raise ImportError(
            f"{module}.{name} has moved: another version of kalmannorm pickled this model. "
            f"Pickles of whole models are for one version; {REMEDY}"
        )
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


class _MovedModules(MetaPathFinder):
    """Raises an error with the remedy if an old pickle needs a module that has moved."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        package, _, module = name.partition(".")
        if package == "kalmannorm" and module.split(".")[0] in MOVED:
            raise ModuleNotFoundError(
                f"{name} has moved: another version of kalmannorm pickled this model. "
                f"Pickles of whole models are for one version; {REMEDY}",
                name=name,
            )


sys.meta_path.append(_MovedModules())  # last, so it only gets modules that no other finder found
