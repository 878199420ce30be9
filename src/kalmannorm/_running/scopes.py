"""The state of a relay, for each thread and for each segment that may be recomputed."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from kalmannorm._running.compiled_way import Left
from kalmannorm._running.postponed_tracking import PostponedTracking
from kalmannorm._running.short_way import Repeated, ShortForward
from kalmannorm._support.activation_checkpoints import Segment
from kalmannorm.moments import Moments

Memo = dict[tuple[int | None, bool], dict[int, Any]]
"""Results of the program's steps, for each device, with and without gradients."""


@dataclass
class Scope:
    """The state of one segment, which is run and perhaps recomputed as a whole."""

    memo: Memo = field(default_factory=dict)
    posteriors: dict[int, Moments | Tensor] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    inner: dict[int, Scope] = field(default_factory=dict)  # scopes of segments inside, in their first forward
    repeated: set[int] = field(default_factory=set)  # in a recomputation: calls that ran again on the short way


@dataclass
class Kept:
    """The state that a segment keeps for its recomputation.

    Torch's frame object holds it, so both have the same lifetime.
    """

    entering: dict[int, Moments] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    rows: dict[tuple[int, bool], Tensor] = field(default_factory=dict)  # by call, with or without gradients
    repeated: dict[int, Repeated | None] = field(default_factory=dict)  # by call: its first run, None if it was long
    paths: dict[int, int] = field(default_factory=dict)  # by call: the path taken, if not the first; -1 for none
    recomputation: tuple[int, Scope] | None = None


class ThreadState(threading.local):
    """The state of one thread, so that two threads can run one model."""

    def __init__(self) -> None:
        self.depth = 0
        self.whole = False
        self.part: nn.Module | None = None  # the running module: the model, or a part that was called by itself
        self.home: Any = None  # the segment in which the forward began
        self.memo: Memo | None = None
        self.traced: Memo | None = None  # the memo while compiling; it must not outlive the graph
        self.left: Left | None = None  # updates of statistics that a compiled forward leaves to the hook at its end
        self.posteriors: dict[int, Moments | Tensor] = {}  # one tensor (2, G, C) on the short way
        self.counts: dict[int, int] = {}
        self.ran: dict[int, int] = {}  # first calls of the norms that ran in this forward, in this order
        self.pending: dict[int, set[int]] = {}
        self.inner: dict[int, Scope] = {}
        self.postponed = PostponedTracking()
        self.short: ShortForward | None = None  # the short way of the running forward


def kept_by(segment: Segment, relay: object) -> Kept:
    """The state that a segment keeps for one relay. Parts of several models, with equal step numbers, may run in it."""
    if not hasattr(segment.key, "_kalmannorm_kept"):
        segment.key._kalmannorm_kept = {}
    kept: Kept = segment.key._kalmannorm_kept.setdefault(relay, Kept())
    return kept
