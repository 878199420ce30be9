"""What an experiment is: a question of the paper, the lines that answer it, and the numbers that the paper gives.

The paper has two nets, Inception-v2 and ResNet-101; a stand-in data set has nets of its own in their roles.
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

    `ours`: past the paper, left out by --paper-only. `cheap`: only on a stand-in, where one more line costs little.
    `wide`: all channels scaled until the net has as many parameters as the one with `bkn-learned`.
    """

    method: str
    setting: Setting
    title: str = ""
    ours: bool = False
    cheap: bool = False
    wide: bool = False

    @property
    def key(self) -> str:
        return f"{self.method}{'-wide' * self.wide}-{self.setting.gradient_batch}x{self.setting.statistics_batch}"

    @property
    def name(self) -> str:
        return self.title or naming.title(self.method)

    @property
    def place(self) -> str:
        """Its setting, as far as that matters to the method."""
        return naming.at(self.method, self.setting)

    @property
    def label(self) -> str:
        return f"{self.name} {self.place}"


@dataclass(frozen=True)
class Published:
    """A number that the paper prints: accuracy in % (`quantity` is the way of inference), or what `quantity` names."""

    arm: str
    quantity: str
    value: float
    role: Role = "inception"
    dataset: str | None = None
    """None: of the only data set that the paper has for this experiment."""


@dataclass(frozen=True)
class Claim:
    """A difference that the paper prints: BKN over another method, in points."""

    over: str
    """The arm's key."""
    points: float
    role: Role = "inception"
    mode: str = "population"
    at: float | None = None
    """Where in the training, as a share of its length; None is the end."""


@dataclass(frozen=True)
class Experiment:
    """One of the paper's tables or figures.

    `datasets` are those of the paper. `columns` are the ways of inference that a table shows, with their headings;
    curves are drawn for the modes in `curves`.
    """

    name: str
    title: str
    question: str
    source: str
    """Where it stands in the paper."""
    datasets: tuple[str, ...]
    roles: tuple[Role, ...]
    arms: tuple[Arm, ...]
    columns: tuple[tuple[str, str], ...]
    curves: tuple[str, ...] = ("population",)
    published: tuple[Published, ...] = ()
    claims: tuple[Claim, ...] = ()
    steps_to: str | None = None
    """The key of the arm whose best accuracy the others are timed to."""
    analysed: bool = False
    """Whether each trained run is analysed: the variance gap."""
    timed: bool = False
    """Steps are timed instead of trained."""
    counted: bool = False
    """Whether parameters are a column."""
    notes: tuple[str, ...] = ()

    def paper(self, arm: str, quantity: str, role: Role, dataset: str) -> float | None:
        """The paper's number for this cell; a stand-in is shown beside the paper's first data set."""
        for number in self.published:
            right = number.dataset in (None, dataset if dataset in self.datasets else self.datasets[0])
            if right and (number.arm, number.quantity, number.role) == (arm, quantity, role):
                return number.value
        return None
