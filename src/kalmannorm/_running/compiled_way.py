"""The way through a training step that `torch.compile` traces: registered ops instead of many small ones.

The rows of a bundle are one op, a norm is one op, and the updates of running statistics are one op when the forward
ends. The hooks of a compiled model are no part of its graph. So the graph returns the moments of all norms as one
tensor, and a CUDA graph of it contains no update.

What decides between this way and the long one is read from the norm while it is traced, so that compiled code is
checked by its guards. `place_of` prepares the bundles while a model is traced. Its result is a constant of the graph.

If the first norm of the model was not traced, as in a model that is compiled block by block, nothing is shared, and
every norm takes the long way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kalmannorm._groups import group_count, group_size, statistics_dtype
from kalmannorm._ops.propagate.registered import CompiledBundle, bundle_rows
from kalmannorm._ops.track.registered import find, joined, track
from kalmannorm._running.bundling import Source
from kalmannorm._running.prior_bundles import PriorBundles, runner
from kalmannorm._running.tracking_together import Update, track_together
from kalmannorm._support.compiling import TRACED
from kalmannorm._wiring.program import Context
from kalmannorm._wiring.weak_modules import WeakModule
from kalmannorm.moments import Moments

Left = tuple[int, Tensor, list[int], list[tuple[int, ...]]]
"""Updates of statistics that are still to be made: their place in `Relay.compiled`, and as in `Tracker.track_norms`."""


Path = tuple[str, ...]
"""The names of a module and of those around it, from the model on."""


class CompiledPart(NamedTuple):
    """A bundle as compiled code reads it, a constant."""

    number: str
    calls: tuple[int, ...]
    steps: tuple[int, ...]
    given: tuple[int, ...]


Collector = Callable[[nn.Module, dict[int, Any]], list[Tensor]]
"""Collects the tensors of a bundle, from the model and the results of steps.

Compiled code finds the modules from the model, as the forward does. If it found them in another way, it would have to
check in every call that both ways lead to the same objects.
"""


def collector_of(sources: Sequence[tuple[Path | None, str, int, int]]) -> Collector:
    """Each source is the path of a module and a name, or else a step and 0 for its mean or 1 for its variance.

    The function is generated. It has no loops, because a tracer needs much longer for them, and finds each module once.
    """
    lines, names = list[str](), dict[Path, str]({(): "root"})

    def module(path: Path) -> str:
        if path not in names:
            parent = module(path[:-1])
            names[path] = f"m{len(names)}"
            lines.append(f"    {names[path]} = {parent}._modules[{path[-1]!r}]")
        return names[path]

    found = [
        f"results[{step}][{piece}]" if path is None else f"{module(path)}.{attribute}"
        for path, attribute, step, piece in sources
    ]
    source = "\n".join(["def collect(root, results):", *lines, f"    return [{', '.join(found)}]"])
    defined: dict[str, Any] = {}
    exec(compile(source, "<kalmannorm.compiled>", "exec"), defined)
    collect: Collector = defined["collect"]
    return collect


class CompiledModel(NamedTuple):
    """The bundles of a model on one device, with priors of one dtype."""

    parts: tuple[CompiledPart, ...]
    collectors: tuple[Collector, ...]
    ticket: Tensor
    bundles: tuple[CompiledBundle, ...]  # keeps them alive


def place_of(model: str, device: torch.device, dtype: torch.dtype) -> int:
    """Prepare the bundles of a model on a device, for x of this dtype. Their place in `Relay.compiled`.

    -1 if there are none.
    """
    if _exported():
        return -1
    relay: Any = find(model)
    place: int = relay.place_of_compiled(device, torch.float64 if dtype == torch.float64 else torch.float32)
    return place


def site_of(relay: Any, call: int, device: torch.device, dtype: torch.dtype) -> tuple[Key, int] | None:
    """The block in which the rows for this call are, and their place among its rows. None if there are none."""
    place = place_of(relay.number, device, dtype)
    parts = relay.compiled[place].parts if place >= 0 else ()
    for number, part in enumerate(parts):
        if call in part.calls:
            return (relay.number, place, number, torch.is_grad_enabled()), part.calls.index(call)
    return None


def listed(model: str, place: int, number: int) -> tuple[Any, ...]:
    """A part as a tuple of tuples, and m of its norms: all that occur, and the place of each norm's among them."""
    relay: Any = find(model)
    part: CompiledPart = relay.compiled[place].parts[number]
    sizes = sizes_of(model, part.calls)
    distinct = tuple(sorted(set(sizes)))
    return *part, distinct, tuple(map(distinct.index, sizes))


def part_with(model: str, place: int, step: int) -> int:
    """The place of the bundle that computes a step, or -1."""
    relay: Any = find(model)
    compiled: CompiledModel = relay.compiled[place]
    return next((number for number, part in enumerate(compiled.parts) if step in part.steps), -1)


def sizes_of(model: str, calls: tuple[int, ...]) -> tuple[int, ...]:
    """m of the norms with these calls, 0 for the whole batch, and -1 for one group.

    A norm compares its own m with it when it is traced, so that the guards of compiled code check it.
    """
    relay: Any = find(model)
    norms = [relay.norms[call].module() for call in calls]
    trains = [norm is not None and norm.training and not norm.frozen for norm in norms]
    return tuple((norm.statistics_batch_size or 0) if train else -1 for norm, train in zip(norms, trains, strict=True))


# `torch.compiler.assume_constant_result` sets the same attribute, but imports the compiler.
for _constant in (place_of, listed, part_with):
    _constant._dynamo_marked_constant = True  # type: ignore[union-attr]


def _exported() -> bool:
    """Whether the model is traced for `torch.export`, not for `torch.compile`."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    flag = getattr(torch.compiler, "_is_exporting_flag", False)  # torch 2.7 and later
    return flag or bool(InstructionTranslator.current_tx().export)


def prepared(bundles: PriorBundles, model: nn.Module | None, context: Context) -> CompiledModel:
    """The bundles of a model for compiled code: none if one of them cannot be used."""
    parts, collectors, compiled = list[CompiledPart](), list[Collector](), list[CompiledBundle]()
    named = () if model is None else model.named_modules()
    paths: dict[int, Path] = {id(module): tuple(name.split(".")) if name else () for name, module in named}
    with torch.no_grad():
        for part, tensors in bundles.tensors_of_parts(context) or ():
            sources = tuple((_path(source, paths), source.name, source.step, source.part) for source in part.sources)
            if any(path is None and step < 0 for path, _, step, _ in sources):
                parts, collectors, compiled = [], [], []
                break
            bundle = CompiledBundle(part.bundle, runner(part.bundle, context, tensors), context.dtype, tensors)
            calls = tuple(call.identity for call in part.calls)
            parts.append(CompiledPart(bundle.number, calls, tuple(part.steps), tuple(part.given)))
            collectors.append(collector_of(sources))
            compiled.append(bundle)
    ticket = torch.zeros((), device=context.device)
    torch._dynamo.mark_static_address(ticket)
    return CompiledModel(tuple(parts), tuple(collectors), ticket, tuple(compiled))


def _path(source: Source, paths: dict[int, Path]) -> Path | None:
    """The module in which a tensor is stored. None if it is no tensor of a module of the model, or is computed."""
    module = None if source.owner is None else source.owner.module()
    stored = module is not None and (source.name in module._parameters or source.name in module._buffers)
    return paths.get(id(module)) if stored else None


Key = tuple[str, int, int, bool]
"""Model, place of its bundles, place of a bundle among them, with or without gradients."""
Batch = tuple[int, ...]
"""m or 0, and the shape of x."""
Block = tuple[int, Sequence[Tensor], dict[int, Tensor], dict[int, Batch]]
"""The number of examples, the rows of norms; and by call moments that are still to be tracked, and their batches."""


class CompiledForward:
    """One traced forward: results of bundles, and moments of norms that are still to be tracked."""

    def __init__(self, relay: Any) -> None:
        self.relay, self.model = relay, relay.number
        self.results: dict[Any, dict[int, Any]] = {}
        self.untracked: dict[int, tuple[dict[int, Tensor], dict[int, Batch]]] = {}  # by place, as in `Block`
        self.ran: dict[int, int] = {}  # as in `ThreadState`

    def note(self, call: int) -> None:
        self.ran[call] = len(self.ran)

    def fill(self, key: Key, x: Tensor) -> Block:
        """Make the rows of a bundle."""
        self._fill(key, Context(x.device, statistics_dtype(x), {}, x.shape[0]))
        block: Block = TRACED.blocks[key]
        return block

    def _fill(self, key: Key, context: Context) -> None:
        model, place, number, gradients = key
        kind = place, gradients
        if kind not in self.results:
            self.results[kind] = {}
        results = self.results[kind]
        bundle, calls, steps, given, sizes, which = listed(model, place, number)
        for step in given:
            if step not in results:
                earlier = part_with(model, place, step)
                if earlier >= 0:
                    self._fill((model, place, earlier, gradients), context)
            self.relay.program.evaluate(step, context, results)
        tensors = self.relay.compiled[place].collectors[number](self.relay.state.part, results)
        counts = [1 if m < 0 else group_count(context.examples, group_size(context.examples, m)) for m in sizes]
        found = bundle_rows(tensors, [counts[i] for i in which], bundle)
        TRACED.blocks[key] = context.examples, found[: len(calls)], *self._waiting(place)
        for i, step in enumerate(steps):
            results[step] = Moments(found[len(calls) + i], found[len(calls) + len(steps) + i])

    def postpone(self, call: int, moments: Tensor, size: int, x: Tensor) -> bool:
        """Postpone an update of statistics to the end of the forward. False: there is no model for it.

        `moments` are (4, G, C), in one dimension.
        """
        place = place_of(self.model, x.device, x.dtype)
        if place < 0:
            return False
        untracked, batches = self._waiting(place)
        if call in untracked:  # the norm runs again
            self.track()
        untracked[call] = moments
        batches[call] = (size, *x.shape)
        return True

    def _waiting(self, place: int) -> tuple[dict[int, Tensor], dict[int, Batch]]:
        if place not in self.untracked:
            self.untracked[place] = {}, {}
        return self.untracked[place]

    def track(self) -> None:
        """Update the running statistics of the norms that ran."""
        for place in self.untracked:
            track_traced(self.relay, self._taken(place))

    def left(self) -> Left | None:
        """The updates that are still to be made. The caller makes them. Those on further devices are made now."""
        places = [place for place, (moments, _) in self.untracked.items() if moments]
        for place in places[1:]:
            track_traced(self.relay, self._taken(place))
        return self._taken(places[0]) if places else None

    def _taken(self, place: int) -> Left | None:
        moments, batches = self.untracked[place]
        if not moments:
            return None
        left = place, joined(list(moments.values())), list(moments), list(batches.values())
        moments.clear()
        batches.clear()
        return left


def track_traced(relay: Any, left: Left | None) -> None:
    """Make updates inside of compiled code."""
    if left is not None:
        place, moments, calls, batches = left
        numbers = [number for batch in batches for number in batch]
        lengths = [len(batch) for batch in batches]
        track(relay.compiled[place].ticket, moments, calls, lengths, numbers, relay.number)


def track_norms(
    norms: dict[int, WeakModule],
    tables: dict[Any, Any],
    moments: Tensor,
    calls: Sequence[int],
    batches: Sequence[Batch],
) -> None:
    """What the op `kalmannorm::track` does. `norms` by their calls."""

    def updates() -> list[Update]:
        found, start = list[Update](), 0
        for call, (size, examples, channels, *positions) in zip(calls, batches, strict=True):
            groups = group_count(examples, group_size(examples, size))
            found.append(Update(norms[call], start, groups, channels, examples * math.prod(positions), examples))
            start += 4 * groups * channels
        return found

    track_together(moments, [norms[c] for c in calls], (tuple(calls), tuple(batches)), updates, tables)
