"""Trains several networks in parallel on one GPU. Each step of each network is one CUDA graph, on a stream per network.

All inputs of a step are on the device: images, the order of the epochs, crops and flips, the learning rate and λ of
every step, and the number of the step. So a step is one replay, and the streams fill the gaps of each other.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kalmannorm
from kalmannorm.lab.data.resident import crop_and_flip
from trials.cells import BATCH, Cell, Data
from trials.forms import Form

MOMENTUM = 0.9
CURVE = 30
"""Points of a recorded curve."""


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

    @property
    def key(self) -> str:
        words = [self.cell, self.form.name, f"seed={self.seed}"]
        words += [
            f"{name}={value}"
            for name in ("epochs", "rate", "warmup", "decay", "test")
            if (value := getattr(self, name))
        ]
        return " | ".join(words)


class Training:
    """A running training. `step()` trains on one batch, `score()` returns the accuracy."""

    def __init__(self, run: Run, cell: Cell, data: Data, *, graph: bool, batch: int = BATCH) -> None:
        self.run, self.cell, self.data, self.batch = run, cell, data, batch
        device = data.train.device
        rng = torch.Generator().manual_seed(run.seed + 1)
        torch.manual_seed(run.seed)
        self.model = cell.net().to(device, memory_format=torch.channels_last)
        self.epochs = epochs = cell.epochs if run.epochs is None else run.epochs
        count = len(data.train)
        per_epoch = count // batch
        self.steps = epochs * per_epoch
        example = data.prepared(data.train[: 2 * batch : 2])
        helper = run.form.apply(self.model, example, self.steps)
        self.phase = helper if isinstance(helper, kalmannorm.ClosingPhase) else None
        self.time = None if isinstance(helper, kalmannorm.ClosingPhase) else helper
        order = [
            torch.randperm(count, generator=rng)[: per_epoch * batch].view(per_epoch, batch) for _ in range(epochs)
        ]
        self.order = torch.cat(order).to(device)
        moves = torch.randint(0, 2 * cell.padding + 1, (self.steps, batch, 3), generator=rng, dtype=torch.uint8)
        moves[..., 2] %= 2
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
        self.groups = [(group["params"], group["weight_decay"]) for group in groups]
        self.velocity = [[torch.zeros_like(p) for p in params] for params, _ in self.groups]
        self.stream: Any = torch.cuda.Stream() if graph else None
        self.graph = self._captured() if graph else None
        self.done = 0

    def step(self) -> None:
        if self.graph is None:
            self._step()
        else:
            with torch.cuda.stream(self.stream):
                self.graph.replay()
        self.done += 1
        if self.phase is not None:
            before = len(self._probes()), self.phase.settled
            with torch.cuda.stream(self.stream) if self.stream else nullcontext():
                self.phase.step()
            if self.graph is not None and (len(self._probes()), self.phase.settled) != before:
                self.graph = self._captured()  # the norms run in another way from now on

    def _probes(self) -> list[Tensor]:
        """Tensors whose gradients the closing phase collects."""
        norms = (module for module in self.model.modules() if isinstance(module, kalmannorm.GroupedNorm))
        return [norm.closing.probe for norm in norms if norm.closes]

    def _forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16, images.is_cuda, cache_enabled=False):
            logits: Tensor = self.model(images)
        return logits.float()

    def _step(self) -> None:
        at = self.at
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
        if self.time is not None:  # before the optimizer, which overwrites the gradients
            self.time.move(falling)
        with torch.no_grad():
            for (params, decay), velocity in zip(self.groups, self.velocity, strict=True):
                mine = [next(grads).contiguous(memory_format=_format(p)) for p in params]
                if decay:
                    torch._foreach_add_(mine, params, alpha=decay)
                torch._foreach_mul_(velocity, MOMENTUM)
                torch._foreach_add_(velocity, mine)
                torch._foreach_add_(mine, velocity, alpha=MOMENTUM)  # Nesterov
                torch._foreach_mul_(mine, -self.rate * falling)
                torch._foreach_add_(params, mine)
            self.losses.index_copy_(0, at, loss.detach().view(1))
            at.add_(1)

    def _state(self) -> list[Tensor]:
        state = [*self.model.parameters(), *self.model.buffers(), self.at]
        state += [probe.grad for probe in self._probes() if probe.grad is not None]
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
            self._step()
        with torch.no_grad():
            for tensor, value in zip(self._state(), before, strict=True):
                tensor.copy_(value)
        torch.cuda.synchronize()
        return graph

    @torch.no_grad()
    def score(self) -> dict[str, float]:
        """Accuracy in % on the images to score, in every way of inference that the form has."""
        if self.time is not None:
            self.time.settle()
        modes = {"ghost": 3, "kalman": 3, "renorm": 2}.get(self.run.form.kind, 1)
        found = {}
        self.model.eval()
        for mode in ("population", "batch", "example")[:modes]:
            if modes > 1:
                kalmannorm.set_inference(self.model, mode)
            right = 0
            for start in range(0, len(self.data.held), 1000):
                part = slice(start, start + 1000)
                images = self.data.prepared(self.data.held[part])
                right += int((self._forward(images).argmax(1) == self.data.held_labels[part]).sum())
            found[mode] = round(100 * right / len(self.data.held), 2)
        self.model.train()
        return found

    def loss(self) -> float:
        """Mean loss of the last hundred steps. NaN once the training has diverged."""
        return float(self.losses[max(self.done - 100, 0) : self.done].mean())

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


def train(runs: list[Training], seconds: float = math.inf) -> float:
    """Train all of them to the end, one step of each in turn.

    Returns the seconds. Raises an error when time is over.
    """
    start = time.perf_counter()
    for number in range(max(run.steps for run in runs)):
        for run in runs:
            if number < run.steps:
                run.step()
        if number % 200 == 199:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if time.perf_counter() - start > seconds:
                raise TimeoutError
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
