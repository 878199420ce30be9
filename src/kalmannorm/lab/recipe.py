"""What a run is: `Recipe` decides its numbers, `Execution` how they are computed; both are saved beside them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from kalmannorm.lab.errors import LabError, one_of, useless
from kalmannorm.lab.methods import method
from kalmannorm.lab.setting import Setting

Optimizer = Literal["sgd", "adamw"]
Schedule = Literal["cosine", "linear", "step", "constant"]
Precision = Literal["float32", "bf16", "fp16", "float64"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that a run's numbers depend on, but for rounding.

    Equal recipes give equal results, bit for bit on one CPU with one number of threads: a sum over other parts rounds
    differently, and training makes that grow.
    """

    model: str = "digits-net"
    dataset: str = "digits"
    method: str = "bkn"
    gradient_batch: int = 64
    statistics_batch: int = 2
    epochs: float = 20
    optimizer: Optimizer = "sgd"
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    schedule: Schedule = "cosine"
    warmup_epochs: float = 0.0
    label_smoothing: float = 0.0
    precision: Precision = "float32"
    channels_last: bool = False
    augment: bool = True
    image_size: int | None = None
    """None is the data set's own."""
    width: float = 1.0
    """All channels of the model, scaled: see the experiment `parameters`."""
    gain: float | None = None
    """Where q starts; None is the method's own start."""
    train_examples: int | None = None
    """Only so many of the training set, the same for every run; None is all."""
    test_examples: int | None = None
    evaluate_every: float = 1.0
    """Epochs between evaluations; 0 evaluates at the end only."""
    finish_epochs: float = 0.0
    """The last epochs are trained on frozen population statistics: kalmannorm.finish_on_population."""
    pretrained: bool = False
    seed: int = 0
    deterministic: bool = False

    @property
    def setting(self) -> Setting:
        return Setting(self.gradient_batch, self.statistics_batch)

    @property
    def name(self) -> str:
        """A folder name for people; `digest` tells apart what it does not."""
        return f"{self.model}-{self.method}-{self.gradient_batch}x{self.statistics_batch}-s{self.seed}".replace(
            "/", "_"
        )

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:12]

    def checked(self) -> Recipe:
        """This recipe, or the error that says what is wrong with it."""
        self.setting.checked()
        method(self.method)
        for name, choices in (("optimizer", Optimizer), ("schedule", Schedule), ("precision", Precision)):
            one_of(name, getattr(self, name), get_args(choices))
        for name in ("epochs", "learning_rate", "width"):
            if not 0 < getattr(self, name) < math.inf:
                raise LabError(f"{name} must be a positive number, got {getattr(self, name)}")
        for name in ("weight_decay", "warmup_epochs", "evaluate_every", "finish_epochs"):
            if not 0 <= getattr(self, name) < math.inf:
                raise LabError(f"{name} must be a number of at least 0, got {getattr(self, name)}")
        for name in ("momentum", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise LabError(f"{name} must be at least 0 and less than 1, got {getattr(self, name)}")
        for name in ("train_examples", "test_examples", "image_size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise LabError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.warmup_epochs + self.finish_epochs > self.epochs:
            raise LabError(f"warm-up and finish do not fit into {self.epochs} epochs")
        if self.gain is not None and not 0 < self.gain < 1:
            raise LabError(f"gain must lie between 0 and 1, got {self.gain}")
        for name in ("gain", "finish_epochs"):
            if getattr(self, name) and not method(self.method).takes(name):
                raise LabError(useless(name, method(self.method).title))
        return self

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Recipe:
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise LabError(f"this recipe holds {', '.join(unknown)}, which this version of kalmannorm does not know")
        _check_kinds(cls, values, "recipe")
        return cls(**values)


_KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "int | None": (int, type(None)),
    "float": (float, int),
    "float | None": (float, int, type(None)),
    "Path | None": (str, type(None)),
}
"""What a field's annotation allows in JSON; of all others, a word."""


def _check_kinds(cls: type[Any], values: dict[str, Any], what: str) -> None:
    for field in dataclasses.fields(cls):
        if field.name in values and type(values[field.name]) not in _KINDS.get(str(field.type), (str,)):
            raise LabError(f"this {what} is damaged: {field.name} cannot be {values[field.name]!r}")


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a run is computed: none of this changes its numbers by more than rounding."""

    device: str = "auto"
    threads: int | None = None
    """Of the CPU; None is as many as torch sees fit."""
    micro_batch: int | None = None
    """Examples per forward, gradients accumulated; None is the whole gradient batch."""
    fuse: bool = False
    """Norm and ReLU, and norm, sum and ReLU, in one pass, where the method's norms can: `kalmannorm.fuse`."""
    compile: bool = False
    cuda_graph: bool = False
    workers: int = 4
    """Processes that read an image folder."""
    data_root: Path | None = None
    """Where data sets are kept; None is the default of `kalmannorm data`."""
    save_every: int | None = None
    """Steps between checkpoints; None is once per epoch."""
    log_every: int | None = None
    """Steps between events of the log; None is ten times per epoch."""
    tensorboard: bool = True

    def checked(self) -> Execution:
        for name in ("threads", "micro_batch", "save_every", "log_every"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise LabError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.workers < 0:
            raise LabError(f"--workers must be at least 0, got {self.workers}")
        return self

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Execution:
        """Of what was saved beside a recipe, which also tells the ranks and may tell what other versions know."""
        known = {field.name for field in dataclasses.fields(cls)}
        kept = {name: value for name, value in values.items() if name in known}
        _check_kinds(cls, kept, "execution")
        if kept.get("data_root") is not None:
            kept["data_root"] = Path(kept["data_root"])
        return cls(**kept).checked()
