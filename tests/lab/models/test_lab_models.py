"""The lab's models: the architectures that the papers give, and what convert makes of them."""

from __future__ import annotations

import importlib.util
import math
import operator

import pytest
import torch
from torch import fx, nn

import kalmannorm
from kalmannorm.lab import models
from kalmannorm.lab.errors import LabError

OWN = [name for name in models.names() if name not in ("cifar-resnet-56", "cifar-resnet-110")]  # deeper, not other


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


@pytest.mark.parametrize(
    ("name", "classes", "shape", "parameters", "layers"),
    [
        ("digits-net", 10, (1, 8, 8), 26_074, 5),
        ("cifar-inception", 10, (3, 32, 32), 1_420_898, 19),  # design.md: 1.4 M, not the 49 M of the paper
        ("cifar-resnet-20", 10, (3, 32, 32), 269_722, 19),  # 0.27 M in the table of He et al. 2015
        ("cifar-resnet-32", 10, (3, 32, 32), 464_154, 31),  # 0.46 M
        ("cifar-resnet-56", 10, (3, 32, 32), 853_018, 55),  # 0.85 M
        ("cifar-resnet-110", 10, (3, 32, 32), 1_727_962, 109),  # 1.7 M
        ("bn-inception", 1000, (3, 224, 224), 11_194_984, 69),
    ],
)
def test_parameters(name, classes, shape, parameters, layers):
    model = models.build(name, classes=classes, shape=shape)
    assert count(model) == parameters
    assert len(norms(model)) == layers


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (3, 15, 13)], ids=["digits", "cifar", "odd"])
@pytest.mark.parametrize("name", OWN)
def test_runs_on_any_image(name, shape):
    with torch.device("meta"):
        model = models.build(name, classes=7, shape=shape, width=0.25)
        assert model(torch.empty(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("name", OWN)
def test_every_norm_but_the_first_is_wired(name):
    shape = (3, 32, 32)
    model = models.build(name, classes=10, shape=shape, width=0.125)
    converted = kalmannorm.convert(model, torch.randn(2, *shape), statistics_batch_size=2)
    without = [row.name for row in kalmannorm.wiring(converted).norms if not row.sources]
    first = next(name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d))
    assert without == [first]


@pytest.mark.parametrize("name", [name for name in OWN if "resnet" not in name])
def test_norm_follows_each_convolution_and_relu_each_norm(name):
    """Ioffe & Szegedy's order, on every path."""
    graph = fx.symbolic_trace(models.build(name, classes=10, shape=(3, 32, 32), width=0.125))
    modules = dict(graph.named_modules())
    convolutions = [node for node in graph.graph.nodes if isinstance(modules.get(node.target), nn.Conv2d)]
    assert len(convolutions) == len(norms(graph))
    for node in convolutions:
        (norm,) = node.users
        assert isinstance(modules[norm.target], nn.BatchNorm2d)
        (activation,) = norm.users
        assert activation.target is torch.nn.functional.relu


def test_resnets_are_pre_activated():
    """The sum of a block goes on as it is: nothing but the next block's norm and shortcut read it."""
    graph = fx.symbolic_trace(models.build("cifar-resnet-20", classes=10, shape=(3, 32, 32)))
    modules = dict(graph.named_modules())
    sums = [node for node in graph.graph.nodes if node.target is operator.add]
    assert len(sums) == 9
    for node in sums:
        readers = [modules.get(user.target) for user in node.users]
        assert sum(isinstance(reader, nn.BatchNorm2d) for reader in readers) == 1
        assert not any(isinstance(reader, nn.Conv2d) for reader in readers)


def test_bn_inception_has_the_maps_of_its_table():
    with torch.device("meta"):
        model = models.build("bn-inception", classes=1000, shape=(3, 224, 224))
        x = model.stem(torch.empty(1, 3, 224, 224))
        assert x.shape[1:] == (192, 28, 28)
        found = []
        for block in model.blocks:
            x = block(x)
            found.append((x.shape[1], x.shape[2]))
    assert found == [(256, 28), (320, 28), (576, 14), *[(576, 14)] * 4, (1024, 7), (1024, 7), (1024, 7)]


def test_cifar_inception_has_the_maps_of_the_paper():
    with torch.device("meta"):
        model = models.build("cifar-inception", classes=10, shape=(3, 32, 32))
        x = model.stem(torch.empty(1, 3, 32, 32))
        found = [tuple(x.shape[1:])]
        for block in model.blocks:
            x = block(x)
            found.append(tuple(x.shape[1:]))
    assert found == [(32, 16, 16), (256, 16, 16), (480, 16, 16), (512, 16, 16)]
    assert model.hidden.out_features == 1000


@pytest.mark.parametrize("name", OWN)
def test_width_scales_every_channel(name):
    def channels(width: float) -> list[int]:
        with torch.device("meta"):
            model = models.build(name, classes=10, shape=(3, 32, 32), width=width)
        return [norm.num_features for norm in norms(model)]

    plain = channels(1.0)
    assert channels(1.3) == [round(1.3 * each) for each in plain]
    assert channels(2.0) == [2 * each for each in plain]
    assert min(channels(0.001)) == 1


def test_convolutions_start_with_he_fan_out():
    model = models.build("bn-inception", classes=10, shape=(3, 64, 64))
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 20_000:
            fan_out = module.out_channels * math.prod(module.kernel_size)
            assert module.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.05)


def test_a_seed_gives_the_same_weights():
    first, second = (
        (torch.manual_seed(3), models.build("digits-net", classes=10, shape=(1, 8, 8)))[1] for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("resnet18", (1, 32, 32)),
        ("googlenet", (3, 64, 64)),  # auxiliary heads in training, unless switched off
        ("timm/resnet14t", (1, 32, 32)),
        ("resnet14t", (3, 32, 32)),  # timm's by its bare name
    ],
)
def test_names_of_torchvision_and_timm(name, shape):
    model = models.build(name, classes=7, shape=shape).train()
    assert model(torch.randn(2, *shape)).shape == (2, 7)
    assert norms(model)


def test_pretrained_weights_are_loaded_but_for_another_head(monkeypatch):
    import torchvision

    source = torchvision.models.resnet18(num_classes=1000)
    weights = torchvision.models.get_model_weights("resnet18")
    monkeypatch.setattr(weights, "get_state_dict", lambda self, **_: source.state_dict())
    state = models.build("resnet18", classes=7, shape=(3, 64, 64), pretrained=True).state_dict()
    assert state["fc.weight"].shape == (7, 512)
    assert all(torch.equal(value, state[key]) for key, value in source.state_dict().items() if "fc" not in key)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet19", {}, "did you mean 'resnet18'"),
        ("bninception", {}, "did you mean 'bn-inception'"),
        ("squeezenet1_1", {}, "squeezenet1_1 contains no batch norm"),
        ("inception_v3", {}, "does not run on images of 32×32 .*--image-size"),
        ("resnet18", {"width": 2.0}, "width scales only the lab's own networks"),
        ("digits-net", {"pretrained": True}, "no pretrained weights for digits-net"),
        ("digits-net", {"width": 0.0}, "width must be positive"),
        ("resnet18", {"pretrained": True, "shape": (1, 32, 32)}, "takes images of 3 channels"),
        ("fasterrcnn_resnet50_fpn", {}, "unknown model"),
    ],
)
def test_mistakes_are_one_line(name, options, message):
    with pytest.raises(LabError, match=message) as found:
        models.build(name, **{"classes": 10, "shape": (3, 32, 32), **options})
    assert "\n" not in str(found.value)


def test_timm_is_optional(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "timm" else find_spec(name))
    with pytest.raises(LabError, match="pip install timm"):
        models.build("timm/resnet26d", classes=10, shape=(3, 32, 32))
    with pytest.raises(LabError, match="unknown model"):
        models.build("resnet26d", classes=10, shape=(3, 32, 32))
