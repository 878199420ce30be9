"""A fused model has the numbers of the model it was: outputs, gradients and buffers, in training and inference."""

from __future__ import annotations

import copy

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

import kalmannorm
from kalmannorm._norms.grouped import GroupedNorm
from support.fusion_nets import COUNTS, NETS, SHAPE, assert_same, converted, counts, images, pair, trained
from support.wide import narrow


@pytest.fixture
def x():
    return images()


@pytest.mark.parametrize("name", narrow(NETS, ("basic", "bottleneck", "bn-inception")))
def test_trains_with_the_same_numbers(name, x):
    model, fused = pair(name)
    assert counts(fused) == COUNTS[name], str(fused.fusion)
    assert list(fused.state_dict()) == list(model.state_dict())
    assert_same(list(fused.buffers()), list(model.buffers()), 0)
    assert_same(trained(fused, x), trained(model, x))
    with torch.no_grad():
        assert_same([fused.eval()(x)], [model.eval()(x)])


@pytest.mark.parametrize("to", ["ghost", "renorm"])
def test_the_baselines_fuse_too(to, x):
    model = converted("basic", to)
    fused = kalmannorm.fuse(model, x)
    assert counts(fused) == COUNTS["basic"]
    assert_same(trained(fused, x), trained(model, x))


@pytest.mark.parametrize("options", [{}, {"covariance": "full"}], ids=["diagonal", "full"])
def test_learned_priors(options, x):
    model = converted("basic", transition="learned", **options)
    fused = kalmannorm.fuse(model, x)
    assert counts(fused) == COUNTS["basic"]
    assert_same(trained(fused, x, 2), trained(model, x, 2))


@pytest.fixture(scope="module")
def used():
    """A net that was trained for a step, and then fused."""
    model = converted("bottleneck")
    trained(model, images(), 1)
    return model, kalmannorm.fuse(model, images())


@pytest.mark.parametrize("mode", ["population", "batch", "example"])
def test_every_inference(used, mode, x):
    model, fused = copy.deepcopy(used)
    assert counts(fused) == COUNTS["bottleneck"]
    for each in (model, fused):
        kalmannorm.set_inference(each, mode)
    assert_same(trained(fused, x, mode=False), trained(model, x, mode=False))  # gradients in eval mode, too
    with torch.no_grad():
        assert_same([fused(x)], [model(x)])


def test_frozen_statistics(x):
    model = converted()
    kalmannorm.freeze_statistics(model)
    fused = kalmannorm.fuse(model, x)
    assert counts(fused) == COUNTS["basic"]
    assert_same(trained(fused, x), trained(model, x))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_autocast(layout):
    """The dtypes that meet in a sum may differ under autocast; outputs stay near those of the unfused model."""
    torch.manual_seed(0)
    x = torch.randn(SHAPE).to(memory_format=layout)
    model = kalmannorm.convert(NETS["basic"](), x, statistics_batch_size=2).to(memory_format=layout)
    fused = kalmannorm.fuse(model, x)
    assert counts(fused) == COUNTS["basic"]
    with torch.autocast("cpu", torch.bfloat16):
        for each in (model, fused):
            each(x).float().sum().backward()
        outputs = [each.eval()(x).float() for each in (fused, model)]
    torch.testing.assert_close(*outputs, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 3, 5, 5), (3, 1, 1), (2, 4, 3, 5, 5)], ids=str)
def test_a_norm_asked_to_add_anything(shape, dtype, training):
    """What the op cannot add, of another dtype or shape, is added after it, as the model's own code would."""
    norm = kalmannorm.GhostBatchNorm2d(3, statistics_batch_size=2).train(training)
    x = torch.randn(4, 3, 5, 5).bfloat16()
    residual = torch.randn(shape).to(dtype)
    actual, expected = norm(x, residual=residual, relu=True), F.relu(norm(x) + residual)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02)


def test_another_size_of_batch_and_image(x):
    model, fused = pair()
    for shape in ((3, 3, 24, 24), (2, 3, 32, 20), (0, 3, 24, 24)):
        other = torch.randn(shape).double()
        assert_same([fused(other)], [model(other)])


def test_accumulated(x):
    model, fused = pair()
    for each in (model, fused):
        with kalmannorm.accumulate_statistics(each):
            for part in x.split(2):
                each(part).sum().backward()
    assert_same(list(fused.buffers()), list(model.buffers()))
    assert_same([p.grad for p in fused.parameters()], [p.grad for p in model.parameters()])


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", ["bottleneck", "regnet"])
def test_runs_as_reported(name, training, x):
    """Each norm is asked for the ReLU and the sum, and nobody else is."""
    fused = pair(name)[1].train(training)
    asked, relus = {}, []
    for name, module in fused.named_modules():
        if isinstance(module, GroupedNorm):
            module.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: asked.update({name: kwargs}), with_kwargs=True
            )
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(lambda *_: relus.append(1))
    fused(x)
    assert not relus
    kinds = {("relu",): "ReLU", ("relu", "residual"): "sum and ReLU"}
    assert {name: kinds[tuple(sorted(kwargs))] for name, kwargs in asked.items() if kwargs} == fused.fusion.fused


def test_torchvision_counts():
    """ResNet-50: all but the four that are added to a norm."""
    x = torch.randn(2, 3, 32, 32)
    model = kalmannorm.convert(torchvision.models.resnet50(num_classes=5), x, to="ghost")
    fused = kalmannorm.fuse(model, x, inplace=True)
    assert counts(fused) == (33, 16, 4)
    assert str(fused.fusion).splitlines()[0] == "49 of 53 norms fused: 33 with ReLU, 16 with sum and ReLU"
