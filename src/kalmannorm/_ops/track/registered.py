"""The update of running statistics as a registered op, for compiled models: `kalmannorm::track`.

A compiled graph holds the name of a model, and norms by number. The op finds the model, and the model finds the buffers
of its norms. So the statistics are no inputs of the graph, and no guard has to check them. The op says that it changes
`ticket`, although it does not: otherwise a compiler would remove an op without results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kalmannorm._names import Names
from kalmannorm._ops.library import register


class Tracker(Protocol):
    def track_norms(
        self,
        moments: Tensor,
        norms: Sequence[int],
        groups: Sequence[int],
        values: Sequence[int],
        examples: Sequence[int],
    ) -> None:
        """Update the statistics of these norms. Their moments (4, G, C) follow one another.

        `values` per channel of x; `examples` of x.
        """


_MODELS: Names[Tracker] = Names()
number_of, find = _MODELS.add, _MODELS.find


def _track(
    ticket: Tensor, moments: Tensor, norms: list[int], groups: list[int], values: list[int], examples: list[int],
    model: str,
) -> None:  # fmt: skip
    find(model).track_norms(moments, norms, groups, values, examples)


def _fake(
    ticket: Tensor, moments: Tensor, norms: list[int], groups: list[int], values: list[int], examples: list[int],
    model: str,
) -> None:  # fmt: skip
    return None


_SCHEMA = (
    "(Tensor(a!) ticket, Tensor moments, int[] norms, SymInt[] groups, SymInt[] values, SymInt[] examples, str model) "
    "-> ()"
)
# A CUDA graph would keep the addresses of buffers. So the op runs outside of it, and finds the buffers of now.
_TAGS = tuple(tag for name, tag in torch.Tag.__members__.items() if name == "cudagraph_unsafe")
register("track", _SCHEMA, _track, _fake, _TAGS)


track: Callable[..., None] = torch.ops.kalmannorm.track
