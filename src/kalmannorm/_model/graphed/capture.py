"""Capture the forward and the backward of a model for one signature.

The model runs twice before: once so that everything is prepared, and once to find out whether a graph can serve it.
Then both passes are recorded. Statistics, random numbers and gradients are the same afterwards as before.

The passes run on aliases of the parameters: leaves of their own, in the same memory. So the nodes and hooks of the real
parameters take no part, which belong to other streams, to DDP or to the user. Casts that autocast keeps are not shared
either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from kalmannorm._model.graphed.gradients import Gradients
from kalmannorm._model.graphed.nodes import casts_taken, leaves_of
from kalmannorm._model.graphed.recorder import Recorder, RefusedError
from kalmannorm._model.graphed.signature import CONSTANTS, Arguments, Autocast
from kalmannorm._model.graphed.state import ModelState, Version

Place = tuple[dict[str, Any], str, Tensor]
"""Where a module keeps a parameter, and the parameter."""


def places_of(state: ModelState) -> list[Place]:
    return [
        (own["_parameters"], name, parameter)
        for own in state.dicts
        for name, parameter in own["_parameters"].items()
        if parameter is not None
    ]


@contextmanager
def replaced(places: Sequence[Place], others: dict[int, Tensor]) -> Iterator[None]:
    """The modules have other tensors as parameters. `others` has them by the id of the parameter."""
    try:
        for own, name, parameter in places:
            own[name] = others[id(parameter)]
        yield
    finally:
        for own, name, parameter in places:
            own[name] = parameter


class Passes:
    """Forward and backward of the model on fixed tensors."""

    def __init__(self, state: ModelState, arguments: Arguments) -> None:
        self.model, self.places = state.model, places_of(state)
        self.parameters = state.parameters
        self.aliases: dict[int, Tensor] = {
            id(each): nn.Parameter(each.detach(), each.requires_grad) for each in state.parameters
        }
        self.static = [_copy_of(each) for each in arguments.tensors()]
        self.arguments = arguments.replaced(self.static)  # does not keep the user's tensors
        self.surface = [each for each in (*self.static, *self.aliases.values()) if each.requires_grad]
        self.changed, self.old = list[Tensor](), list[Tensor]()
        self.outputs, self.result = list[Tensor](), list[Any]()
        self.structure: Any = None
        self.pattern, self.used = list[bool](), list[bool]()
        self.grads: list[Tensor] = []
        self.gradients = Gradients([])

    def forward(self) -> list[Tensor]:
        copy_all(self.old, self.changed)
        args, kwargs = self.arguments.call()
        with replaced(self.places, self.aliases):
            self.result, self.structure = pytree.tree_flatten(self.model(*args, **kwargs))
        self.outputs = [each for each in self.result if isinstance(each, Tensor)]
        return [output.detach() for output in self.outputs]

    def backward(self) -> list[Tensor]:
        """The gradients of the tensors that are used, joined by `gradients`."""
        return self.gradients.joined(self.differentiated())

    def differentiated(self) -> list[list[Tensor]]:
        """The gradients as sums: of one tensor, or of a tensor of lower precision and another one."""
        chosen = [output for output, wanted in zip(self.outputs, self.pattern, strict=True) if wanted]
        self.outputs, self.result = [], []
        with replaced(self.places, self.aliases), casts_taken(chosen) as casts:
            found = torch.autograd.grad(chosen, self.surface, self.grads, allow_unused=True)
        sums = [
            [_laid_out(term, like) for term in (casts.get(id(like)), gradient) if term is not None]
            for gradient, like in zip(found, self.surface, strict=True)
        ]
        if not self.used:
            self.used = [len(terms) > 0 for terms in sums]
        return [terms for terms in sums if terms]


def _copy_of(tensor: Tensor) -> Tensor:
    static = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return static.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors, those of one dtype together.

    Their versions stay: batch norm does not increase them either, and a backward may still need its running statistics.
    """
    kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        both = kinds.setdefault(target.dtype, ([], []))
        both[0].append(target.data)
        both[1].append(source)
    with torch.no_grad():
        for some, others in kinds.values():
            torch._foreach_copy_(some, others)


def _laid_out(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient with the strides of `like`. Autograd keeps such a gradient without a copy.

    And torch copies all gradients with one kernel only if no strides differ. Those of the sides of length 1, as in the
    weight of a 1×1 convolution, mean nothing.
    """
    with torch.no_grad():
        wanted = torch.empty_like(like, device="meta").stride()
        if gradient.layout != torch.strided or gradient.stride() == wanted:
            return gradient
        places = zip(gradient.shape, gradient.stride(), wanted, strict=True)
        if all(size == 1 or one == other for size, one, other in places):
            return gradient.as_strided(gradient.shape, wanted)
        return torch.empty_like(like).copy_(gradient)


class Turns:
    """Replays of one model follow one another, also on several streams. They share workspaces of libraries."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.stream = recorder, None

    def take(self) -> None:
        if self.stream is not None:
            self.recorder.join(self.stream)
        self.stream = self.recorder.stream()


class Captured:
    """The graphs of forward and backward, and the tensors that they read and write."""

    def __init__(
        self, state: ModelState, version: Version, arguments: Arguments, turns: Turns, pool: Any,
        pattern: list[bool] | None,
    ) -> None:  # fmt: skip
        self.state, self.version, self.turns, self.recorder = state, version, turns, turns.recorder
        self.generation = state.generation
        self.device = (state.parameters or state.buffers)[0].device
        self.autocast = Autocast.of(self.device.type)
        self.inputs = len(arguments.tensors())
        self.other_pattern: list[bool] | None = None
        """Which outputs a backward began at, if these are not the captured ones."""
        self._capture(arguments, pool, pattern)

    def _capture(self, arguments: Arguments, pool: Any, pattern: list[bool] | None) -> None:
        recorder, device = self.recorder, self.device
        with _nothing_moves(self.state.tensors(self.version), recorder, device) as moved:
            # Not on the side: they are also used by replays on the current stream.
            passes = self.passes = Passes(self.state, arguments)
            with recorder.aside(device):
                self._first_run(passes, pattern)
                self._second_run(passes)
                passes.changed, self.counted = moved()
                passes.old = [torch.empty_like(each) for each in passes.changed]
                torch.clear_autocast_cache()  # the graph has to contain the casts
                self.forward_graph = recorder.record(passes.forward, pool)
                self.backward_graph = recorder.record(passes.backward, pool) if self.trains else None
                passes.outputs, passes.result = [], []
        changed = {id(each) for each in passes.changed}
        self.steady = [
            *passes.parameters,
            *(each for each in self.state.tensors(self.version) if id(each) not in changed),
        ]
        self._order_gradients()

    def _order_gradients(self) -> None:
        """Find out which result of the backward belongs to each input, and to each parameter in `reached`."""
        passes = self.passes
        used = compress(passes.surface, passes.used)
        found = {id(each): passes.gradients.places[number] for number, each in enumerate(used)}
        targets = [*passes.static, *(passes.aliases[id(each)] for each in self.reached)]
        self.sources = [found.get(id(target)) for target in targets]

    def _first_run(self, passes: Passes, pattern: list[bool] | None) -> None:
        """Everything is prepared here. It also shows what the outputs are."""
        passes.forward()
        outputs = passes.outputs
        self.differentiable = [output.requires_grad for output in outputs]
        self.trains = torch.is_grad_enabled() and any(self.differentiable)
        if pattern is None or len(pattern) != len(outputs):
            pattern = self.differentiable
        self.pattern = passes.pattern = [a and b for a, b in zip(pattern, self.differentiable, strict=True)]
        self.trains = self.trains and any(self.pattern)
        self._check_result(passes)
        reached = leaves_of(outputs)
        known = {id(alias): number for number, alias in passes.aliases.items()}
        if not reached.keys() <= known.keys() | {id(each) for each in passes.static}:
            raise RefusedError("the model trains tensors that are not its registered parameters")
        self.reached = [each for each in passes.parameters if id(passes.aliases[id(each)]) in reached]
        self.constants, self.structure = _constants(passes.result), passes.structure
        if self.trains:
            passes.grads = [
                torch.zeros_like(output) for output, wanted in zip(outputs, self.pattern, strict=True) if wanted
            ]
            sums = passes.differentiated()
            if any(term.layout != torch.strided for terms in sums for term in terms):
                raise RefusedError("gradients are sparse")
            passes.gradients = Gradients(list(compress(passes.surface, passes.used)))

    def _second_run(self, passes: Passes) -> None:
        before, host = [each._version for each in passes.static], self.recorder.host_random()
        drawn = self.recorder.random_state(self.device)
        with self.recorder.without_waiting():
            passes.forward()
            if passes.structure != self.structure or _constants(passes.result) != self.constants:
                raise RefusedError("outputs other than tensors change")
            if self.trains:
                passes.backward()
        if [each._version for each in passes.static] != before:
            raise RefusedError("the model changes its input in place")
        if not self.recorder.host_random().same(host):
            raise RefusedError("the model draws random numbers on the host")
        if not self.current():
            raise RefusedError("the forward changes attributes of the model")
        self.draws = not torch.equal(self.recorder.random_state(self.device), drawn)

    def _check_result(self, passes: Passes) -> None:
        own = {each.untyped_storage().data_ptr() for each in (*passes.static, *self.state.parameters)}
        own |= {each.untyped_storage().data_ptr() for each in self.state.tensors(self.version)}
        for each in passes.result:
            if isinstance(each, Tensor):
                plain = type(each) is Tensor and each.layout == torch.strided and each.device == self.device
                if not plain or each.is_inference():
                    raise RefusedError("an output is not a plain tensor on the model's device")
                if each.numel() and each.untyped_storage().data_ptr() in own:
                    raise RefusedError("an output is an input, a parameter or a buffer")
            elif type(each) not in CONSTANTS:
                raise RefusedError(f"an output is a {type(each).__name__}")
        if not passes.outputs:
            raise RefusedError("no output is a tensor")

    def current(self) -> bool:
        """Whether the model has the tensors and settings of the capture."""
        return self.state.version() is self.version and self.state.generation == self.generation

    def versions(self) -> list[int]:
        """They change if a tensor that the graphs read is changed in place."""
        return [each._version for each in self.steady]

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        self.turns.take()
        with torch.no_grad():
            for static, given in zip(self.passes.static, inputs, strict=True):
                static.copy_(given)
            self.forward_graph.replay()
            if self.counted:
                torch.autograd.graph.increment_version(self.counted)
            return [result.clone() for result in self.forward_graph.results]

    def backward(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of the inputs, then of the parameters in `reached`."""
        assert self.backward_graph is not None
        self.turns.take()
        passes = self.passes
        for static, given in zip(passes.grads, grads, strict=True):
            static.copy_(given)
        self.backward_graph.replay()
        found = passes.gradients.copied(self.backward_graph.results)
        return [None if source is None else found[source] for source in self.sources]

    def random_state(self) -> Tensor | None:
        """None if the model draws no random numbers: to ask the device's generator in every step takes time."""
        return self.recorder.random_state(self.device) if self.draws else None

    def again(self, inputs: Sequence[Tensor], state: Tensor | None) -> tuple[list[Tensor], list[Tensor | None]]:
        """The outputs of an eager forward on these inputs, and the tensors to differentiate them by.

        Random numbers and statistics are those of the last replay. The tensors are views: hooks on a tensor itself run
        once, when autograd gives it the result.
        """
        passes, recorder = self.passes, self.recorder
        old = [each.clone() for each in passes.old]
        with torch.enable_grad(), _nothing_moves(passes.changed, recorder, self.device), self.autocast.again():
            copy_all(passes.changed, old)
            if state is not None:
                recorder.set_random_state(state, self.device)
            views = {id(each): each.view_as(each) if each.requires_grad else each for each in passes.parameters}
            given = [each.view_as(each) if each.requires_grad else each for each in inputs]
            args, kwargs = passes.arguments.replaced(given).call()
            with replaced(passes.places, views):
                result = pytree.tree_leaves(passes.model(*args, **kwargs))
        outputs = [each for each in result if isinstance(each, Tensor)]
        wanted = [*given, *(views[id(each)] for each in self.reached)]
        return outputs, [each if each.requires_grad else None for each in wanted]

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """The result of the model with these tensors."""
        each, constants = iter(tensors), iter(self.constants)
        leaves = [next(each) if kind is Tensor else constant for kind, constant in constants]
        return pytree.tree_unflatten(leaves, self.structure)


def _constants(result: Sequence[Any]) -> list[tuple[type, Any]]:
    return [(Tensor, None) if isinstance(each, Tensor) else (type(each), each) for each in result]


@contextmanager
def _nothing_moves(tensors: Sequence[Tensor], recorder: Recorder, device: torch.device) -> Iterator[Any]:
    """Restore these tensors and all random states at the end.

    Yields a function that returns the tensors that have changed so far, and those of them whose version has increased.
    """
    kept = [each.detach().clone() for each in tensors]
    versions = [each._version for each in tensors]
    drawn, host = recorder.random_state(device), recorder.host_random()

    def moved() -> tuple[list[Tensor], list[Tensor]]:
        counted = [each for each, version in zip(tensors, versions, strict=True) if each._version != version]
        known = set(map(id, counted))
        both = zip(tensors, kept, strict=True)
        return [each for each, old in both if id(each) in known or not torch.equal(each, old)], counted

    try:
        yield moved
    finally:
        torch.clear_autocast_cache()
        old = dict(zip(map(id, tensors), kept, strict=True))
        changed, _ = moved()
        copy_all(changed, [old[id(each)] for each in changed])
        recorder.set_random_state(drawn, device)
        host.restore()
