"""Turns steps of a program into bundles, so that priors which depend on parameters alone are computed together.

The calls of norms are divided into chunks, in the order in which they run. The steps of each chunk become the
elementwise work and the layers of one bundle. A bundle cannot do every step, for example one whose weight is itself
computed. Such a step is evaluated by the program, and the bundle reads its result. If an earlier chunk has a step, that
bundle returns its result, and later bundles read it. Filters that convolutions compute are read where each forward has
put them.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmannorm._ops.propagate.bundle import Belief, Bundle, Elementwise, Given, Layer, Norm, Stage
from kalmannorm._running.bundle_work import Work, is_filter, work_of
from kalmannorm._wiring.program import Constant, NormBelief, Program, Select, Slice, Step
from kalmannorm._wiring.weak_modules import WeakModule

TOGETHER = 32
"""The most norms whose priors are computed together. The backward of a bundle waits for the last of its gradients.
Until then DDP cannot exchange the gradients of its parameters."""


class Call(NamedTuple):
    """One call of a norm: its number, the step of its prior or None if it has none, and the norm.

    `shape` is that of its input in the example. `predicts`: the norm computes its prior from a posterior. Then the
    bundle has only its γ, β and gain. `faded`: its prior has faded in a closing phase. Then no bundle runs: the
    part only says which norms share memory (`settled_way.py`).
    """

    identity: int
    target: int | None
    norm: WeakModule
    shape: tuple[int, ...] = ()
    predicts: bool = False
    faded: bool = False


class Source(NamedTuple):
    """The origin of a tensor in a bundle: an attribute of a module, or the mean (0) or variance (1) of a step.

    `computed`: every forward computes the attribute anew.
    """

    shape: tuple[int, ...]
    owner: WeakModule | None = None
    name: str = ""
    step: int = -1
    part: int = 0
    computed: bool = False


Form = tuple[Any, ...]
"""What kernels have to know about a tensor, without its address."""


def form_of(tensor: Tensor) -> Form:
    return tensor.__class__, tensor.shape, tensor.stride(), tensor.dtype, tensor.device


@dataclass
class Fitting:
    """Tensors that fit a bundle, their addresses, and what was decided for them.

    `forms`: of filters, which are other tensors in each forward.
    """

    device: torch.device
    tensors: list[Tensor]
    addresses: list[int]
    forms: list[Form] = field(default_factory=list)
    runs: dict[torch.dtype, ModuleType] = field(default_factory=dict)  # by dtype of the prior: what runs the bundle
    last: tuple[list[bool], Any] | None = None  # the inputs that needed gradients in the last forward, and its state

    def holds(self, tensors: list[Tensor], device: torch.device, filters: list[Tensor]) -> bool:
        """Whether these are the same tensors, at the same addresses, and filters of the same form."""
        if self.device != device or not all(map(operator.is_, tensors, self.tensors)):
            return False
        if filters and [form_of(each) for each in filters] != self.forms:
            return False
        return list(map(Tensor.data_ptr, tensors)) == self.addresses


class Origins:
    """The sources of a bundle by kind: parameters, computed filters, and moments of steps. `order`: of all of them."""

    def __init__(self, sources: Sequence[Source]) -> None:
        owned, computed, given = list[int](), list[int](), list[int]()
        self.owned, self.computed = list[tuple[WeakModule, str]](), list[tuple[WeakModule, str]]()
        self.given, self.shapes = list[tuple[int, int]](), list[tuple[int, ...]]()
        for place, source in enumerate(sources):
            if source.owner is None:
                given.append(place)
                self.given.append((source.step, source.part))
                self.shapes.append(source.shape)
            else:
                (computed if source.computed else owned).append(place)
                (self.computed if source.computed else self.owned).append((source.owner, source.name))
        self.order = sorted(range(len(sources)), key=[*owned, *computed, *given].__getitem__)


@dataclass
class Part:
    """A bundle, and the steps, calls and modules that its tensors and results belong to."""

    bundle: Bundle
    sources: list[Source]
    calls: list[Call]  # the calls whose rows the bundle returns
    steps: list[int]  # the steps whose results the bundle returns for later bundles
    given: list[int]  # steps that must be evaluated before the bundle
    watched: list[tuple[int, Step]]  # the steps of this part; if one was replaced, the part is outdated
    groups: tuple[Any, list[int]] | None = None  # the number of groups of each norm, and what it depends on
    fitting: Fitting | None = None  # the tensors of the last forward
    sharded: tuple[Fitting | None, bool] | None = None  # with these tensors: whether units of FSDP have the norms
    origins: Origins = field(init=False)
    short: Any = None  # what forwards on the short way share
    settled: tuple[int, dict[int, Any]] | None = None  # see `closing_sums.settled_states`, with `Changes.count`

    def __post_init__(self) -> None:
        self.origins = Origins(self.sources)


def parts_of(program: Program, calls: Sequence[Call], measure: Callable[[int], int], *, filters: bool) -> list[Part]:
    """Divide calls into parts. `measure` returns the number of entries of a step that no bundle can do.

    `filters`: bundles can read the filters that convolutions compute.
    """
    needed = program.needed(call.target for call in calls if call.target is not None)
    works = {i: work for i in needed if (work := work_of(program, i, filters=filters)) is not None}
    # The first chunk may be short. Weights are large at the end of a network. A short chunk there would hold all their
    # gradients at a time when most saved activations still exist.
    first = len(calls) % TOGETHER or TOGETHER
    chunks = [calls[:first], *(calls[i : i + TOGETHER] for i in range(first, len(calls), TOGETHER))]
    owner: dict[int, int] = {}  # the first chunk that needs each computing step
    wanted: list[dict[int, None]] = [{} for _ in chunks]
    for number, chunk in enumerate(chunks):
        pending = [call.target for call in chunk if call.target is not None]
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
        gained = [call for call in chunk if (call.target is None and not call.predicts) == (_gain_of(call) is None)]
        if gained or wanted[number]:
            parts.append(builder.part(gained, list(wanted[number])))
    return parts


def _gain_of(call: Call) -> Any:
    return None if call.faded else getattr(call.norm.module(), "gain_logit", None)


class _Node(NamedTuple):
    """Entries that one piece of work computes or reads.

    `start` numbers entries in the order in which they are found.
    """

    work: Work
    operands: tuple[Tensor, ...]
    feeds: tuple[int, ...]  # nodes of the operands
    start: int
    size: int
    stage: int
    level: int

    def rank(self) -> tuple[object, ...]:
        """Sort key: beliefs and given entries first, then by stage. In a stage equal functions of a level are
        neighbours, and layers are last.
        """
        if not self.work.makes():
            return -1, self.work.belief is None
        return self.stage, math.inf if self.work.function is None else self.level, self.work.function or ()


class _Builder:
    """Turns the steps of one part, in order, into nodes. `found` maps each step to its entries."""

    def __init__(
        self, program: Program, here: dict[int, Work], measure: Callable[[int], int], sizes: dict[int, int]
    ) -> None:
        self.program, self.here, self.measure, self.sizes = program, here, measure, sizes
        self.nodes: list[_Node] = []
        self.entries = 0
        self.found: dict[int, Tensor] = {}
        self.known: dict[tuple[object, ...], Tensor] = {}  # equal work on equal entries is done once
        self.given: list[int] = []
        self.sources: list[Source] = []
        self.masks: list[int] = []

    def part(self, calls: list[Call], steps: list[int]) -> Part:
        order = self._order([*(call.target for call in calls if call.target is not None), *steps])
        for step in order:
            self.found[step] = self._entries(step)
            self.sizes[step] = self.found[step].numel()
        reached = [*(self._prior_of(call) for call in calls), *(self.found[step] for step in steps)]
        needs = self._needs(reached)
        nodes = sorted(range(len(self.nodes)), key=lambda i: self.nodes[i].rank())
        place, moved = torch.empty(self.entries, dtype=torch.long), 0
        for node in (self.nodes[i] for i in nodes):
            place[node.start : node.start + node.size] = torch.arange(moved, moved + node.size)
            moved += node.size
        results = [place[entries] for entries in reached]
        bundle = Bundle([], [], [], [], results, self.entries, self.masks)
        self._add_leaves(bundle, nodes, needs)
        self._add_norms(bundle, calls)
        self._add_work(bundle, nodes, needs, place)
        watched = [(i, self.program.steps[i]) for i in order]
        return Part(bundle, self.sources, calls, steps, self.given, watched)

    def _add_norms(self, bundle: Bundle, calls: Sequence[Call]) -> None:
        """γ and β of a norm may also be a belief of the bundle. Then both of their gradients are added in one place."""
        known = {
            (id(source.owner.module()), source.name): place
            for place, source in enumerate(self.sources)
            if source.owner is not None
        }
        for bit, call in enumerate(calls):
            norm = call.norm.module()
            assert norm is not None
            channels = norm.num_features
            assert isinstance(channels, int)
            places: list[int | None] = []
            for name in ("weight", "bias", "gain_logit"):
                tensor = getattr(norm, name)
                if tensor is None or (name == "gain_logit" and call.faded):
                    places.append(None)
                    continue
                assert isinstance(tensor, Tensor)
                found = known.pop((id(norm), name), None)  # a second call of the norm reads the tensor by itself
                if found is None:
                    found = self._tensor(Source(tuple(tensor.shape), call.norm, name), 0)
                self.masks[found] |= 1 << bit
                places.append(found)
            weight, bias, logit = places
            logits = 1 if logit is None else math.prod(self.sources[logit].shape)
            bundle.norms.append(Norm(weight, bias, logit, logits, channels))

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

    def _prior_of(self, call: Call) -> Tensor:
        """The entries of a call's prior. N(0, 1) for a norm without one."""
        if call.target is not None:
            return self.found[call.target]
        norm: Any = call.norm.module()
        return self._node(Work(belief=NormBelief(channels=norm.num_features)), (), norm.num_features)

    def _needs(self, reached: list[Tensor]) -> list[int]:
        """For each node the results that depend on it, as bits. `reached` are the entries of the results."""
        needs = [0] * len(self.nodes)
        for bit, entries in enumerate(reached):
            for i in self._feeding([entries]):
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
                    if belief.norm.never_was() or belief.norm.tensor(name) is None
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
                name, computed = layer.weight.name, is_filter(layer.weight)
                source = Source(layer.shape(), layer.weight.owner, name, computed=computed)
                weight = self._tensor(source, needs[i])
                bundle.filters += [weight] if computed else []
                bias = None
                if layer.bias is not None:
                    bias = self._tensor(Source((node.size,), layer.bias.owner, layer.bias.name), needs[i])
                options = layer.shape(), layer.groups, layer.transposed, layer.axes
                stage.layers.append(Layer(weight, bias, *options, place[node.operands[0]], start, node.size))
