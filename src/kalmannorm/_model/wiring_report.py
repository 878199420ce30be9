"""The report of `wiring(model)`: a table, a summary, the data and a drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from kalmannorm._model.wiring_drawing import draw
from kalmannorm._running.hooks import Begin
from kalmannorm._running.relay import Relay
from kalmannorm._running.wires import Wire
from kalmannorm._wiring.plan import NEVER_RAN, Plan


@dataclass(frozen=True)
class NormWiring:
    """One norm. `sources` feed it with no norm between. `reason` says why it has no prior, and is None if it has one.

    If a norm runs several times and not all of its calls have a prior, `transition` says how many have one.
    """

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
    """The sources of every norm of a converted model, in the order in which the norms run."""

    model: str
    transition: str
    norms: list[NormWiring]
    notes: list[str] = field(default_factory=list)

    @property
    def summary(self) -> str:
        """One line: how many norms are wired, how many of the others have a norm before them, and any problems."""
        wired = sum(norm.wired for norm in self.norms)
        lost = sum(not norm.wired and bool(norm.sources) for norm in self.norms)
        first = sum(not norm.wired and not norm.sources and norm.calls > 0 for norm in self.norms)
        unseen = sum(norm.calls == 0 for norm in self.norms)
        parts = [f"{wired} of {len(self.norms)} norms of {self.model} are wired ({self.transition})"]
        parts += [f"{first} with no norm before"] if first else []
        parts += [f"{lost} fed by norms but without a prior"] if lost else []
        parts += [f"{unseen} did not run on the example input"] if unseen else []
        return "; ".join([", ".join(parts), *self.notes])

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
        """Write the drawing to a file whose name ends in .svg."""
        if not str(path).endswith(".svg"):
            raise ValueError(f"path must end in .svg, the format of the drawing, got {str(path)!r}")
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.svg())


def report(relays: Sequence[Relay], model: nn.Module) -> Wiring:
    """The report of all converted models that this model is, contains or is a part of.

    Names are those in this model.
    """
    norms: list[NormWiring] = []
    notes: list[str] = []
    for relay in relays:
        names = _names_in(model, relay)
        norms += _norms(relay.plan, names)
        notes += [*relay.plan.failed, *_replaced(model, relay), *_missed(relay.plan, relay, names)]
    transitions = dict.fromkeys(relay.plan.transition for relay in relays)
    return Wiring(type(model).__name__, " and ".join(transitions), norms, notes)


def _names_in(model: nn.Module, relay: Relay) -> dict[str, str]:
    """For the norms of a converted model that are in this model: their names there and here."""
    there = {norm.calls[0].identity: norm.name for norm in relay.plan.norms.values() if norm.calls}
    modules, found, pair = dict(model.named_modules()), dict[str, str](), ("", "")
    for name, module in modules.items():
        wire = getattr(module, "wire", None)
        if isinstance(wire, Wire) and wire.relay is relay:
            pair = there[wire.calls[0]], name
            found[pair[0]] = name
    for norm in relay.plan.norms.values():
        name = _moved(norm.name, *pair)
        if not norm.calls and getattr(modules.get(name), "wire", relay) is None:
            found[norm.name] = name
    return found


def _moved(name: str, old: str, new: str) -> str:
    """The new name of a norm that never ran, and so has no wire. Another norm's name changed from `old` to `new`."""
    if new.endswith(old):
        return new[: len(new) - len(old)] + name
    prefix = old.removesuffix(new)
    return name[len(prefix) :] if name.startswith(prefix) else ""


def _norms(plan: Plan, names: dict[str, str]) -> list[NormWiring]:
    order = sorted(plan.norms.values(), key=lambda norm: norm.calls[0].identity if norm.calls else len(plan.norms))
    inside = set(names.values())
    norms = []
    for norm in order:
        if norm.name not in names:
            continue
        paths = [path for call in norm.calls for path in (call, *call.others)]
        sources = list(dict.fromkeys(source for path in paths for source in path.sources))
        sources = [names.get(name, f"{name} (outside)" if name in inside else name) for name in sources]
        wired = [path for path in paths if path.target is not None]
        reason = None if wired else (norm.calls[0].reason if norm.calls else NEVER_RAN)
        what = "calls" if len(paths) == len(norm.calls) else "paths"
        some = f", {len(wired)} of {len(paths)} {what}" if 0 < len(wired) < len(paths) else ""
        some = some or (f", {len(paths)} paths" if len(paths) > len(norm.calls) else "")
        path = (wired or norm.calls)[0].path if norm.calls else ""
        size, how, calls = wired[0].size if wired else None, plan.transition + some, len(norm.calls)
        norms.append(NormWiring(names[norm.name], norm.channels, sources, path, how, size, reason, calls))
    return norms


def _replaced(model: nn.Module, relay: Relay) -> list[str]:
    """Layers that priors still read, but that are no longer in the model."""
    for prefix, root in model.named_modules():
        hooks = root._forward_pre_hooks.values()
        if any(isinstance(hook, Begin) and hook.relay is relay and hook.whole for hook in hooks):
            return [
                f"{f'{prefix}.{name}'.lstrip('.')!r} was replaced after conversion: call kalmannorm.rewire"
                for name in relay.replaced(root)
            ]
    return []


def _missed(plan: Plan, relay: Relay, names: dict[str, str]) -> list[str]:
    """Norms that ran without norms that feed them in every example."""
    of = {call.identity: names.get(norm.name, norm.name) for norm in plan.norms.values() for call in norm.calls}
    missed: dict[str, dict[str, None]] = {}
    for call, absent in relay.missed.items():
        if call not in of:  # one of several paths
            continue
        missed.setdefault(of[call], {}).update(dict.fromkeys(of[norm] for norm in absent))
    return [
        f"{name!r} once ran without {', '.join(map(repr, absent))} and used the batch alone"
        for name, absent in missed.items()
    ]
