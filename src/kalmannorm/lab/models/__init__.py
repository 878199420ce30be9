"""Models by name: the lab's own networks, and those of torchvision and timm. All are plain BatchNorm models.

The norm is chosen later, by `kalmannorm.convert`, as a user would do it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial

from torch import nn

from kalmannorm.lab.errors import LabError
from kalmannorm.lab.models import zoo
from kalmannorm.lab.models.bn_inception import BNInception
from kalmannorm.lab.models.cifar_inception import CifarInception
from kalmannorm.lab.models.cifar_resnet import DEPTHS, CifarResNet
from kalmannorm.lab.models.digits_net import DigitsNet

__all__ = ["build", "check_known", "names"]

OWN: dict[str, Callable[[int, int, float], nn.Module]] = {
    "digits-net": DigitsNet,
    "cifar-inception": CifarInception,
    **{f"cifar-resnet-{depth}": partial(CifarResNet, depth) for depth in DEPTHS},
    "bn-inception": BNInception,
}


def names() -> list[str]:
    """The lab's own networks. Names of torchvision and timm are also accepted."""
    return list(OWN)


def check_known(name: str) -> None:
    """Raise if there is no model of this name. Nothing is built."""
    if name not in OWN and zoo.library_of(name) is None:
        raise LabError(_unknown(name))


def build(
    name: str, *, classes: int, shape: tuple[int, int, int], width: float = 1.0, pretrained: bool = False
) -> nn.Module:
    """A model, initialised from torch's global generator.

    Args:
        name: one of `names()`, or a classifier of torchvision ("resnet101") or timm ("timm/resnet26d" or "resnet26d").
        classes: classes of the data, the width of the last layer.
        shape: (C, H, W) of an image in the data set.
        width: scales every channel count of our own networks, rounded, at least 1.
        pretrained: use ImageNet weights of torchvision or timm. A last layer of another width is initialised again.
    """
    if not width > 0:
        raise LabError(f"width must be positive, got {width}")
    if name in OWN:
        if pretrained:
            raise LabError(f"there are no pretrained weights for {name}; torchvision's and timm's models have them")
        return OWN[name](classes, shape[0], width)
    model = zoo.build(name, classes, shape, pretrained)
    if model is None:
        raise LabError(_unknown(name))
    if width != 1:
        raise LabError(f"width scales only the lab's own networks ({', '.join(OWN)}), not {name}")
    return model


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, [*OWN, *zoo.torchvision_names(), *zoo.timm_names()], 1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown model {name!r}; {meant}choose from {', '.join(OWN)}, or a name of torchvision or timm"
