"""Trains several networks in parallel on one GPU. The steps of each network are CUDA graphs, on a stream per network.

All inputs of a step are on the device: images, the order of the epochs, crops and flips, the learning rate and λ of
every step, and the number of the step. So a step is one replay, and the streams fill the gaps of each other. With small
batches a replay is several steps, because Python would be too slow for single ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import kalmannorm
from kalmannorm._norms.grouped import Inference
from kalmannorm.lab.data.resident import crop_and_flip
from trials.cells import BATCH, Cell, Data, subset
from trials.faster import speed_up
from trials.forms import Form, Time

MOMENTUM = 0.9
CURVE = 30
"""Points of a recorded curve."""
MODES = {"ghost": 3, "kalman": 3, "renorm": 2}
"""How many of the inferences population, batch and example a form has. The others have population alone."""
RECALIBRATED = ("batch", "ghost", "kalman", "renorm")
RECALIBRATION = 12_800
"""Images from which population statistics are computed again after training."""
SAVED_EVERY = 120.0
"""Seconds between saves of running trainings."""
LOOKED_EVERY = 200
"""Steps between looks at the clock. A look waits for the GPU."""
MOST_STEPS = 8
"""The most steps of one graph. To capture a graph takes about as long as its steps without one."""


def steps_per_graph(batch: int) -> int:
    return max(1, min(MOST_STEPS, 16 // batch))


State = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One training."""

    cell: str
    form: Form
    seed: int = 0
    epochs: int | None = None
    """None: the cell's own."""
    rate: float | None = None
    warmup: float = 0.0
    """The share of training in which the learning rate rises linearly from 0 to its scheduled value."""
    decay: float | None = None
    """Weight decay. None: the cell's own."""
    test: bool = False
    """Train on all training images and score on the test images, instead of the held-out tenth."""
    batch: int | None = None
    """Images per optimizer step. None: 128."""
    both: bool = False
    """Score on the held-out tenth, which choices are made by, and on the test images. It trains on nine tenths."""
    evaluations: int = 0
    """How often the accuracy on the images to score is measured during training, in equal distances."""
    virtual: tuple[int, ...] = ()
    """Sizes of the virtual group of `example` inference that are scored besides m."""

    @property
    def key(self) -> str:
        words = [self.cell, self.form.name, f"seed={self.seed}"]
        words += [
            f"{name}={value}"
            for name in ("epochs", "rate", "warmup", "decay", "test", "batch", "both", "evaluations", "virtual")
            if (value := getattr(self, name))
        ]
        return " | ".join(words)


class Training:
    """A running training. `step()` trains on one batch, `score()` returns the accuracy."""

    def __init__(
        self, run: Run, cell: Cell, data: Data, *, graph: bool, batch: int = BATCH, saved: State | None = None
    ) -> None:
        batch = run.batch or batch
        self.run, self.cell, self.data, self.batch = run, cell, data, batch
        device = data.train.device
        rng = torch.Generator().manual_seed(run.seed + 1)
        torch.manual_seed(run.seed)
        self.model = cell.net().to(device, memory_format=torch.channels_last)
        self.epochs = epochs = cell.epochs if run.epochs is None else run.epochs
        chosen = subset(data.train_labels[: len(data.train)], cell.count)
        count = len(chosen)
        self.per_epoch = per_epoch = count // batch
        self.steps = epochs * per_epoch
        example = data.prepared(data.train[: 2 * batch : 2])
        self.several = steps_per_graph(batch)
        helper = run.form.apply(self.model, example, self.steps)
        if graph:
            speed_up(self.model)
        self.phase = helper if isinstance(helper, kalmannorm.ClosingPhase) else None
        self.time = None if isinstance(helper, kalmannorm.ClosingPhase) else helper
        order = [
            chosen[torch.randperm(count, generator=rng)][: per_epoch * batch].view(per_epoch, batch)
            for _ in range(epochs)
        ]
        self.order = torch.cat(order).to(device)
        moves = torch.randint(0, 2 * cell.padding + 1, (self.steps, batch, 3), generator=rng, dtype=torch.uint8)
        moves[..., 2] %= 2 if cell.flips else 1
        self.moves = moves.to(device)
        shares = torch.arange(self.steps, dtype=torch.float64) / self.steps
        rising = (shares / run.warmup).clamp(max=1) if run.warmup else torch.ones_like(shares)
        self.falling = (rising * (1 - shares)).float().to(device)
        lam = [0.0 if self.time is None else self.time.schedule(float(share)) for share in shares]
        self.lam = torch.tensor(lam, device=device)
        self.rate = cell.rate if run.rate is None else run.rate
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.losses = torch.zeros(self.steps, device=device)
        self.decay = cell.decay if run.decay is None else run.decay
        groups = kalmannorm.parameter_groups(self.model, self.decay)
        self.groups = [([p for p in group["params"] if p.requires_grad], group["weight_decay"]) for group in groups]
        self.velocity = [[torch.zeros_like(p) for p in params] for params, _ in self.groups]
        self.done = 0
        self.marks = {-(-part * self.steps // run.evaluations) for part in range(1, run.evaluations + 1)}
        self.reached: list[tuple[int, float]] = []
        """Steps and accuracies in %, in population inference."""
        self._plan_phase()
        if saved is not None:
            self._restore(saved)
        self.stream: Any = torch.cuda.Stream() if graph else None
        self.graph = self._captured() if graph else None

    def _plan_phase(self) -> None:
        """λ of every step on the device, and the steps after which the norms run in another way."""
        self.turns, phase = set[int](), self.phase
        if phase is None:
            return
        strengths, ways = [], []
        for done in range(self.steps + 1):
            phase.done = done
            strengths.append(phase.strength)
            ways.append((phase.begun, phase.settled))
        phase.done = 0
        self.strengths = torch.tensor(strengths, device=self.at.device)
        self.turns = {done for done in range(1, self.steps + 1) if ways[done] != ways[done - 1]}

    def step(self) -> None:
        """One replay: several steps, or one where something happens before they would be over."""
        stops = self.turns | self.marks | {self.steps}
        count = 1 if self.graph is None else self.several
        if any(self.done + number in stops for number in range(1, count)):
            count = 1
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            if self.graph is None or count < self.several:
                self._step()
            else:
                self.graph.replay()
        self.done += count
        if self.phase is not None:
            self.phase.done = self.done
            self.phase._calls.begin()  # its step is a part of this one
            if self.done in self.turns:
                with torch.cuda.stream(self.stream) if self.stream else nullcontext():
                    self.phase._set_strength()
                if self.graph is not None and self.done < self.steps:
                    self.graph = self._captured()  # the norms run in another way from now on
        if self.done in self.marks:
            if self.stream is not None:
                self.stream.synchronize()
            self.reached.append((self.done, self._scored("population", self.data.held, self.data.held_labels)))

    def _move_phase(self, at: Tensor) -> None:
        """`ClosingPhase.step` with λ from the device, so that a graph can contain it."""
        if self.phase is None:
            return
        strength = self.strengths[at + 1].view(())
        for states in self.phase._states():
            self.phase._update(states)
            torch._foreach_copy_([state.strength for state in states], [strength] * len(states))

    def _probes(self) -> list[Tensor]:
        """Tensors whose gradients the closing phase collects."""
        return [norm.closing.probe for norm in self._closing_norms()]

    def _closing_norms(self) -> list[kalmannorm.GroupedNorm]:
        norms = (module for module in self.model.modules() if isinstance(module, kalmannorm.GroupedNorm))
        return [norm for norm in norms if norm.closes]

    def _forward(self, images: Tensor) -> Tensor:
        precision = torch.autocast(images.device.type, torch.bfloat16, images.is_cuda, cache_enabled=False)
        with precision, parametrize.cached():  # a computed filter is computed once, for the prior and the convolution
            logits: Tensor = self.model(images)
        return logits.float()

    def _step(self) -> None:
        at = self.at.clamp(max=self.steps - 1)  # steps to warm up a graph may go beyond the end
        falling = self.falling[at].view(())
        if self.time is not None:
            self.time.lam.copy_(self.lam[at].view(()))
        chosen = self.order[at][0]
        images = crop_and_flip(self.data.prepared(self.data.train[chosen]), self.moves[at][0].long(), self.cell.padding)
        images = images.contiguous(memory_format=torch.channels_last)
        loss = F.cross_entropy(self._forward(images), self.data.train_labels[chosen])
        parameters = [p for params, _ in self.groups for p in params]
        probes = self._probes()
        grads = iter(torch.autograd.grad(loss, [*probes, *parameters], allow_unused=True, materialize_grads=True))
        for probe in probes:
            probe.grad.add_(next(grads))  # type: ignore[union-attr]
        if self.time is not None:
            self.time.move(falling)
        with torch.no_grad():
            for (params, decay), velocity in zip(self.groups, self.velocity, strict=True):
                mine = [next(grads).contiguous(memory_format=_format(p)) for p in params]
                torch._fused_sgd_(
                    params,
                    mine,
                    velocity,
                    weight_decay=decay,
                    momentum=MOMENTUM,
                    lr=self.rate * falling,
                    dampening=0.0,
                    nesterov=True,
                    maximize=False,
                    is_first_step=False,
                )
            self._move_phase(at)
            self.losses.index_copy_(0, at, loss.detach().view(1))
            self.at.add_(1)

    def _state(self) -> list[Tensor]:
        state = [*self.model.parameters(), *self.model.buffers(), self.at]
        for closing in (norm.closing for norm in self._closing_norms()):
            state += [*closing.saved().values(), *([] if closing.probe.grad is None else [closing.probe.grad])]
        state += [tensor for velocity in self.velocity for tensor in velocity]
        if self.time is not None:
            state += [*self.time.rows.values(), self.time.counted]
        return state

    def _captured(self) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()  # steps may still run on the stream
        before = [tensor.detach().clone() for tensor in self._state()]
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                self._step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for _ in range(self.several):
                self._step()
        with torch.no_grad():
            for tensor, value in zip(self._state(), before, strict=True):
                tensor.copy_(value)
        torch.cuda.synchronize()
        return graph

    def saved(self) -> State:
        """All that changes in a training, on the CPU. A training with this state goes on as if it had never stopped."""
        if self.stream is not None:
            self.stream.synchronize()
        return {
            "done": self.done,
            "reached": self.reached,
            "model": {name: tensor.cpu() for name, tensor in self.model.state_dict().items()},
            "velocity": [[tensor.cpu() for tensor in own] for own in self.velocity],
            "losses": self.losses.cpu(),
            "time": {} if self.time is None else {name: row.cpu() for name, row in self._rows(self.time).items()},
        }

    @torch.no_grad()
    def _restore(self, saved: State) -> None:
        self.done, self.reached = saved["done"], saved["reached"]
        self.at.fill_(self.done)
        if self.phase is not None:
            self.phase.load_state_dict({"done": self.done})
        self.model.load_state_dict(saved["model"])
        for own, old in zip(self.velocity, saved["velocity"], strict=True):
            torch._foreach_copy_(own, old)
        self.losses.copy_(saved["losses"])
        if self.time is not None:
            for name, row in self._rows(self.time).items():
                row.copy_(saved["time"][name])

    @staticmethod
    def _rows(time: Time) -> dict[str, Tensor]:
        return {**time.rows, "counted": time.counted}

    def score(self) -> dict[str, float]:
        """Accuracy in % on the images to score, in every way of inference that the form has."""
        return self.scores()["held_out"]

    @torch.no_grad()
    def scores(self) -> dict[str, dict[str, float]]:
        """Accuracies in %, on held-out and on test images. Recalibration comes last, because it changes the model."""
        if self.time is not None:
            self.time.settle()
        form = self.run.form
        parts = {"held_out": (self.data.held, self.data.held_labels)}
        if self.data.test is not None and self.data.test_labels is not None:
            parts["tested"] = self.data.test, self.data.test_labels
        modes: list[tuple[str, int | None]] = [("population", None), ("batch", None), ("example", form.m)]
        modes = modes[: MODES.get(form.kind, 1)]
        modes += [("example", size) for size in self.run.virtual if len(modes) > 2]
        found: dict[str, dict[str, float]] = {name: {} for name in parts}
        for mode, size in modes:
            words = mode if size in (None, form.m) else f"{mode} {size}"
            for name, images in parts.items():
                found[name][words] = self._scored(mode, *images, size)
        if form.kind in RECALIBRATED and self.time is None and math.isfinite(self.loss()):
            kalmannorm.recalibrate(self.model, self._batches(), progress=False, forward=self._forwarded)
            for name, images in parts.items():
                found[name]["recalibrated"] = self._scored("population", *images)
        return found

    @torch.no_grad()
    def _scored(self, mode: Inference, images: Tensor, labels: Tensor, size: int | None = None) -> float:
        if self.run.form.kind in MODES:
            for norm in (module for module in self.model.modules() if isinstance(module, kalmannorm.GroupedNorm)):
                norm.set_inference(mode, statistics_batch_size=size)
        self.model.eval()
        right = 0
        for start in range(0, len(images), 1000):
            part = slice(start, start + 1000)
            right += int((self._forward(self.data.prepared(images[part])).argmax(1) == labels[part]).sum())
        self.model.train()
        return round(100 * right / len(images), 2)

    def _batches(self) -> Iterator[Tensor]:
        """Training images as they are, in the order of the first epoch. Small batches are joined."""
        first = self.order[: self.per_epoch].flatten()[:RECALIBRATION]
        for chosen in first.split(max(self.batch, BATCH)):
            yield self.data.prepared(self.data.train[chosen])

    def _forwarded(self, model: nn.Module, images: Tensor) -> None:
        self._forward(images)

    def loss(self) -> float:
        """Mean loss of the last hundred steps. NaN once the training has diverged."""
        return float(self.losses[max(self.done - 100, 0) : self.done].mean())

    @property
    def diverged(self) -> bool:
        """Whether the last loss is not finite. The parameters are NaN then, and no later step can change that."""
        return self.done > 0 and not math.isfinite(float(self.losses[self.done - 1]))

    @torch.no_grad()
    def weights(self) -> float:
        """How long filters are: log2 of the root mean square length of a layer's filters, averaged over layers."""
        kernels = [module.weight for module in self.model.modules() if isinstance(module, nn.Conv2d)]
        lengths = [kernel.flatten(1).norm(dim=1).square().mean().sqrt() for kernel in kernels]
        return round(float(torch.stack(lengths).log2().mean()), 3)

    def curve(self) -> list[float | None]:
        """Mean losses of equal shares of the training, None where a loss is not finite."""
        parts = self.losses[: self.done].tensor_split(CURVE)
        means = [float(part.mean()) for part in parts if part.numel()]
        return [round(mean, 3) if math.isfinite(mean) else None for mean in means]


def _format(parameter: nn.Parameter) -> torch.memory_format:
    last = parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def train(runs: list[Training], seconds: float = math.inf, save: Callable[[Training], None] | None = None) -> float:
    """Train all of them to the end, or until the loss is not finite, one step of each in turn.

    Returns the seconds. `save` is called from time to time, and before the error that says that time is over.
    """
    start = last = time.perf_counter()
    count = 0
    while any(run.done < run.steps for run in runs):
        for run in runs:
            if run.done < run.steps:
                run.step()
        count += 1
        if count % LOOKED_EVERY == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            runs = [run for run in runs if not run.diverged]
            now = time.perf_counter()
            over = now - start > seconds
            if save is not None and (over or now - last > SAVED_EVERY):
                last = now
                for run in runs:
                    save(run)
            if over:
                raise TimeoutError
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
