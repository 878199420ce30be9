"""Decides for every call of a graphed model whether a graph is replayed, captured or not used.

A signature that is new runs eagerly. When it comes again, it is captured, and from then on replayed. Graphs that were
not used for long make room for others. All graphs of a pool share memory. While a backward is outstanding, its pool is
occupied: other calls use another pool, or run eagerly.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from kalmannorm._model.graphed.capture import Captured, Turns
from kalmannorm._model.graphed.recorder import Recorder, RefusedError
from kalmannorm._model.graphed.replay import Ticket, replayed
from kalmannorm._model.graphed.signature import Arguments, arguments_of, key_of, modes
from kalmannorm._model.graphed.state import ModelState, Version, device_of
from kalmannorm._running.short_way import watched
from kalmannorm._support.activation_checkpoints import recompute_id, saved_tensors_hooked

Place = tuple[Hashable, int]
"""A signature, and the number of a pool."""
POOLS = 2
"""Pools of memory: forwards whose backward may be outstanding at the same time. More run eagerly."""
PATIENCE = 4
"""A graph makes room for another if it was not used in the last `PATIENCE * limit` calls."""
REMEMBERED = 1024
"""Signatures that are remembered without a graph."""
RESTLESS = 3
"""Forwards in succession that may change attributes of the model. After these the model is not captured."""
CHANGES = "the forward changes attributes of the model"


class Pool:
    """Memory that graphs share. `ticket`: the last call with a backward."""

    def __init__(self) -> None:
        self.handle: Any = None
        self.ticket: weakref.ref[Ticket] | None = None

    def free(self) -> bool:
        ticket = None if self.ticket is None else self.ticket()
        return ticket is None or ticket.done


class Graphs:
    """The graphs of one model. Printed, it says what was captured, and why calls ran eagerly."""

    def __init__(self, model: nn.Module, limit: int, recorder: Recorder) -> None:
        self.model, self.limit, self.recorder = model, limit, recorder
        self.state = ModelState(model)
        self.lock, self.turns = self.state.lock, Turns(recorder)
        self.replays, self.captures, self.calls = 0, 0, 0
        self.eager: Counter[str] = Counter()
        """Calls without a graph, by reason."""
        self._begin()

    def _begin(self) -> None:
        """Forget everything about the model's tensors of before."""
        self.generation, self.device = self.state.generation, device_of(self.model)
        self.captured: OrderedDict[Place, Captured] = OrderedDict()
        self.last_use: dict[Place, int] = {}
        self.pools = [Pool() for _ in range(POOLS)]
        self.known: OrderedDict[Hashable, str | None] = OrderedDict()  # signatures that came, and problems with them
        self.patterns: dict[Hashable, list[bool]] = {}  # which outputs a backward begins at
        self.restless = 0

    def __len__(self) -> int:
        return len(self.captured)

    def __str__(self) -> str:
        reasons = "".join(f"\n  {number} eager: {reason}" for reason, number in self.eager.most_common())
        return f"{len(self)} graphs, captured {self.captures} times, replayed {self.replays} times{reasons}"

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = self.state.device()
        if not self.recorder.serves(device) or device != self.device:
            device = device_of(self.model)
        if self.captured and device != self.device:
            with self.lock:
                self._begin()  # old graphs would keep the memory of the old device
        problem = self._unusual(device) if self.restless < RESTLESS else CHANGES
        if problem is not None:
            return self._run(problem, args, kwargs)
        with self.lock:  # a capture gives the model other parameters for a moment
            self.calls += 1
            arguments = arguments_of(args, kwargs)
            version = self.state.version()
            if self.state.generation != self.generation:
                self._begin()
                device = self.device
                problem = self._unusual(device)
            kinds = tuple(map(key_of, arguments.leaves))
            problem = problem or self._problem(arguments, kinds, version, device)
            if problem is not None:
                return self._run(problem, args, kwargs)
            key = version.number, arguments.form(), kinds, modes(device.type)
            return self._serve(key, arguments, version, args, kwargs)

    def _unusual(self, device: torch.device) -> str | None:
        """A device without graphs, and modes in which every operation of the model must run."""
        if not self.recorder.serves(device):
            return f"on {device.type}"
        if torch.is_inference_mode_enabled():
            return "inference mode"
        if (
            watched()
            or saved_tensors_hooked()
            or torch._C._len_torch_function_stack() > 0
            or torch.is_anomaly_enabled()
        ):
            return "a mode of torch watches every operation"
        if recompute_id() != -1:
            return "inside a backward"
        if torch_module._has_any_global_hook():  # type: ignore[no-untyped-call]
            return "hooks on all modules"
        return None

    def _problem(
        self, arguments: Arguments, kinds: tuple[Hashable, ...], version: Version, device: torch.device
    ) -> str | None:
        if version.problem is not None:
            return version.problem
        if self.state.hooked():
            return "hooks on modules"
        if None in kinds:
            return "arguments that are neither plain tensors nor constants"
        if any(tensor.device != device for tensor in arguments.tensors()):
            return "arguments on another device"
        return None

    def _serve(
        self, key: Hashable, arguments: Arguments, version: Version, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        number = next((i for i, pool in enumerate(self.pools) if pool.free()), None)
        if number is None:
            return self._run("too many backwards are outstanding", args, kwargs)
        captured = self._found(key, number)
        if captured is None:
            if key not in self.known:
                return self._first(key, version, args, kwargs)
            self.known.move_to_end(key)
            problem = self.known[key]
            if problem is None and not self._room():
                problem = "more signatures than the limit"
            if problem is not None:
                return self._run(problem, args, kwargs)
            captured = self._capture(key, number, arguments, version)
            if captured is None:
                return self._run(str(self.known[key]), args, kwargs)
        self.captured.move_to_end((key, number))
        self.last_use[key, number] = self.calls
        return self._replay(captured, self.pools[number], arguments)

    def _found(self, key: Hashable, number: int) -> Captured | None:
        captured = self.captured.get((key, number))
        if captured is not None and captured.other_pattern is not None:
            # The backward began at other outputs. The second time this happens, the signature runs eagerly.
            self._drop((key, number))
            if key in self.patterns:
                self.known[key] = "backwards begin at different outputs"
            self.patterns[key] = captured.other_pattern
            return None
        return captured

    def _first(self, key: Hashable, version: Version, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.known[key] = None
        while len(self.known) > REMEMBERED:
            self.known.popitem(last=False)
        before = [parameter._version for parameter in self.state.parameters]
        result = self._run("new signature", args, kwargs)
        if [parameter._version for parameter in self.state.parameters] != before:
            self.known[key] = "the forward changes parameters"
        self.restless = self.restless + 1 if self.state.version() is not version else 0
        if self.restless == RESTLESS:
            self.state.versions.clear()  # they hold the attributes
        return result

    def _room(self) -> bool:
        """Whether there is room for a graph. The least recently used one goes if it was not used for long."""
        if len(self.captured) < self.limit:
            return True
        oldest = next(iter(self.captured))
        if self.calls - self.last_use[oldest] <= PATIENCE * self.limit:
            return False
        self._drop(oldest)
        return True

    def _drop(self, place: Place) -> None:
        del self.captured[place], self.last_use[place]
        self._leave_unused(place[1])

    def _leave_unused(self, number: int) -> None:
        """Forget the memory of a pool without graphs: torch frees it."""
        if all(other != number for _, other in self.captured):
            self.pools[number].handle = None

    def _capture(self, key: Hashable, number: int, arguments: Arguments, version: Version) -> Captured | None:
        pool = self.pools[number]
        if pool.handle is None:
            pool.handle = self.recorder.pool()
        try:
            made = Captured(self.state, version, arguments, self.turns, pool.handle, self.patterns.get(key))
        except Exception as error:  # any: the model runs eagerly then, and raises its own errors
            reason = str(error)
            if not isinstance(error, RefusedError):
                reason = f"capturing failed: {type(error).__name__}: {error}"
                said = f"kalmannorm.graphed: the model runs without a graph: {reason}"
                warnings.warn(said, UserWarning, stacklevel=5)
            self.known[key] = reason
            self._leave_unused(number)
            return None
        self.captures += 1
        self.captured[key, number] = made
        return made

    def _replay(self, captured: Captured, pool: Pool, arguments: Arguments) -> Any:
        self.replays += 1
        inputs = arguments.tensors()
        if captured.trains:
            ticket = Ticket()
            pool.ticket = weakref.ref(ticket)
            outputs: Sequence[Tensor] = replayed(captured, ticket, inputs)
        else:
            outputs = captured.forward(inputs)
        return captured.result(outputs)

    def _run(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.eager[reason] += 1
        with self.lock:
            return self.model(*args, **kwargs)
