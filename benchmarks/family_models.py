"""The models of `families.py`: the smallest of every timm family with BatchNorm, and all torchvision classifiers."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

LARGE = 40_000_000
"""Larger models of torchvision get images of 96 × 96, to keep the run short."""


class Chosen(NamedTuple):
    """A model by its library, family (the module that defines it) and name."""

    library: str
    family: str
    model: str


def norms_of(model: nn.Module) -> dict[str, nn.Module]:
    """Every batch norm by name, found by its base class and not in the way of `convert`."""
    found = {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
    return {name: m for name, m in found.items() if not isinstance(m, _InstanceNorm)}


def build(chosen: Chosen, device: str = "cpu") -> nn.Module:
    """The model with random weights, as its library initialises it."""
    with torch.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if chosen.library == "timm":
            return timm.create_model(chosen.model, pretrained=False)
        own = {"init_weights": device != "meta"} if chosen.model in ("inception_v3", "googlenet") else {}
        model: nn.Module = torchvision.models.get_model(chosen.model, weights=None, **own)
        return model


def input_size(chosen: Chosen, model: nn.Module) -> tuple[int, int, int]:
    if chosen.library == "timm":
        size: tuple[int, int, int] = tuple(model.default_cfg["input_size"])  # type: ignore[union-attr, index]
        return size
    if sum(p.numel() for p in model.parameters()) > LARGE:
        return (3, 96, 96)
    return (3, 299, 299) if chosen.model == "inception_v3" else (3, 224, 224)


def noise(chosen: Chosen, model: nn.Module, examples: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(examples, *input_size(chosen, model), generator=generator)


def _on_meta(chosen: Chosen) -> nn.Module | None:
    for device in ("meta", "cpu"):  # torchvision's RegNets read their own weights while they are built
        try:
            return build(chosen, device)
        except (NotImplementedError, RuntimeError):
            continue
    return None


def search() -> list[Chosen]:
    """Build all models and inspect them. This takes some minutes."""
    found = []
    for family in timm.list_modules():
        sized = []
        for name in timm.list_models(module=family):
            chosen = Chosen("timm", family, name)
            model = _on_meta(chosen)
            if model is not None and norms_of(model):
                sized.append((sum(p.numel() for p in model.parameters()), chosen))
        found += [min(sized)[1]] if sized else []
    for name in torchvision.models.list_models(module=torchvision.models):
        model = _on_meta(Chosen("torchvision", "", name))
        if model is not None and norms_of(model):
            found.append(Chosen("torchvision", type(model).__module__.rpartition(".")[2], name))
    return found
