"""Models by name: the lab's own nets, and whatever torchvision or timm build. All are plain BatchNorm models."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial

from torch import nn

from kalmannorm.lab.errors import LabError
from kalmannorm.lab.models.cifar_inception import CifarInception
from kalmannorm.lab.models.digits_net import DigitsNet

OWN: dict[str, Callable[..., nn.Module]] = {
    "digits-net": DigitsNet,
    "cifar-inception": CifarInception,
}


def names() -> list[str]:
    """The lab's own nets; torchvision's and timm's classifiers are known by their names too."""
    return list(OWN)


def build(
    name: str, *, classes: int, shape: tuple[int, int, int], width: float = 1.0, pretrained: bool = False
) -> nn.Module:
    """A model for images of `shape` (C, H, W), initialised from torch's global generator.

    Args:
        name: one of `names()`, or a classifier of torchvision ("resnet101") or timm ("timm/resnet26d", or bare).
        classes: of the data; the width of the last layer.
        shape: of an image as the data set gives it.
        width: scales every channel count of our own nets, rounded, at least 1.
        pretrained: torchvision's or timm's weights for ImageNet; a last layer of another width starts afresh.
    """
    if name in OWN:
        if pretrained:
            raise LabError(f"there are no pretrained weights for {name}; torchvision's and timm's models have them")
        return OWN[name](classes, shape[0], width)
    raise LabError(f"unknown model {name!r}")
