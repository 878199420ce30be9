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

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kalmannorm._groups import group_count, group_size, lone_last, statistics_dtype
from kalmannorm._ops.normalize.registered_rows import normalize_rows
from kalmannorm._ops.propagate.registered import CompiledBundle, bundle_rows
from kalmannorm._ops.track.registered import find, track
from kalmannorm._running.bundling import Source
from kalmannorm._running.prior_bundles import PriorBundles, runner
from kalmannorm._running.tracking_together import Update, track_together
from kalmannorm._support.checks import check_enough_values
from kalmannorm._wiring.program import Context
from kalmannorm._wiring.weak_modules import WeakModule
from kalmannorm.moments import Moments

Left = tuple[Tensor, Tensor, list[int], list[int], list[int], list[int]]
"""Updates of statistics that are still to be made: arguments of `kalmannorm::track`."""


Path = tuple[str, ...]
"""The names of a module and of those around it, from the model on."""


class CompiledPart(NamedTuple):
    """A bundle as compiled code reads it, a constant."""

    number: str
    calls: tuple[int, ...]
    steps: tuple[int, ...]
    given: tuple[int, ...]


class Collector(NamedTuple):
    """Functions that collect the tensors of a bundle, and say which need gradients.

    Compiled code finds the modules from the model, as the forward does. If it found them in another way, it would have
    to check in every call that both ways lead to the same objects. The functions are generated and have no loops,
    because a tracer needs much longer for loops.
    """

    tensors: Callable[[nn.Module, dict[int, Any]], list[Tensor]]
    """From the model and the results of steps."""
    wanted: Callable[[list[Tensor]], list[bool]]

    @classmethod
    def of(cls, sources: Sequence[tuple[Path | None, str, int, int]]) -> Collector:
        """Each source is the path of a module and a name, or else a step and 0 for its mean or 1 for its variance."""
        found = ", ".join(
            f"results[{step}][{piece}]"
            if path is None
            else f"getattr(root{''.join(f'._modules[{name!r}]' for name in path)}, {attribute!r})"
            for path, attribute, step, piece in sources
        )
        wanted = ", ".join(f"tensors[{i}].requires_grad" for i in range(len(sources)))
        return cls(_generated(f"lambda root, results: [{found}]"), _generated(f"lambda tensors: [{wanted}]"))


def _generated(source: str) -> Any:
    return eval(compile(source, "<kalmannorm.compiled>", "eval"), {})


class CompiledModel(NamedTuple):
    """The bundles of a model on one device, with priors of one dtype."""

    parts: tuple[CompiledPart, ...]
    collectors: tuple[Collector, ...]
    ticket: Tensor
    bundles: tuple[CompiledBundle, ...]  # keeps them alive


def place_of(model: str, device: str, wide: bool, call: int) -> tuple[int, int, int, int]:
    """Prepare the bundles of a model on a device. Where the rows for this call are: the place of the bundles in
    `Relay.compiled`, that of the bundle among them, that of the rows in it, and m as in `sizes_of`.

    The first is -1 if there are no bundles, the second if none has the rows.
    """
    if _exported():
        return -1, -1, -1, 0
    relay: Any = find(model)
    place: int = relay.place_of_compiled(torch.device(device), torch.float64 if wide else torch.float32)
    compiled: CompiledModel = relay.compiled[place]
    norm: Any = relay.norms[call].module() if call in relay.norms else None
    for number, part in enumerate(compiled.parts):
        if call in part.calls and norm is not None and norm.has_usual_steps():
            return place, number, part.calls.index(call), sizes_of(model, (call,))[0]
    return place, -1, -1, 0


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
            collectors.append(Collector.of(sources))
            compiled.append(bundle)
    ticket = torch.zeros((), device=context.device)
    torch._dynamo.mark_static_address(ticket)
    return CompiledModel(tuple(parts), tuple(collectors), ticket, tuple(compiled))


def _path(source: Source, paths: dict[int, Path]) -> Path | None:
    """The module in which a tensor is stored. None if it is no tensor of a module of the model, or is computed."""
    module = None if source.owner is None else source.owner.module()
    stored = module is not None and (source.name in module._parameters or source.name in module._buffers)
    return paths.get(id(module)) if stored else None


Key = tuple[bool, bool, int]
"""With or without gradients, in float64 or not, and the place of a bundle."""


class CompiledForward:
    """One traced forward: results of bundles, and moments of norms that are still to be tracked.

    What a norm does here is traced once per norm. So there are few calls, and what is known is read as one constant.
    """

    def __init__(self, relay: Any) -> None:
        self.relay, self.model = relay, relay.number
        self.rows: dict[Key, tuple[int, Sequence[Tensor]]] = {}  # the number of examples, and the rows of norms
        self.results: dict[Any, dict[int, Any]] = {}
        self.untracked: dict[int, tuple[Tensor, int, int, int]] = {}
        self.ran: dict[int, int] = {}  # as in `ThreadState`
        self.place = -1

    def normalize(self, call: int, norm: Any, x: Tensor, residual: Tensor | None, relu: bool) -> Tensor | None:
        """The result of a norm, or None: it must take the long way."""
        shape, size = x.shape, norm.statistics_batch_size or 0
        if (
            not norm.takes_short_way()
            or len(shape) not in norm.input_dims
            or shape[1] != norm.num_features
            or x.numel() == 0
        ):
            return None
        if residual is not None and (
            residual.shape != shape or residual.dtype != x.dtype or residual.device != x.device
        ):
            return None
        if norm.track_running_stats and norm._pending is not None:
            return None
        if norm.gain_logit is None:
            check_enough_values(x, norm.statistics_batch_size, norm)
            if lone_last(x, size):
                return None
        wide = x.dtype == torch.float64
        place, number, index, known = place_of(self.model, str(x.device), wide, call)
        if number < 0 or known != size:
            return None
        key = torch.is_grad_enabled(), wide, number
        if key not in self.rows:
            self._fill(place, key, Context(x.device, statistics_dtype(x), {}, shape[0]))
        examples, every = self.rows[key]
        if examples != shape[0]:
            return None
        rows = every[index]
        y, moments = normalize_rows(x, rows, residual, size, norm.eps, relu)
        if norm.track_running_stats:
            self._postpone(place, call, moments, rows.shape[1], x)
        if norm.then:
            y = norm._finish(y, residual is not None or relu)
        return y

    def _fill(self, place: int, key: Key, context: Context) -> None:
        """Make the rows of a bundle."""
        kind, number = key[:2], key[2]
        if kind not in self.results:
            self.results[kind] = {}
        results = self.results[kind]
        bundle, calls, steps, given, sizes, which = listed(self.model, place, number)
        for step in given:
            if step not in results:
                earlier = part_with(self.model, place, step)
                if earlier >= 0:
                    self._fill(place, (*kind, earlier), context)
            self.relay.program.evaluate(step, context, results)
        collector = self.relay.compiled[place].collectors[number]
        tensors = collector.tensors(self.relay.state.part, results)
        wanted = collector.wanted(tensors) if torch.is_grad_enabled() else [False] * len(tensors)
        counts = [1 if m < 0 else group_count(context.examples, group_size(context.examples, m)) for m in sizes]
        found = bundle_rows(tensors, [counts[i] for i in which], wanted, bundle)
        self.rows[key] = context.examples, found[: len(calls)]
        for i, step in enumerate(steps):
            results[step] = Moments(found[len(calls) + i], found[len(calls) + len(steps) + i])

    def postpone(self, call: int, moments: Tensor, groups: int, x: Tensor) -> bool:
        """Postpone an update of statistics to the end of the forward. False: there is no model for it.

        `moments` are (4, G, C), in one dimension.
        """
        place = place_of(self.model, str(x.device), x.dtype == torch.float64, call)[0]
        if place < 0:
            return False
        self._postpone(place, call, moments, groups, x)
        return True

    def _postpone(self, place: int, call: int, moments: Tensor, groups: int, x: Tensor) -> None:
        if call in self.untracked or place != self.place:  # the norm runs again, or on another device
            self.track()
        self.place = place
        self.untracked[call] = moments, groups, x.numel() // x.shape[1], x.shape[0]

    def track(self) -> None:
        """Update the running statistics of the norms that ran."""
        left = self.left()
        if left is not None:
            track(*left, self.model)

    def left(self) -> Left | None:
        """The updates that are still to be made. The caller makes them."""
        if not self.untracked:
            return None
        calls, entries = list(self.untracked.keys()), list(self.untracked.values())
        self.untracked = {}
        moments = torch.cat([each[0] for each in entries])
        groups, values = [each[1] for each in entries], [each[2] for each in entries]
        ticket: Tensor = self.relay.compiled[self.place].ticket
        return ticket, moments, calls, groups, values, [each[3] for each in entries]


def track_norms(
    norms: dict[int, WeakModule],
    tables: dict[Any, Any],
    moments: Tensor,
    calls: Sequence[int],
    groups: Sequence[int],
    values: Sequence[int],
    examples: Sequence[int],
) -> None:
    """What the op `kalmannorm::track` does. `norms` by their calls."""

    def updates() -> list[Update]:
        found, start = list[Update](), 0
        for call, size, value, count in zip(calls, groups, values, examples, strict=True):
            norm: Any = norms[call].module()
            found.append(Update(norms[call], start, size, norm.num_features, value, count))
            start += 4 * size * norm.num_features
        return found

    key = tuple(calls), tuple(groups), tuple(values), tuple(examples)
    track_together(moments, [norms[c] for c in calls], key, updates, tables)
