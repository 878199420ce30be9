"""Networks that are compared: the same network, from the same weights, with different norms."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kalmannorm._model.closing import ClosingPhase
from kalmannorm._model.fusion import fuse
from kalmannorm._model.norm_classes import known
from kalmannorm._model.recalibrate import recalibrate
from kalmannorm.lab import models
from kalmannorm.lab.bounds import IMAGE_SIZE
from kalmannorm.lab.errors import LabError
from kalmannorm.lab.machine.memory import check_fits
from kalmannorm.lab.machine.peak_memory import peak_bytes
from kalmannorm.lab.recipes.methods import method, normalized
from kalmannorm.lab.recipes.recipe import Recipe
from kalmannorm.lab.recipes.setting import Setting
from kalmannorm.lab.training.optimizer import optimizer_of

BASELINE, NONE = "nn.BatchNorm", "none"
PRECISIONS = ("float32", "bf16")


class Entry(NamedTuple):
    """A contender before it is built: `BASELINE`, one of the lab's methods, or `NONE` for no norms at all."""

    method: str
    setting: Setting
    way: str = ""
    """ "fused" by `kalmannorm.fuse`, or compiled by "inductor"."""
    settled: bool = False
    """Whether its closing phase is over: norms normalize with their running statistics, and priors have faded."""

    @property
    def ways(self) -> str:
        return " ".join(filter(None, (self.way, "settled" if self.settled else "")))

    def __str__(self) -> str:
        return " ".join(filter(None, (self.method, str(self.setting), self.ways)))


def entries(
    gradient_batch: int,
    statistics_batches: Sequence[int],
    methods: Sequence[str],
    *,
    fused: bool = False,
    settled: bool = False,
) -> list[Entry]:
    """nn.BatchNorm, then every method at every statistics batch that it depends on.

    Fused ones follow the unfused ones, and settled ones follow both. Only some methods have a closing phase.
    """
    whole = Setting(gradient_batch, gradient_batch)
    settings = [Setting(gradient_batch, size).checked() for size in dict.fromkeys(statistics_batches)]
    found = [Entry(BASELINE, whole)]
    for name in dict.fromkeys(methods):
        chosen = method(name)
        for setting in settings if chosen.groups else [whole]:
            for closed in (False, True) if settled and chosen.takes("closing_start") else (False,):
                ways = ("", "fused") if fused and chosen.groups else ("",)
                found += [Entry(name, setting, way, closed) for way in ways]
    return found


@contextmanager
def full_float32() -> Iterator[None]:
    """Compute convolutions as plain sums of products.

    TF32 has eleven bits and would hide an error of a thousandth. So might other algorithms of cuDNN.
    """
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


@dataclass(frozen=True, kw_only=True)
class Case:
    """Settings that all contenders share."""

    model: str
    gradient_batch: int
    device: torch.device
    image_size: int | None = None
    """None: 32 for networks of CIFAR, 8 for that of the digits, else 224."""
    channels_last: bool = False
    precision: str = "float32"
    """ "bf16" means autocast."""
    cuda_graph: bool = False

    @property
    def _kind(self) -> tuple[int, int, int]:
        """Image size, channels and classes."""
        kinds = {"cifar": (32, 3, 10), "digits": (8, 1, 10)}
        return kinds.get(self.model.split("-")[0], (224, 3, 1000))

    @property
    def shape(self) -> tuple[int, int, int]:
        size, channels, _ = self._kind
        return channels, self.image_size or size, self.image_size or size

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(self.gradient_batch, *self.shape, generator=generator)
        labels = torch.randint(self._kind[2], (self.gradient_batch,), generator=generator)
        return self.placed(images), labels.to(self.device)

    def placed(self, images: Tensor) -> Tensor:
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return images.to(self.device, memory_format=layout)

    def build(self, entry: Entry) -> nn.Module:
        """The network with its norms. All start from the same weights. The contender handles `way` "inductor"."""
        torch.manual_seed(0)
        model = models.build(self.model, classes=self._kind[2], shape=self.shape).to(self.device)
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if entry.method == BASELINE:
            return model
        if entry.method == NONE:
            return without_norms(model)
        example = self.placed(torch.zeros(2, *self.shape))
        size = entry.setting.statistics_batch
        model = normalized(model, entry.method, example, statistics_batch=size, steps=10_000)
        if entry.way == "fused":
            model = fuse(model, example.normal_(), inplace=True)
        if entry.settled:  # new statistics would be 0 and 1, with which a deep net overflows
            with full_float32():  # a second net must have the same
                recalibrate(model, [self.batch()[0]], progress=False)
        return model

    def autocast(self) -> AbstractContextManager[Any]:
        # A graph must contain the casts of the weights, not results that an earlier step has cached.
        half = self.precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=half, cache_enabled=not self.cuda_graph)

    def checked(self) -> Case:
        if self.precision not in PRECISIONS:
            raise LabError(f"--precision {self.precision!r}: choose float32 or bf16")
        if self.cuda_graph and self.device.type != "cuda":
            raise LabError("--cuda-graph needs a GPU; leave it out on a CPU")
        Setting(self.gradient_batch, self.gradient_batch).checked()
        if self.image_size is not None:
            IMAGE_SIZE.check("image_size", self.image_size)
        what = f"{self.gradient_batch:,} images of {self.shape[1]}×{self.shape[2]}"
        check_fits(what, (self.gradient_batch, *self.shape), 4, "use fewer images, or a smaller --image-size")
        return self


def without_norms(model: nn.Module) -> nn.Module:
    """The network without norms, to show the cost of everything else.

    Children that a norm applies to its result stay.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            kind = known(child)
            if kind is not None:
                setattr(parent, name, nn.Sequential(*(getattr(child, follower) for follower in kind.then)))
    return model


class Contender:
    """A network, its optimizer and one step on the batch."""

    def __init__(self, case: Case, entry: Entry, model: nn.Module, images: Tensor, labels: Tensor) -> None:
        self.case, self.entry, self.model, self.images, self.labels = case, entry, model, images, labels
        run: Any = torch.compile(model, dynamic=False) if entry.way == "inductor" else model
        self.run: Callable[..., Any] = run
        # With this learning rate a hundred steps on one batch change only the last digits.
        self.optimizer = optimizer_of(model, Recipe(learning_rate=1e-6))
        self.phase: ClosingPhase | None = None
        if entry.settled:
            fades = method(entry.method).takes("fade_prior")
            self.phase = ClosingPhase(model, sys.maxsize, start=0, end=0, fade_prior=fades)

    def step(self) -> Tensor:
        """Forward, loss, backward, optimizer and closing phase."""
        loss = self.replayable()
        self.close()
        return loss

    def close(self) -> None:
        """The part of a step that no CUDA graph contains."""
        if self.phase is not None:
            self.phase.step()

    def replayable(self) -> Tensor:
        """Forward, loss, backward and optimizer. Gradients are created again, so a graph need not clear them."""
        self.optimizer.zero_grad()
        with self.case.autocast():
            loss = F.cross_entropy(self.run(self.images), self.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def timed(self) -> tuple[Tensor]:
        """A step, in the form of `timing.Call`."""
        return (self.step(),)

    def graphed(self) -> tuple[Tensor]:
        """What a CUDA graph contains of a step, likewise."""
        return (self.replayable(),)

    def peak(self) -> int:
        """Call it after a step, when the optimizer state exists."""
        self.optimizer.zero_grad()
        state = [t for values in self.optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
        held = [*self.model.parameters(), *self.model.buffers(), *state, self.images, self.labels]
        return peak_bytes(self.step, held, self.images.device)
