"""What a relay remembers: for each thread, and for each stretch of code that may be recomputed."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from kalmannorm._running.postponed_tracking import PostponedTracking
from kalmannorm._support.activation_checkpoints import Segment
from kalmannorm.moments import Moments

Memo = dict[tuple[int | None, bool], dict[int, Any]]
"""Results of the program's steps, for each device, with and without gradients."""


@dataclass
class Scope:
    """Of one stretch of code that is run, and perhaps recomputed, as a whole."""

    memo: Memo = field(default_factory=dict)
    posteriors: dict[int, Moments] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    inner: dict[int, Scope] = field(default_factory=dict)  # of segments inside, in their first forward


@dataclass
class Kept:
    """What a segment keeps for its recomputation; held by torch's own object, so that it lives exactly as long."""

    entering: dict[int, Moments] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    recomputation: tuple[int, Scope] | None = None


class ThreadState(threading.local):
    """One per thread, so that two threads may run one model."""

    def __init__(self) -> None:
        self.depth = 0
        self.whole = False
        self.part: nn.Module | None = None  # what runs: the model, or a part of it that was called by itself
        self.home: Any = None  # the segment that the forward began in
        self.memo: Memo | None = None
        self.traced: Memo | None = None  # the same while compiling, where it may not outlast the graph
        self.posteriors: dict[int, Moments] = {}
        self.counts: dict[int, int] = {}
        self.pending: dict[int, set[int]] = {}
        self.inner: dict[int, Scope] = {}
        self.postponed = PostponedTracking()


def kept_by(segment: Segment, relay: object) -> Kept:
    """Of each relay by itself: parts of several models may run in one segment, and number their steps alike."""
    if not hasattr(segment.key, "_kalmannorm_kept"):
        segment.key._kalmannorm_kept = {}
    kept: Kept = segment.key._kalmannorm_kept.setdefault(relay, Kept())
    return kept
