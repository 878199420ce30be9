"""`Recipe` determines the results of a run, `Execution` how they are computed. Both are saved in its folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from kalmannorm.lab.bounds import IMAGE_SIZE, INSIDE, SHARE, Bounds, at_least, positive, up_to, whole
from kalmannorm.lab.errors import LabError, one_of, option, useless
from kalmannorm.lab.machine.devices import check_threads
from kalmannorm.lab.recipes.methods import method
from kalmannorm.lab.recipes.setting import Setting

Optimizer = Literal["sgd", "adamw"]
Schedule = Literal["cosine", "linear", "step", "constant"]
Precision = Literal["float32", "bf16", "fp16", "float64"]

BOUNDS: dict[str, Bounds] = {
    "epochs": positive(1e6),
    # Optimizers convert both to float32. AdamW also converts their product, and ten times the rate.
    "learning_rate": positive(1e30),
    "weight_decay": up_to(1e6),
    "momentum": SHARE,
    "warmup_epochs": up_to(1e6),
    "label_smoothing": SHARE,
    "image_size": IMAGE_SIZE,
    "width": positive(64.0),
    "gain": INSIDE,
    "train_examples": at_least(1),
    "test_examples": at_least(1),
    "evaluate_every": up_to(1e6),
    "finish_epochs": up_to(1e6),
    "closing_start": up_to(1.0),
    "closing_end": up_to(1.0),
    "closing_present": up_to(1.0),
    "statistics_momentum": up_to(1.0),
    "seed": whole(-(2**63), 2**63 - 1),
}
"""The range of every number in a recipe, except the setting, which checks itself."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that the results of a run depend on, except rounding.

    Equal recipes give bit-identical results on the same CPU with the same number of threads. Another number of threads
    splits sums differently. The rounding then differs, and training amplifies the difference.
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
    """None: the size of the data set's images."""
    width: float = 1.0
    """Scales the channels of all layers. The experiment `parameters` uses it."""
    gain: float | None = None
    """Initial q. None: the default of the method."""
    train_examples: int | None = None
    """Use only this many training images, the same in every run. None: all."""
    test_examples: int | None = None
    evaluate_every: float = 1.0
    """Epochs between evaluations. 0: only at the end."""
    finish_epochs: float = 0.0
    """Epochs at the end with frozen population statistics, by `kalmannorm.finish_on_population`."""
    closing_start: float | None = None
    """The share of training at which `kalmannorm.ClosingPhase` begins. None: there is no closing phase."""
    closing_end: float | None = None
    """The share of training at which it reaches its full strength. None: 0.3 later."""
    closing_present: float | None = None
    """`present` of the closing phase: the share of the present forward in its gradients. None: 0."""
    fade_prior: bool = False
    """`fade_prior` of the closing phase: the priors of BKN fade while it begins."""
    statistics_momentum: float | None = None
    """The weight of one step in running statistics and in the averages of a closing phase. None: 0.1."""
    pretrained: bool = False
    seed: int = 0
    deterministic: bool = False

    @property
    def setting(self) -> Setting:
        return Setting(self.gradient_batch, self.statistics_batch)

    @property
    def name(self) -> str:
        """A readable folder name. Different recipes may share it; their `digest` differs."""
        return f"{self.model}-{self.method}-{self.gradient_batch}x{self.statistics_batch}-s{self.seed}".replace(
            "/", "_"
        )

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:12]

    def checked(self) -> Recipe:
        """Return this recipe, or raise if it is invalid."""
        self.setting.checked()
        method(self.method)
        for name, choices in (("optimizer", Optimizer), ("schedule", Schedule), ("precision", Precision)):
            one_of(name, getattr(self, name), get_args(choices))
        for name, bounds in BOUNDS.items():
            if getattr(self, name) is not None:
                bounds.check(name, getattr(self, name))
        if self.warmup_epochs + self.finish_epochs > self.epochs:
            raise LabError(f"warm-up and finish do not fit into {self.epochs} epochs")
        for name in ("closing_end", "closing_present", "fade_prior"):
            if getattr(self, name) not in (None, False) and self.closing_start is None:
                raise LabError(f"{option(name)} needs {option('closing_start')}: without it there is no closing phase")
        if self.closing_start is not None:
            if self.closing_end is not None and self.closing_end < self.closing_start:
                raise LabError(f"{option('closing_end')} must be at least {self.closing_start}, got {self.closing_end}")
            if self.finish_epochs:
                raise LabError(f"give {option('closing_start')} or {option('finish_epochs')}, not both")
        for name in ("gain", "finish_epochs", "closing_start", "fade_prior", "statistics_momentum"):
            if getattr(self, name) not in (None, 0.0, False) and not method(self.method).takes(name):
                raise LabError(useless(name, method(self.method).title))
        return self

    def differs_in(self, other: Recipe) -> str | None:
        """The name of the first field that differs from the other recipe; None if all are equal."""
        return next((name for name, value in self.to_json().items() if getattr(other, name) != value), None)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Recipe:
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise LabError(f"this recipe holds {', '.join(unknown)}, which this version of kalmannorm does not know")
        _check_kinds(cls, values, "recipe")
        return cls(**values).checked()


_KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "int | None": (int, type(None)),
    "float": (float, int),
    "float | None": (float, int, type(None)),
    "Path | None": (str, type(None)),
}
"""JSON types that a field's annotation allows. Fields with other annotations are strings."""


def _check_kinds(cls: type[Any], values: dict[str, Any], what: str) -> None:
    for field in dataclasses.fields(cls):
        if field.name in values and not _possible(str(field.type), values[field.name]):
            raise LabError(f"this {what} is damaged: {field.name} cannot be {reprlib.repr(values[field.name])}")


def _possible(annotation: str, value: Any) -> bool:
    if type(value) not in _KINDS.get(annotation, (str,)):
        return False
    return type(value) is not float or math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a run is computed. These options change its results only by rounding."""

    device: str = "auto"
    threads: int | None = None
    """CPU threads. None: torch decides."""
    micro_batch: int | None = None
    """Examples per forward pass; gradients are accumulated. None: the whole gradient batch."""
    fuse: bool = False
    """Fuse norms with the sum and ReLU after them, by `kalmannorm.fuse`, if the method supports it."""
    compile: bool = False
    cuda_graph: bool = False
    workers: int = 4
    """Processes that read the images of an image folder."""
    data_root: Path | None = None
    """Folder of the data sets. None: the default of `kalmannorm data`."""
    save_every: int | None = None
    """Steps between checkpoints. None: one epoch."""
    log_every: int | None = None
    """Steps between log events. None: a tenth of an epoch."""
    tensorboard: bool = True

    def checked(self) -> Execution:
        check_threads(self.threads)
        for name in ("micro_batch", "save_every", "log_every"):
            if getattr(self, name) is not None:
                at_least(1).check(name, getattr(self, name))
        at_least(0).check("workers", self.workers)
        return self

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Execution:
        """From the record that was saved with a recipe. Fields that this class does not have are ignored.

        Types are checked. Ranges are not: they depend on the machine, and a user may override the values.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        kept = {name: value for name, value in values.items() if name in known}
        _check_kinds(cls, kept, "execution")
        if kept.get("data_root") is not None:
            kept["data_root"] = Path(kept["data_root"])
        return cls(**kept)
