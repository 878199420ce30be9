"""How docs/results.md writes numbers: means with their spread, differences with their interval, sentences that hold."""

from __future__ import annotations

import math
import re
import statistics
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats

Row = dict[str, Any]
Scores = Mapping[int, float]
"""Accuracies in %, by seed."""
MINUS = "−"


def mean(scores: Scores) -> float:
    return statistics.fmean(scores.values())


def spread(scores: Scores) -> str:
    """Mean ± standard deviation over seeds. One seed has no spread."""
    if len(scores) < 2:
        return f"{mean(scores):.1f}"
    return f"{mean(scores):.1f} ± {statistics.stdev(scores.values()):.1f}"


@dataclass(frozen=True)
class Difference:
    """Of two methods, in points: the mean over the seeds that both have, and half of its 95 % interval."""

    points: float
    half: float | None
    """Student's t, from 3 seeds on. With fewer it would say nothing."""

    @property
    def above(self) -> bool:
        """Whether the whole interval is above 0."""
        return self.half is not None and self.points > self.half

    @property
    def below(self) -> bool:
        return self.half is not None and -self.points > self.half

    @property
    def open(self) -> bool:
        """Whether 0 is in the interval."""
        return self.half is not None and abs(self.points) <= self.half

    def shown(self, digits: int = 1) -> str:
        return signed(self.points, digits) + ("" if self.half is None else f" ± {self.half:.{digits}f}")

    def size(self, digits: int = 1) -> str:
        """Without the sign, for sentences that say above or below."""
        return self.shown(digits).lstrip(f"+{MINUS}")


def difference(scores: Scores, base: Scores) -> Difference:
    """`scores` minus `base`, by seed."""
    found = [scores[seed] - base[seed] for seed in scores if seed in base]
    if len(found) < 3:
        return Difference(statistics.fmean(found), None)
    quantile = float(stats.t.ppf(0.975, len(found) - 1))
    return Difference(statistics.fmean(found), quantile * statistics.stdev(found) / len(found) ** 0.5)


def compared(what: str, found: Difference, other: str, digits: int = 2) -> str:
    """`what` beside `other`, as the interval says. `found` is `what` minus `other`."""
    if found.above or found.below:
        return f"{what} is {found.size(digits)} points {'above' if found.above else 'below'} {other}"
    if found.half is None:
        return f"{what} has {found.shown(digits)} points against {other}, with too few seeds for an interval"
    return f"{what} cannot be told from {other} ({found.shown(digits)} points)"


def signed(points: float, digits: int = 1) -> str:
    text = f"{abs(points):.{digits}f}"
    return text if not float(text) else ("+" if points > 0 else MINUS) + text


def standard_error(accuracy: float, images: int) -> float:
    """Of one accuracy in %, from the number of images alone."""
    share = accuracy / 100
    return 100 * math.sqrt(share * (1 - share) / images)


def said(text: str, *holds: bool) -> str:
    """The sentence, if all of its conditions hold."""
    if not all(holds):
        sys.exit(f"the records no longer support this sentence of docs/results.md, so change it: {text}")
    return text


def paragraph(text: str, indent: str = "") -> str:
    """Wrapped lines, and none that ends within `m = 2`."""
    kept = re.sub(r"\bm = (?=\d)", "m\0=\0", text)
    lines = textwrap.fill(kept, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\0", " ") + "\n"


def bullets(sentences: Iterable[str]) -> str:
    return "".join(paragraph(f"- {text}", "  ") for text in sentences)


def origin(rows: Sequence[Row], record: str, commands: Iterable[str] = ()) -> str:
    """Hardware, versions, commits, commands and the record of some rows."""
    machines = dict.fromkeys(row["hardware"].replace("x86_64", "64-bit x86") for row in rows)
    torches = dict.fromkeys(row["torch"].split("+")[0] for row in rows)
    commits = dict.fromkeys(row["commit"][:7] for row in rows)
    told = list(dict.fromkeys(commands)) or list(dict.fromkeys(row["command"] for row in rows))
    shown = " and ".join(f"`{command}`" for command in told)
    words = f"{'; '.join(machines)}; torch {', '.join(torches)}; commit {', '.join(commits)}; {shown}"
    return paragraph(f"{words} ({link(record)}).")


def link(record: str) -> str:
    """From a page in docs/ to a record."""
    return f"[records]({record.removeprefix('docs/') if record.startswith('docs/') else f'../{record}'})"
