"""Contenders take turns, round after round, each round in another order.

So other load on the machine affects all of them equally. A ratio is the median over rounds of (contender / baseline in
that round).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kalmannorm.lab.bounds import whole

WARMUP = 2
ROUNDS = whole(5, 10_000)
"""With fewer rounds, median and spread mean little."""

Watch = Callable[[str], None]
"""Called with a description of the current work."""


class Seconds(NamedTuple):
    """Seconds of one call. `processor` counts all threads of this process and does not include other processes."""

    clock: float
    processor: float | None = None
    """None if a GPU does the work."""


def check_rounds(rounds: int) -> None:
    ROUNDS.check("rounds", rounds)


def take_turns(
    timers: Mapping[str, Callable[[], Seconds]], rounds: int, watch: Watch = lambda _: None
) -> dict[str, list[Seconds]]:
    """The seconds of every contender in every round."""
    times: dict[str, list[Seconds]] = {name: [] for name in timers}
    order = list(timers)
    for number in range(-WARMUP, rounds):
        watch("warming up" if number < 0 else f"round {number + 1} of {rounds}")
        turn = number % len(order)
        for name in [*order[turn:], *order[:turn]]:
            seconds = timers[name]()
            if number >= 0:
                times[name].append(seconds)
    return times


def ratios(own: Sequence[Seconds], base: Sequence[Seconds]) -> list[float]:
    """Ratios of wall-clock times, round by round."""
    return [a.clock / b.clock for a, b in zip(own, base, strict=True)]


def processor_ratios(own: Sequence[Seconds], base: Sequence[Seconds]) -> list[float]:
    """Ratios of processor times. Empty if the processor did not do the work."""
    pairs = zip(own, base, strict=True)
    return [a.processor / b.processor for a, b in pairs if a.processor is not None and b.processor]


def spread(name: str, values: Sequence[float], digits: int = 3) -> dict[str, float | None]:
    """Median, 20th and 80th percentile, as three columns."""
    if not values:
        return {name: None, f"{name}_p20": None, f"{name}_p80": None}
    p20, _, _, p80 = statistics.quantiles(values, n=5, method="inclusive")
    three = {name: statistics.median(values), f"{name}_p20": p20, f"{name}_p80": p80}
    return {key: round(value, digits) for key, value in three.items()}
