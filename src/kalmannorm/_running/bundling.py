"""From the steps of a program to bundles: priors that depend on parameters alone, made ready to be computed together.

Calls of norms are taken in the order they run, so many at a time. Each part's steps become the elementwise work and the
layers of a bundle; what a bundle cannot do (a step of another kind, a weight that is itself computed) is evaluated as
before, and given to it. A step that an earlier part has is a result there, and given here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kalmannorm._ops.propagate.bundle import Belief, Bundle, Elementwise, Gain, Given, Layer, Stage
from kalmannorm._running.bundle_work import Work, work_of
from kalmannorm._wiring.program import Constant, Program, Select, Slice, Step
from kalmannorm._wiring.weak_modules import WeakModule

TOGETHER = 32
"""Norms whose priors are computed together, at most. The backward of a bundle waits for the last of its gradients, and
with it wait the parameters that DDP could exchange by then."""


class Call(NamedTuple):
    """One call of a norm that has a prior: its number, the step of the prior, the norm."""

    identity: int
    target: int
    norm: WeakModule


class Source(NamedTuple):
    """Where a tensor of a bundle comes from: an attribute of a module, or the mean (0) or variance (1) of a step."""

    shape: tuple[int, ...]
    owner: WeakModule | None = None
    name: str = ""
    step: int = -1
    part: int = 0


@dataclass
class Part:
    """A bundle and what belongs to its tensors and results in the program."""

    bundle: Bundle
    sources: list[Source]
    steps: list[int]  # of which the results are
    calls: list[Call]  # of which the gains are
    affine: dict[int, tuple[int | None, int | None]]  # of calls: which of what is passed are their γ and β
    given: list[int]  # steps that have to be there first
    watched: list[tuple[int, Step]]  # what it was made of: for another step in its place it would be wrong


def parts_of(program: Program, calls: Sequence[Call], measure: Callable[[int], int]) -> list[Part]:
    """`measure` tells how many entries a step has that no bundle can do."""
    works = {i: work for i in _needed(program, calls) if (work := work_of(program, i)) is not None}
    # The first one may be short. At the end of a net, where weights are large, a short one would hold the gradients of
    # all of them at a time when most of what the forward kept is still there.
    first = len(calls) % TOGETHER or TOGETHER
    chunks = [calls[:first], *(calls[i : i + TOGETHER] for i in range(first, len(calls), TOGETHER))]
    owner: dict[int, int] = {}  # of steps that compute something: the first chunk that needs them
    wanted: list[dict[int, None]] = [{} for _ in chunks]
    for number, chunk in enumerate(chunks):
        pending = [call.target for call in chunk if call.target in works]
        for target in pending:
            wanted[owner.get(target, number)][target] = None
        seen: set[int] = set()
        while pending:
            step = pending.pop()
            if step in seen or step not in works:
                continue
            seen.add(step)
            if works[step].makes():
                if step in owner:
                    wanted[owner[step]][step] = None
                    continue
                owner[step] = number
            pending.extend(works[step].inputs)
    parts = []
    sizes: dict[int, int] = {}
    for number, chunk in enumerate(chunks):
        here = {i: work for i, work in works.items() if owner.get(i, number) == number}
        builder = _Builder(program, here, measure, sizes)
        if wanted[number]:
            parts.append(builder.part(list(wanted[number]), chunk))
    return parts


def _needed(program: Program, calls: Iterable[Call]) -> list[int]:
    seen: set[int] = set()
    pending = [call.target for call in calls]
    while pending:
        step = pending.pop()
        if step not in seen:
            seen.add(step)
            pending.extend(program.steps[step].inputs)
    return sorted(seen)


class _Node(NamedTuple):
    """Entries that one piece of work makes, or that are there; `start` counts in the order in which they are met."""

    work: Work
    operands: tuple[Tensor, ...]
    feeds: tuple[int, ...]  # nodes of the operands
    start: int
    size: int
    stage: int
    level: int

    def rank(self) -> tuple[object, ...]:
        """Where it goes: beliefs, what is given; then by stage, alike functions of a level together, layers last."""
        if not self.work.makes():
            return -1, self.work.belief is None
        return self.stage, math.inf if self.work.function is None else self.level, self.work.function or ()


class _Builder:
    """Steps of one part, in order, become nodes; each step is known by the entries that it is."""

    def __init__(
        self, program: Program, here: dict[int, Work], measure: Callable[[int], int], sizes: dict[int, int]
    ) -> None:
        self.program, self.here, self.measure, self.sizes = program, here, measure, sizes
        self.nodes: list[_Node] = []
        self.entries = 0
        self.found: dict[int, Tensor] = {}
        self.known: dict[tuple[object, ...], Tensor] = {}  # the same work on the same entries is done once
        self.given: list[int] = []
        self.sources: list[Source] = []
        self.masks: list[int] = []

    def part(self, steps: list[int], calls: Sequence[Call]) -> Part:
        order = self._order(steps)
        for step in order:
            self.found[step] = self._entries(step)
            self.sizes[step] = self.found[step].numel()
        needs = self._needs(steps)
        nodes = sorted(range(len(self.nodes)), key=lambda i: self.nodes[i].rank())
        place, moved = torch.empty(self.entries, dtype=torch.long), 0
        for node in (self.nodes[i] for i in nodes):
            place[node.start : node.start + node.size] = torch.arange(moved, moved + node.size)
            moved += node.size
        results = [place[self.found[step]] for step in steps]
        bundle = Bundle([], [], [], [], [], results, self.entries, self.masks)
        self._add_leaves(bundle, nodes, needs)
        calls = [call for call in calls if getattr(call.norm.module(), "gain_logit", None) is not None]
        for bit, call in enumerate(calls, len(steps)):
            norm = call.norm.module()
            assert norm is not None
            logit, channels = norm.gain_logit, norm.num_features
            assert isinstance(logit, Tensor) and isinstance(channels, int)
            place_of = self._tensor(Source(tuple(logit.shape), call.norm, "gain_logit"), 1 << bit)
            bundle.gains.append(Gain(place_of, logit.numel(), channels))
        affine = self._pass(bundle, calls, len(steps) + len(calls))
        self._add_work(bundle, nodes, needs, place)
        watched = [(i, self.program.steps[i]) for i in order]
        return Part(bundle, self.sources, steps, list(calls), affine, self.given, watched)

    def _pass(self, bundle: Bundle, calls: Sequence[Call], bit: int) -> dict[int, tuple[int | None, int | None]]:
        """γ and β of norms that run here and are believed here: both of their gradients are then added up here."""
        numbers: dict[tuple[int, str], int] = {}
        norms = {id(call.norm.module()) for call in calls}
        for place, source in enumerate(self.sources):
            owner = None if source.owner is None else source.owner.module()
            if owner is not None and id(owner) in norms and source.name in ("weight", "bias"):
                numbers[id(owner), source.name] = len(bundle.passed)
                self.masks[place] |= 1 << (bit + len(bundle.passed))
                bundle.passed.append(place)
        known = {call.identity: id(call.norm.module()) for call in calls}
        return {call: (numbers.get((norm, "weight")), numbers.get((norm, "bias"))) for call, norm in known.items()}

    def _order(self, steps: list[int]) -> list[int]:
        seen: set[int] = set()
        pending = list(steps)
        while pending:
            step = pending.pop()
            if step not in seen:
                seen.add(step)
                if step in self.here:
                    pending.extend(self.here[step].inputs)
        return sorted(seen)

    def _entries(self, step: int) -> Tensor:
        work = self.here.get(step)
        if work is None:
            self.given.append(step)
            return self._node(Work(), (), self.sizes.get(step) or self.measure(step))
        operands = tuple(self.found[i] for i in work.inputs)
        if work.belief is not None:
            return self._node(work, (), work.belief.channels)
        if work.layer is not None:
            return self._node(work, operands, work.layer.outputs())
        if work.function is not None:
            size = max(part.numel() for part in operands)
            return self._node(work, tuple(part.expand(size) for part in operands), size)
        chosen = self.program.steps[step]
        if isinstance(chosen, Slice):
            return operands[0][chosen.start : chosen.stop]
        if isinstance(chosen, Select):
            index = self.program.steps[chosen.inputs[1]]
            assert isinstance(index, Constant)
            return operands[0][index.tensor.cpu()]
        return torch.cat(operands)

    def _node(self, work: Work, operands: tuple[Tensor, ...], size: int) -> Tensor:
        read = [part.contiguous().numpy().tobytes() for part in operands]
        key = (work.function, None if work.layer is None else work.layer.identity(), *read)
        if operands and key in self.known:
            return self.known[key]
        feeds = self._feeding(operands)
        stage = level = 0
        for node in (self.nodes[i] for i in feeds):
            after = (node.stage + 1, 0) if node.work.layer is not None else (node.stage, node.level + 1)
            stage, level = max((stage, level), after)
        self.nodes.append(_Node(work, operands, feeds, self.entries, size, stage, level))
        self.known[key] = torch.arange(self.entries, self.entries + size)
        self.entries += size
        return self.known[key]

    def _feeding(self, operands: Sequence[Tensor]) -> tuple[int, ...]:
        if not operands:
            return ()
        starts = torch.tensor([node.start for node in self.nodes])
        found = torch.unique(torch.searchsorted(starts, torch.cat(list(operands)), right=True) - 1)
        return tuple(found.tolist())

    def _needs(self, steps: list[int]) -> list[int]:
        """For each node the results that depend on it, as bits."""
        needs = [0] * len(self.nodes)
        for bit, step in enumerate(steps):
            for i in self._feeding([self.found[step]]):
                needs[i] |= 1 << bit
        for i in reversed(range(len(self.nodes))):
            for j in self.nodes[i].feeds:
                needs[j] |= needs[i]
        return needs

    def _tensor(self, source: Source, mask: int) -> int:
        self.sources.append(source)
        self.masks.append(mask)
        return len(self.sources) - 1

    def _add_leaves(self, bundle: Bundle, nodes: list[int], needs: list[int]) -> None:
        given = iter(self.given)
        for i in nodes:
            node, belief = self.nodes[i], self.nodes[i].work.belief
            if belief is not None:
                places = [
                    None
                    if belief.norm.tensor(name) is None
                    else self._tensor(Source((node.size,), belief.norm, name), needs[i])
                    for name in ("bias", "weight")
                ]
                bundle.beliefs.append(Belief(places[0], places[1], node.size))
            elif not node.work.makes():
                step = next(given)
                mean, var = (self._tensor(Source((1, node.size), step=step, part=part), needs[i]) for part in range(2))
                bundle.given.append(Given(mean, var, node.size))

    def _add_work(self, bundle: Bundle, order: list[int], needs: list[int], place: Tensor) -> None:
        made = [i for i in order if self.nodes[i].work.makes()]
        for _, group in itertools.groupby(made, key=lambda i: self.nodes[i].rank()):
            together = list(group)
            nodes = [self.nodes[i] for i in together]
            while len(bundle.stages) <= nodes[0].stage:
                bundle.stages.append(Stage())
            stage = bundle.stages[nodes[0].stage]
            if nodes[0].work.function is not None:
                a, *b = (place[torch.cat(parts)] for parts in zip(*(node.operands for node in nodes), strict=True))
                start = int(place[nodes[0].start])
                stage.elementwise.append(Elementwise(nodes[0].work.function, a, b[0] if b else None, start))
                continue
            for i, node in zip(together, nodes, strict=True):
                layer, start = node.work.layer, int(place[node.start])
                assert layer is not None
                weight = self._tensor(Source(layer.shape(), layer.weight.owner, layer.weight.name), needs[i])
                bias = None
                if layer.bias is not None:
                    bias = self._tensor(Source((node.size,), layer.bias.owner, layer.bias.name), needs[i])
                options = layer.shape(), layer.groups, layer.transposed, layer.axes
                stage.layers.append(Layer(weight, bias, *options, place[node.operands[0]], start, node.size))
