"""Time and peak memory of a training step, beside the same net with nn.BatchNorm: `kalmannorm bench`.

A step is forward, loss, backward and optimizer on a batch that stays where it is. First every contender has to be
right, or nothing is timed. Then they take turns, round after round, each round in another order, so that whatever else
the machine does meets all of them alike; a ratio is the median over rounds of (contender / nn.BatchNorm in that round).
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase

from kalmannorm.accumulation import accumulate_statistics
from kalmannorm.lab import models
from kalmannorm.lab.errors import LabError
from kalmannorm.lab.methods import method, normalized
from kalmannorm.lab.optimizing import optimizer_of
from kalmannorm.lab.peak import peak_bytes
from kalmannorm.lab.recipe import Recipe
from kalmannorm.lab.records import Record
from kalmannorm.lab.setting import Setting

BASELINE = "nn.BatchNorm"
WARMUP = 2
TOLERANCE = 1e-3
"""Of losses, relative: float32 rounds differently in another order of summation, and layers add that up."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What all contenders share."""

    model: str
    setting: Setting
    device: torch.device
    image_size: int | None = None
    """None: 32 for CIFAR's nets, 8 for the digits', else 224."""
    classes: int = 10
    channels_last: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        size, channels = {"cifar": (32, 3), "digits": (8, 1)}.get(self.model.split("-")[0], (224, 3))
        return channels, self.image_size or size, self.image_size or size

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(self.setting.gradient_batch, *self.shape, generator=generator)
        labels = torch.randint(self.classes, (self.setting.gradient_batch,), generator=generator)
        return self.placed(images), labels.to(self.device)

    def placed(self, images: Tensor) -> Tensor:
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return images.to(self.device, memory_format=layout)

    def build(self, name: str, statistics_batch: int | None = None) -> nn.Module:
        """The net with one method; all start from the same weights."""
        torch.manual_seed(0)
        model = models.build(self.model, classes=self.classes, shape=self.shape).to(self.device)
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if name == BASELINE:
            return model
        size = statistics_batch or self.setting.statistics_batch
        return normalized(model, name, self.placed(torch.zeros(2, *self.shape)), statistics_batch=size, steps=10_000)


class Seconds(NamedTuple):
    """Of one step. The processor's own are those of all threads: others who use the machine do not add to them."""

    clock: float
    processor: float


class Contender:
    """A net, its optimizer and one step on the batch."""

    def __init__(self, name: str, model: nn.Module, images: Tensor, labels: Tensor) -> None:
        self.name, self.model, self.images, self.labels = name, model, images, labels
        # A rate at which a hundred steps on one batch change nothing but the last digits.
        self.optimizer = optimizer_of(model, Recipe(learning_rate=1e-6))

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self.images), self.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def seconds(self) -> Seconds:
        if self.images.is_cuda:
            torch.cuda.synchronize(self.images.device)
        start, busy = time.perf_counter(), time.process_time()
        self.step()
        if self.images.is_cuda:
            torch.cuda.synchronize(self.images.device)
        return Seconds(time.perf_counter() - start, time.process_time() - busy)

    def peak(self) -> int:
        """To be asked after a step, when the optimizer holds what it will hold."""
        self.optimizer.zero_grad()
        state = [t for values in self.optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
        held = [*self.model.parameters(), *self.model.buffers(), *state, self.images, self.labels]
        return peak_bytes(self.step, held, self.images.device)


def bench(
    case: Case, methods: Sequence[str], rounds: int = 15, *, watch: Callable[[str], None] = lambda _: None
) -> list[Record]:
    """One record per contender, nn.BatchNorm first; `watch` hears what is being done."""
    if rounds < 5:
        raise LabError(f"--rounds {rounds}: at least 5 are needed for a median and its spread")
    for name in methods:
        method(name)
    case.setting.checked()
    images, labels = case.batch()
    contenders = [Contender(name, case.build(name), images, labels) for name in (BASELINE, *dict.fromkeys(methods))]
    for contender in contenders:
        watch(f"checking {contender.name}")
        check(case, contender)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    times = measured(contenders, rounds, watch)
    peaks = {}
    for contender in contenders:
        watch(f"memory of {contender.name}")
        peaks[contender.name] = contender.peak()
    return [
        {
            "model": case.model,
            "setting": str(case.setting),
            "shape": "x".join(map(str, images.shape)),
            "layout": "channels_last" if case.channels_last else "NCHW",
            "device": str(case.device),
            "method": contender.name,
            **_spread("ms", [1e3 * own.clock for own in times[contender.name]]),
            **_spread("ratio", _ratios(times[contender.name], times[BASELINE], "clock")),
            **_spread("processor_ratio", _ratios(times[contender.name], times[BASELINE], "processor")),
            "peak_mib": round(peaks[contender.name] / 2**20, 1),
            "peak_ratio": round(peaks[contender.name] / peaks[BASELINE], 3),
            "parameters": sum(parameter.numel() for parameter in contender.model.parameters()),
            "rounds": rounds,
            "load": None if load is None else round(load, 1),
        }
        for contender in contenders
    ]


def measured(contenders: Sequence[Contender], rounds: int, watch: Callable[[str], None]) -> dict[str, list[Seconds]]:
    """What a step of every contender took in every round."""
    times: dict[str, list[Seconds]] = {contender.name: [] for contender in contenders}
    for number in range(-WARMUP, rounds):
        watch("warming up" if number < 0 else f"round {number + 1} of {rounds}")
        turn = number % len(contenders)
        for contender in [*contenders[turn:], *contenders[:turn]]:
            seconds = contender.seconds()
            if number >= 0:
                times[contender.name].append(seconds)
    return times


def _ratios(own: Sequence[Seconds], base: Sequence[Seconds], of: str) -> list[float]:
    return [getattr(a, of) / getattr(b, of) for a, b in zip(own, base, strict=True)]


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    p20, _, _, p80 = statistics.quantiles(values, n=5, method="inclusive")
    return {name: round(statistics.median(values), 3), f"{name}_p20": round(p20, 3), f"{name}_p80": round(p80, 3)}


def check(case: Case, contender: Contender) -> None:
    """Raise where a contender is not what it says; all on copies, so that no statistic has moved when it is timed."""
    trial = Contender(contender.name, copy.deepcopy(contender.model), contender.images, contender.labels)
    loss = float(trial.step())
    _require(contender.name, "its loss is not a number", loss == loss and abs(loss) != float("inf"))
    for name, parameter in trial.model.named_parameters():
        gradient = parameter.grad
        _require(contender.name, f"{name} has no gradient", gradient is not None)
        assert gradient is not None
        _require(contender.name, f"the gradient of {name} is not finite", bool(gradient.isfinite().all()))
    if contender.name == BASELINE:
        whole = case.build("bn", case.setting.gradient_batch)
        found, expected = (_loss(model, contender) for model in (whole, copy.deepcopy(contender.model)))
        _close("bn", "with one group its loss is not that of nn.BatchNorm", found, expected)
    elif method(contender.name).groups:
        _check_groups(case, contender)


def _loss(model: nn.Module, like: Contender) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(model(like.images), like.labels))


@torch.no_grad()
def _check_groups(case: Case, contender: Contender) -> None:
    """Groups in one pass are what as many passes of one group give."""
    model, size = copy.deepcopy(contender.model).eval(), case.setting.statistics_batch
    for module in model.modules():  # dropout and its like would draw other numbers
        if isinstance(module, _NormBase):
            module.train()
    few = contender.images[: 4 * size]
    with accumulate_statistics(model):  # Batch Renorm's correction must be that of one pass
        together = model(few)
        apart = torch.cat([model(group) for group in torch.split(few, size)])
    _close(contender.name, "its groups depend on each other", _size(together - apart), 0.0, scale=_size(together))


def _size(logits: Tensor) -> float:
    return float(logits.abs().max())


def _close(name: str, fault: str, found: float, expected: float, scale: float | None = None) -> None:
    error = abs(found - expected) / (abs(expected) if scale is None else scale)
    _require(name, f"{fault}: off by {error:.1e}", error < TOLERANCE)


def _require(name: str, fault: str, right: bool) -> None:
    if not right:
        raise LabError(f"{name} is wrong, so nothing is timed: {fault}")
