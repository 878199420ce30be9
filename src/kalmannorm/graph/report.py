"""The report behind `wiring(model)`: a table, a line, the data, and a drawing."""

from __future__ import annotations

from dataclasses import dataclass

from kalmannorm.graph.drawing import draw
from kalmannorm.graph.plan import NEVER_RAN, Plan


@dataclass(frozen=True)
class NormWiring:
    """One norm. `sources` feed it with no norm between; `reason` says why it has no prior, None where it has one."""

    name: str
    channels: int
    sources: list[str]
    path: str
    transition: str
    prior_features: int | None
    reason: str | None
    calls: int

    @property
    def wired(self) -> bool:
        return self.reason is None


@dataclass(frozen=True)
class Wiring:
    """What feeds every norm of a converted model, in the order they run."""

    model: str
    transition: str
    norms: list[NormWiring]

    @property
    def summary(self) -> str:
        """One line: how many norms are wired, and of those that are not, how many have a norm before them."""
        wired = sum(norm.wired for norm in self.norms)
        lost = sum(not norm.wired and bool(norm.sources) for norm in self.norms)
        first = sum(not norm.wired and not norm.sources and norm.calls > 0 for norm in self.norms)
        unseen = sum(norm.calls == 0 for norm in self.norms)
        parts = [f"{wired} of {len(self.norms)} norms of {self.model} are wired ({self.transition})"]
        parts += [f"{first} with no norm before"] if first else []
        parts += [f"{lost} fed by norms but without a prior"] if lost else []
        parts += [f"{unseen} never ran in the example"] if unseen else []
        return ", ".join(parts)

    def __str__(self) -> str:
        rows = [("norm", "channels", "sources", "path", "transition")]
        for norm in self.norms:
            shown = norm.sources if len(norm.sources) <= 3 else [*norm.sources[:2], f"… {len(norm.sources)} in all"]
            how = norm.transition if norm.wired else f"no prior: {norm.reason}"
            times = f" (×{norm.calls})" if norm.calls > 1 else ""
            rows.append((norm.name + times, str(norm.channels), ", ".join(shown) or "–", norm.path, how))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]) for row in rows]
        lines.insert(1, "-" * min(max(map(len, lines)), 120))
        return "\n".join([*lines, "", self.summary])

    def svg(self) -> str:
        """The graph of the norms as an SVG document."""
        return draw(self.model, self.summary, [(n.name, n.channels, n.sources, n.reason) for n in self.norms])

    def _repr_svg_(self) -> str:
        return self.svg()

    def save(self, path: str) -> None:
        """Write the drawing to a file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.svg())


def report(plan: Plan, model: str) -> Wiring:
    order = sorted(plan.norms.values(), key=lambda norm: norm.calls[0].identity if norm.calls else len(plan.norms))
    norms = []
    for norm in order:
        sources = list(dict.fromkeys(source for call in norm.calls for source in call.sources))
        wired = [call for call in norm.calls if call.target is not None]
        reason = None if wired else (norm.calls[0].reason if norm.calls else NEVER_RAN)
        if wired and len(wired) < len(norm.calls):
            reason = None
        path = (wired or norm.calls)[0].path if norm.calls else ""
        size = wired[0].size if wired else None
        norms.append(
            NormWiring(norm.name, norm.channels, sources, path, plan.transition, size, reason, len(norm.calls))
        )
    return Wiring(model, plan.transition, norms)
