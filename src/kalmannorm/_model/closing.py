"""`ClosingPhase`: while they train, norms go over from the statistics of their groups to the running statistics.

`_norms/closing.py` contains the formulas. Here are the schedule and the moving averages of gradients.
"""

from __future__ import annotations

import re
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.amp.grad_scaler import GradScaler

from kalmannorm._model.micro_batches import Backwards
from kalmannorm._model.settings import require_norms
from kalmannorm._model.step_calls import StepCalls
from kalmannorm._norms.closing_state import SAVED, ClosingMemory, ClosingState
from kalmannorm._norms.distributed import LayerName, ProcessGroupChoice, RankGroup, Ranks
from kalmannorm._norms.grouped import GroupedNorm
from kalmannorm._support.changes import Changes
from kalmannorm._support.checks import check_number, positive_int

START, END = 0.3, 0.6
LEAST_RISE, MOST_SHARE = 100, 0.3
"""λ rises in at least so many steps, unless this would take more than this share of the training.

Running statistics and averages of gradients follow the last 10 steps or so. If λ rises from 0 to 1 in 30 steps, a net
that still learns fast runs away from them. That happened to the recipe in trainings of 300 steps.
"""
_PLACE = LayerName.of("ClosingPhase.step")
_CLOSING_KEY = re.compile(rf"(^|\.)closing\.({'|'.join(SAVED)})$")
_REPLACED = (
    "ClosingPhase.step: another ClosingPhase was made later for norms of this model, and this one no longer changes "
    "them. Use one phase for a model, and call only its step"
)
_FORGOTTEN = (
    "ClosingPhase: the optimizer has made many steps since the last call of phase.step(), so the strength of the "
    "closing phase has not changed. Call phase.step() after every optimizer step. To train without the phase, call "
    "phase.remove()."
)
_TOO_OFTEN = (
    "ClosingPhase.step: it is called more often than the optimizer steps, so the closing phase runs ahead of the "
    "training. With gradient accumulation call it once after optimizer.step(), not after every micro-batch."
)
_NOT_RESUMED = (
    "ClosingPhase.step: the norms are in a closing phase, loaded with the model or begun by another ClosingPhase, but "
    "this phase has not begun: it is at step {done} of {steps}. To resume a training, call phase.load_state_dict with "
    "the saved state of its phase. To begin anew, call phase.remove() before the first step."
)
_CHANGED = (
    "ClosingPhase.step: the number of backwards in an optimizer step has changed from {before:g} to {now:g}, so the "
    "averages of gradients no longer fit. Continue from a checkpoint before the change. Before the first step with the "
    "new number of micro-batches call phase.change_micro_batches({before:g}, {now:g}). It expects losses that are "
    "divided by the number of micro-batches. If yours are not, call phase.change_micro_batches({now:g}, {now:g})."
)


def check_shares(start: float = START, end: float = END) -> None:
    for name, share in (("start", start), ("end", end)):
        if not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise ValueError(f"{name} must be a share of the training between 0 and 1, got {share!r}")
    if end < start:
        raise ValueError(f"end must be at least start = {start}, got {end}")


class ClosingPhase:
    """Draw every norm gradually from the statistics of its groups to its running statistics, in both directions.

        phase = kalmannorm.ClosingPhase(model, steps=len(loader) * epochs)
        for x, target in batches:
            loss_of(model(x), target).backward()
            optimizer.step()
            phase.step()
            optimizer.zero_grad()

    Until `start` the norms run as ever. Then their strength λ rises linearly and reaches 1 at `end`. From there on the
    model trains as it will run in `population` inference, which is what `fold` exports. The backward uses moving
    averages of gradients instead of the sums of a small group. In the trials of this project it was stable for Kalman
    norms with SGD at learning rates up to 0.2. Batch norm on groups of 2, 32 and 128 diverged in one
    trial each, in which the phase began at 5 % of the training at a learning rate of 0.1.

    Args:
        steps: optimizer steps of the whole training.
        start, end: shares of the training. `start=0, end=0` sets λ = 1 at once, for fine-tuning a trained model. If
            there are fewer than 100 steps between them, λ rises in 100 steps, or in 30 % of the training if that is
            less. Averages could not follow a faster rise.
        top: the strength at `end` and later. Below 1 a share of the noise of small groups stays, as regularization.
        momentum: weight of one step in the moving averages of gradients.
        fade_prior: the gain of a Kalman norm rises with λ from q to 1, so at λ = 1 the prior has no part any more, and
            is not computed. The prior then serves the start of training, when there is no history yet. False: running
            statistics stay those of the posterior.
        present: the share of the present forward, over all of its groups, in the expected gradients. The rest comes
            from the moving averages. The gradient then answers at once to what a step does. Use about 0.5 if a forward
            has 32 examples or more, and 0 if it has one or two. It costs one more pass in the backward of a norm.
        scaler: the `torch.amp.GradScaler` of the training, if there is one. Call `step` after `scaler.update()`.
        process_group: whose gradients are averaged together. "world": all ranks, if there are several. None: this
            process alone. Every rank has to call `step`.

    With gradient accumulation call `step` once per optimizer step. The averages fit losses that are means over their
    batch, divided by the number of micro-batches as usual. Call `change_micro_batches` before a step that has another
    number of them. A step with NaN or Inf gradients changes no average.

    State dicts of the model contain the state of its norms. The phase has a state dict of its own: the number of steps,
    and the number of backwards in a step.
    After the phase `example` and `batch` inference are no longer what was trained: use `population`.
    """

    def __init__(
        self,
        model: nn.Module,
        steps: int,
        *,
        start: float = START,
        end: float = END,
        top: float = 1.0,
        momentum: float = 0.1,
        fade_prior: bool = False,
        present: float = 0.0,
        scaler: GradScaler | None = None,
        process_group: ProcessGroupChoice = "world",
    ) -> None:
        self.steps = positive_int("steps", steps)
        check_shares(start, end)
        check_number("top", top, 0, 1)
        check_number("momentum", momentum, 0, 1)
        check_number("present", present, 0, 1)
        if not isinstance(fade_prior, bool):
            raise TypeError(f"fade_prior must be True or False, got {fade_prior!r}")
        self.start, self.end, self.top, self.scaler = start, end, top, scaler
        least = min(LEAST_RISE / self.steps, MOST_SHARE, 1 - start)
        self._full = end if end == start or end - start >= least - 1e-9 else start + least  # where λ reaches its top
        self.momentum, self.fade_prior, self.present = momentum, fade_prior, present
        self._norms: list[GroupedNorm] = []
        for name, norm in require_norms(model, "ClosingPhase"):
            try:
                norm.check_closing()
            except ValueError as error:
                raise ValueError(f"ClosingPhase: layer {name or '(the model itself)'!r}: {error}") from None
            self._norms.append(norm)
        if not any(isinstance(hook, ClosingLast) for hook in model._state_dict_hooks.values()):
            model.register_state_dict_post_hook(ClosingLast())  # type: ignore[no-untyped-call]
        self._ranks = Ranks(process_group)
        self._checked = False
        self._replaced = False
        self._calls, self._told = StepCalls(self._norms), set[str]()
        for norm in self._norms:
            other = None if norm.phase is None else norm.phase()
            if other is not None and other is not self:
                other._replaced = True
            norm.phase = weakref.ref(self)
        self._backwards = Backwards()
        self._known: tuple[int, list[list[ClosingState]]] | None = None
        self._set: Any = None  # settings of the norms when they were last set, and `Changes.count`
        self.done = 0
        self._set_strength()

    @property
    def begun(self) -> bool:
        """Whether the norms are in the closing phase in the next step."""
        return self.done / self.steps >= self.start

    @property
    def strength(self) -> float:
        """λ of the next step."""
        share = self.done / self.steps
        if share < self.start:
            return 0.0
        return self.top * (1.0 if share >= self._full else (share - self.start) / (self._full - self.start))

    @property
    def settled(self) -> bool:
        """Whether the norms run with running statistics alone in the next step, in one pass for each direction."""
        return self.begun and self.strength == 1 and not self.present

    @torch.no_grad()
    def step(self) -> None:
        """After an optimizer step: update the averages of gradients, and set λ of the next step."""
        if self._replaced:
            raise RuntimeError(_REPLACED)
        if self._calls.called():
            self._tell(_TOO_OFTEN)
        if not self._checked and not self.begun and any(norm.closes for norm in self._norms):
            self._tell(_NOT_RESUMED.format(done=self.done, steps=self.steps))
        self._backwards.note([self._update(states) for states in self._states()])
        changed = self._backwards.changed()
        if changed is not None:
            raise RuntimeError(_CHANGED.format(before=changed[0], now=changed[1]))
        self.done += 1
        self._set_strength()

    @torch.no_grad()
    def change_micro_batches(self, before: int, now: int) -> None:
        """Call it before an optimizer step that has `now` micro-batches, if steps had `before` of them until then.

        The loss of each micro-batch is divided by their number, so the averages of gradients are multiplied by
        `before / now`. If your losses are not divided by it, use the same number twice. When a training is resumed with
        another number, call it after the state dicts of the model and of the phase are loaded.
        """
        factor = positive_int("before", before) / positive_int("now", now)
        for states in self._states():
            ClosingMemory.of(states).averages[:, :2] *= factor
        self._backwards.forget()

    def remove(self) -> None:
        """End the phase: the norms normalize with their groups again, and the state is removed from them."""
        if self._replaced:
            return  # the state belongs to another phase
        for norm in self._norms:
            norm.end_closing()
            norm.phase = None
        self._known = None

    def look(self) -> None:
        """A norm calls it at `eval()` and `state_dict()`: warn if `step` was forgotten."""
        if not self._replaced and self._calls.forgotten():
            self._tell(_FORGOTTEN)

    def _tell(self, message: str) -> None:
        """Warn once."""
        if message not in self._told:
            self._told.add(message)
            warnings.warn(message, UserWarning, stacklevel=4)

    def state_dict(self) -> dict[str, Any]:
        usual = self._backwards.usual
        return {"done": self.done} if usual is None else {"done": self.done, "backwards": list(usual)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the step of `state`. The state of the norms is loaded with the model, before or after this."""
        self.done = int(state["done"])
        usual = state.get("backwards")
        self._backwards.forget(None if usual is None else tuple(float(each) for each in usual))
        if not self.begun:
            for norm in self._norms:
                norm.end_closing()
        self._calls.begin()
        self._set_strength()

    @torch.no_grad()
    def _set_strength(self) -> None:
        if not self.begun:
            return
        strength = self.strength
        settings = strength == 1, self.present, self.fade_prior
        if self._set != (*settings, Changes.count):
            for norm in self._norms:
                if not norm.closes:
                    norm.begin_closing()
                norm.settle_closing(*settings)
        elif strength == 1 and self.scaler is None:
            return
        self._set = *settings, Changes.count
        for states in self._states():
            ClosingMemory.of(states)  # now, so that a CUDA graph of the next step has its addresses
            one = torch.ones_like(states[0].strength)
            torch._foreach_copy_([state.strength for state in states], [one * strength] * len(states))
            if self.scaler is not None:
                torch._foreach_copy_([state.scale for state in states], [self.scaler.scale(one)] * len(states))

    def _states(self) -> list[list[ClosingState]]:
        """The states of the norms, one list per device and dtype."""
        if self._known is None or self._known[0] != Changes.count:
            found: dict[object, list[ClosingState]] = {}
            for state in (norm.closing for norm in self._norms if norm.closes):
                found.setdefault((state.averages.device, state.averages.dtype), []).append(state)
            self._known = Changes.count, list(found.values())
        return self._known[1]

    def _update(self, states: list[ClosingState]) -> Tensor:
        """In few operations on all norms. No value leaves the device, so a CUDA graph can contain it.

        Returns how many backwards reached each norm on a rank.
        """
        memory, group = ClosingMemory.of(states), self._ranks.group()
        sums = memory.sums
        if group is not None:
            RankGroup(group, _PLACE).add_up(sums)
        collected, backwards = sums[:, :2], sums[:, 2:]
        self._check(backwards)
        averages, steps = memory.averages[:, :2], memory.averages[:, 2:]
        moves = backwards + (sums * 0).sum() > 0  # NaN and Inf times 0 is NaN
        new = collected / backwards / states[0].scale
        weight = steps.add(1).reciprocal_().clamp_(min=self.momentum)
        averages.lerp_(torch.where(moves, new, averages), weight)
        steps.add_(moves)
        reached = backwards.index_select(0, memory.firsts).squeeze(1)
        sums.zero_()
        return reached if group is None else reached.double() / distributed.get_world_size(group)

    def _check(self, backwards: Tensor) -> None:
        """Warn in the first step if no backward was collected. Only then, because it waits for the device."""
        if not self._checked and not backwards.any():
            warnings.warn(
                "ClosingPhase.step: no backward has reached a norm since the last step, so the averages of gradients "
                "stay zero. Call step once after every optimizer step, and use loss.backward(): torch.autograd.grad, "
                "backward(inputs=...) and torch.cuda.make_graphed_callables compute gradients of parameters only. "
                "A CUDA graph that you capture yourself must be captured after the phase was made, and again if "
                "phase.begun or phase.settled changes.",
                UserWarning,
                stacklevel=4,
            )
        self._checked = True


class ClosingLast:
    """A hook that puts the state of a closing phase at the end of a state dict.

    The other keys are then in the order that they have without a phase. Code that averages weights may pair them by
    order with those of a copy that was made before the phase began. It is an object, so that the model can be pickled.
    """

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key in [key for key in state_dict if key.startswith(prefix) and _CLOSING_KEY.search(key)]:
            state_dict[key] = state_dict.pop(key)


def leave_order(model: nn.Module) -> None:
    """Remove these hooks from a model and its parts."""
    for module in model.modules():
        hooks = module._state_dict_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, ClosingLast)]:
            del hooks[key]
