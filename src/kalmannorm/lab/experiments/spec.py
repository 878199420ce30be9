"""The definition of an experiment: a question of the paper, the arms that answer it, and the paper's numbers.

The paper has two networks, Inception-v2 and ResNet-101. A stand-in data set has its own networks in these roles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kalmannorm.lab.recipes.setting import Setting
from kalmannorm.lab.words import naming

Role = Literal["inception", "resnet"]


@dataclass(frozen=True)
class Arm:
    """One line of an experiment: a method at a setting.

    `ours`: not in the paper, omitted by --paper-only. `cheap`: only on a stand-in, where one more line costs little.
    `wide`: all channels are scaled until the network has as many parameters as the one with `bkn-learned`. `closing`:
    the shares of training at which a closing phase begins and ends. `fades`: priors fade in it. `warmup`: epochs in
    which the learning rate rises.
    """

    method: str
    setting: Setting
    title: str = ""
    ours: bool = False
    cheap: bool = False
    wide: bool = False
    closing: tuple[float, float] | None = None
    fades: bool = False
    warmup: float = 0.0

    @property
    def kind(self) -> str:
        """The method and what was changed, as a part of names of folders."""
        return f"{self.method}{'-wide' * self.wide}{'-closing' * (self.closing is not None)}"

    @property
    def key(self) -> str:
        return f"{self.kind}-{self.setting.gradient_batch}x{self.setting.statistics_batch}"

    @property
    def name(self) -> str:
        return (self.title or naming.title(self.method)) + ", closing phase" * (self.closing is not None)

    @property
    def place(self) -> str:
        """Its setting, as far as the method depends on it."""
        return naming.at(self.method, self.setting)

    @property
    def label(self) -> str:
        return f"{self.name} {self.place}"


@dataclass(frozen=True)
class Published:
    """A number from the paper: accuracy in % (`quantity` is the way of inference), or another named quantity."""

    arm: str
    quantity: str
    value: float
    role: Role = "inception"
    dataset: str | None = None
    """None: the only data set that the paper has for this experiment."""


@dataclass(frozen=True)
class Claim:
    """A difference from the paper: BKN minus another method, in points."""

    over: str
    """The arm's key."""
    points: float
    role: Role = "inception"
    mode: str = "population"
    at: float | None = None
    """The time of the comparison as a share of the training. None is the end."""


@dataclass(frozen=True)
class Experiment:
    """One of the paper's tables or figures.

    `datasets` are those of the paper. `columns` are the ways of inference in a table, with their headings. Curves are
    drawn for the modes in `curves`.
    """

    name: str
    title: str
    question: str
    source: str
    """The table or figure in the paper."""
    datasets: tuple[str, ...]
    roles: tuple[Role, ...]
    arms: tuple[Arm, ...]
    columns: tuple[tuple[str, str], ...]
    curves: tuple[str, ...] = ("population",)
    published: tuple[Published, ...] = ()
    claims: tuple[Claim, ...] = ()
    steps_to: str | None = None
    """The key of an arm. Its best accuracy is the goal in the table of steps."""
    analysed: bool = False
    """Whether each trained run is analysed for the variance gap."""
    timed: bool = False
    """Whether steps are timed, without training."""
    counted: bool = False
    """Whether the tables have a column of parameters."""
    widened: bool = False
    """Whether the question is about the wide arms. Else they are left out if the network cannot be widened."""
    notes: tuple[str, ...] = ()

    def paper(self, arm: str, quantity: str, role: Role, dataset: str) -> float | None:
        """The paper's number for this cell. A stand-in gets that of the paper's first data set."""
        for number in self.published:
            right = number.dataset in (None, dataset if dataset in self.datasets else self.datasets[0])
            if right and (number.arm, number.quantity, number.role) == (arm, quantity, role):
                return number.value
        return None
