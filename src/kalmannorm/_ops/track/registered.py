"""The update of running statistics as registered ops, for compiled models: `kalmannorm::track`, `kalmannorm::joined`.

A compiled graph holds the name of a model, and norms by number. The op finds the model, and the model finds the buffers
of its norms. So the statistics are no inputs of the graph, and no guard has to check them. The op says that it changes
`ticket`, although it does not: otherwise a compiler would remove an op without results.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kalmannorm._names import Names
from kalmannorm._ops.library import register


class Tracker(Protocol):
    def track_norms(self, moments: Tensor, norms: Sequence[int], batches: Sequence[tuple[int, ...]]) -> None:
        """Update the statistics of these norms. Their moments (4, G, C) follow one another.

        `batches`: for each norm m or 0, and the shape of x.
        """


_MODELS: Names[Tracker] = Names()
number_of, find = _MODELS.add, _MODELS.find


def _track(
    ticket: Tensor, moments: Tensor, norms: list[int], lengths: list[int], numbers: list[int], model: str
) -> None:
    rest = iter(numbers)
    find(model).track_norms(moments, norms, [tuple(itertools.islice(rest, length)) for length in lengths])


def _fake(
    ticket: Tensor, moments: Tensor, norms: list[int], lengths: list[int], numbers: list[int], model: str
) -> None:
    return None


_SCHEMA = "(Tensor(a!) ticket, Tensor moments, int[] norms, int[] lengths, SymInt[] numbers, str model) -> ()"
# A CUDA graph would keep the addresses of buffers. So the op runs outside of it, and finds the buffers of now.
_TAGS = tuple(tag for name, tag in torch.Tag.__members__.items() if name == "cudagraph_unsafe")
register("track", _SCHEMA, _track, _fake, _TAGS)


def _joined(moments: list[Tensor]) -> Tensor:
    return torch.cat(moments)


def _fake_joined(moments: list[Tensor]) -> Tensor:
    return moments[0].new_empty(sum(each.shape[0] for each in moments))


register("joined", "(Tensor[] moments) -> Tensor", _joined, _fake_joined)


joined: Callable[[list[Tensor]], Tensor] = torch.ops.kalmannorm.joined
"""The moments of several norms as one tensor. One kernel copies them; inductor makes a kernel for each from a `cat`."""
track: Callable[..., None] = torch.ops.kalmannorm.track
"""`numbers`: the batches of `Tracker.track_norms` one after the other, each of a length."""
