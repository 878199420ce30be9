"""The statistics batch of each norm of a model, from one number or from a dict with a number for each part."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from torch import nn

from kalmannorm._support.checks import positive_int

Key = str | type[nn.Module]
StatisticsBatch = int | None | Mapping[Key, int | None]
"""m of all norms, or m by part. A key is the name of a module, a class of modules, or "" for all other norms."""

_Rank = tuple[int, int, int]
"""Of two keys for a norm, that with the larger rank counts."""
_DEFAULT: _Rank = (0, 0, 0)


def check_statistics_batch(given: StatisticsBatch) -> list[int | None]:
    """The numbers in `given`. Raises if one of them is no positive int."""
    if not isinstance(given, Mapping):
        return [None if given is None else positive_int("statistics_batch_size", given)]
    return [
        None if size is None else positive_int(f"statistics_batch_size[{_shown(key)}]", size)
        for key, size in given.items()
    ]


def statistics_batches(
    model: nn.Module, norms: Mapping[str, nn.Module], given: StatisticsBatch
) -> dict[str, int | None]:
    """m of each of these norms of the model, by its name.

    The most specific key counts: a longer name before a shorter one, a name before a class, an inner module before an
    outer one, and a class before its bases.
    """
    if not isinstance(given, Mapping):
        return dict.fromkeys(norms, given)
    names = {id(norm): name for name, norm in norms.items()}
    chosen: dict[str, tuple[_Rank, int | None]] = dict.fromkeys(norms, (_DEFAULT, given.get("")))
    unknown = list[Key]()
    for key, size in given.items():
        found = [(rank, names[id(part)]) for rank, module in _modules(model, key) for part in module.modules()
                 if id(part) in names]  # fmt: skip
        if not found:
            unknown.append(key)
        for rank, name in found:
            if rank > chosen[name][0]:
                chosen[name] = rank, size
    if unknown:
        raise ValueError(_unknown(model, unknown, norms))
    return {name: size for name, (_, size) in chosen.items()}


def _modules(model: nn.Module, key: Key) -> Iterator[tuple[_Rank, nn.Module]]:
    """The modules that a key stands for."""
    if key == "":
        yield _DEFAULT, model
        return
    for name, module in model.named_modules(remove_duplicate=False):
        depth = name.count(".") + 1 if name else 0
        if name == key:
            yield (2, depth, 0), module
        elif key in type(module).__mro__:
            yield (1, depth, -type(module).__mro__.index(key)), module


def _unknown(model: nn.Module, keys: list[Key], norms: Mapping[str, nn.Module]) -> str:
    every = {".".join(parts[:n]) for name in norms for parts in [name.split(".")] for n in range(1, len(parts) + 1)}
    close = [match for key in keys for match in difflib.get_close_matches(str(key), sorted(every), 1)]
    meant = f"did you mean {', '.join(map(repr, close))}? " if close else ""
    return (
        f"statistics_batch_size has keys without a norm in {type(model).__name__}: {', '.join(map(_shown, keys))}; "
        f"{meant}a key must be the name or the class of a norm or of a module with norms, or '' for all others"
    )


def _shown(key: object) -> str:
    return key.__qualname__ if isinstance(key, type) else repr(key)
