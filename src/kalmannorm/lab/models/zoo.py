"""Classifiers of torchvision and timm, by name, with the classes and channels of the data."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from kalmannorm.lab.errors import LabError

TIMM = "timm/"
WITH_AUXILIARY_HEADS = ("googlenet", "inception_v3")


def torchvision_names() -> list[str]:
    import torchvision

    return list(torchvision.models.list_models(module=torchvision.models))


def timm_names() -> list[str]:
    """Empty if timm, which is optional, is not installed."""
    if importlib.util.find_spec("timm") is None:
        return []
    import timm

    return list(timm.list_models())


def library_of(name: str) -> Literal["torchvision", "timm"] | None:
    """The library that builds a model of this name; torchvision if both do, None if neither does."""
    bare = name.removeprefix(TIMM)
    if name in torchvision_names():
        return "torchvision"
    if name != bare and importlib.util.find_spec("timm") is None:
        raise LabError(f"{name} needs timm: pip install timm")
    return "timm" if bare.split(".")[0] in timm_names() else None  # after the dot timm names its weights


def build(name: str, classes: int, shape: tuple[int, int, int], pretrained: bool) -> nn.Module | None:
    """The model of this name, or None if neither library has one."""
    library = library_of(name)
    if library is None:
        return None
    if library == "torchvision":
        model = _from_torchvision(name, classes, shape[0], pretrained)
    else:
        model = _from_timm(name.removeprefix(TIMM), classes, shape[0], pretrained)
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise LabError(f"{name} contains no batch norm, so there is nothing to compare; try resnet18")
    _check_output(name, model, classes, shape)
    return model


def _from_torchvision(name: str, classes: int, channels: int, pretrained: bool) -> nn.Module:
    import torchvision

    options: dict[str, Any] = {}
    if name in WITH_AUXILIARY_HEADS:  # with these a training forward would return more than logits
        options = {"aux_logits": False, "init_weights": not pretrained, "transform_input": pretrained}
    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes, **options)
    if pretrained:
        if channels != 3:
            raise LabError(f"the pretrained {name} takes images of 3 channels; the data have {channels}")
        try:
            weights = torchvision.models.get_model_weights(name).DEFAULT.get_state_dict(progress=False)
        except (OSError, RuntimeError) as error:
            raise _no_weights(name, error) from error
        own = model.state_dict()
        fitting = {key: value for key, value in weights.items() if key in own and own[key].shape == value.shape}
        model.load_state_dict({**own, **fitting})
    elif channels != 3:
        _replace_first_convolution(name, model, channels)
    return model


def _replace_first_convolution(name: str, model: nn.Module, channels: int) -> None:
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv2d) and module.in_channels == 3:
            parent, _, attribute = path.rpartition(".")
            fresh = nn.Conv2d(
                channels,
                module.out_channels,
                module.kernel_size,  # type: ignore[arg-type]
                module.stride,  # type: ignore[arg-type]
                module.padding,  # type: ignore[arg-type]
                module.dilation,  # type: ignore[arg-type]
                bias=module.bias is not None,
                padding_mode=module.padding_mode,
            )
            nn.init.kaiming_normal_(fresh.weight, mode="fan_out", nonlinearity="relu")
            setattr(model.get_submodule(parent), attribute, fresh)
            return
    raise LabError(f"{name} takes images of 3 channels; the data have {channels}")


def _from_timm(name: str, classes: int, channels: int, pretrained: bool) -> nn.Module:
    import timm

    try:
        model: nn.Module = timm.create_model(name, pretrained=pretrained, num_classes=classes, in_chans=channels)
    except Exception as error:  # the errors of a download depend on timm's source
        if not pretrained:
            raise LabError(f"timm cannot build {name} for this data: {error}") from error
        raise _no_weights(name, error) from error
    return model


def _no_weights(name: str, error: Exception) -> LabError:
    first_line = (str(error) or type(error).__name__).splitlines()[0]
    return LabError(f"cannot get the pretrained weights of {name} ({first_line}): leave out --pretrained")


def _check_output(name: str, model: nn.Module, classes: int, shape: tuple[int, int, int]) -> None:
    """Run the model on torch's meta device, which computes shapes only, and check the shape of its output."""
    twin = copy.deepcopy(model).to("meta").eval()
    try:
        with torch.no_grad():
            output = twin(torch.empty(2, *shape, device="meta"))
    except NotImplementedError:
        return  # the meta device lacks an operation: the first step will show errors
    except (RuntimeError, AssertionError, ValueError) as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        size = f"{shape[1]}×{shape[2]}"
        raise LabError(f"{name} does not run on images of {size} ({first_line}): try a larger --image-size") from error
    if not isinstance(output, torch.Tensor) or output.shape != (2, classes):
        raise LabError(f"{name} is not a classifier for {classes} classes: it does not return their logits")
