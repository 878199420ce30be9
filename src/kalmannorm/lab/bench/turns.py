"""Contenders take turns, round after round, each round in another order.

So whatever else the machine does meets all of them alike, and a ratio is the median over rounds of (contender /
baseline in that round).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kalmannorm.lab.bounds import whole

WARMUP = 2
ROUNDS = whole(5, 10_000)
"""Fewer have no median and spread worth the name."""

Watch = Callable[[str], None]
"""Hears what is being done."""


class Seconds(NamedTuple):
    """Of one call. The processor's own are those of all threads: others who use the machine do not add to them."""

    clock: float
    processor: float | None = None
    """None where a GPU does the work."""


def check_rounds(rounds: int) -> None:
    ROUNDS.check("rounds", rounds)


def take_turns(
    timers: Mapping[str, Callable[[], Seconds]], rounds: int, watch: Watch = lambda _: None
) -> dict[str, list[Seconds]]:
    """What every contender took in every round."""
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
    """By the clock, round by round."""
    return [a.clock / b.clock for a, b in zip(own, base, strict=True)]


def processor_ratios(own: Sequence[Seconds], base: Sequence[Seconds]) -> list[float]:
    """By the processor's own time; empty where it did not do the work."""
    pairs = zip(own, base, strict=True)
    return [a.processor / b.processor for a, b in pairs if a.processor is not None and b.processor]


def spread(name: str, values: Sequence[float], digits: int = 3) -> dict[str, float | None]:
    """Median, 20th and 80th percentile, as three columns."""
    if not values:
        return {name: None, f"{name}_p20": None, f"{name}_p80": None}
    p20, _, _, p80 = statistics.quantiles(values, n=5, method="inclusive")
    three = {name: statistics.median(values), f"{name}_p20": p20, f"{name}_p80": p80}
    return {key: round(value, digits) for key, value in three.items()}
