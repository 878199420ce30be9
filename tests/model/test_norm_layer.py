"""`norm_layer` and `rewire` make of a constructor's model what `convert` makes of its BatchNorm model."""

from __future__ import annotations

import functools
import pickle
import warnings

import pytest
import torch
import torchvision
from torch import nn

import kalmannorm
from kalmannorm import BatchKalmanNorm2d, norm_layer, rewire


def images(batch=4, size=64):
    return torch.randn(batch, 3, size, size)


CONSTRUCTORS = {
    "resnet18": torchvision.models.resnet18,
    "mobilenet_v2": functools.partial(torchvision.models.mobilenet_v2, width_mult=0.25),
    "regnet_y_400mf": torchvision.models.regnet_y_400mf,
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_built_model_learns_as_a_converted_one(name):
    build, x = CONSTRUCTORS[name], images()
    converted = kalmannorm.convert(build(num_classes=5), x, statistics_batch_size=2, gain=0.7)
    built = build(num_classes=5, norm_layer=norm_layer(2, gain=0.7))
    report = rewire(built, x)
    assert [(n.name, n.sources, n.reason) for n in report.norms] == [
        (n.name, n.sources, n.reason) for n in kalmannorm.wiring(converted).norms
    ]
    assert [type(m) for m in built.modules()] == [type(m) for m in converted.modules()]
    built.load_state_dict(converted.state_dict())
    outputs = []
    for model in (built, converted):
        torch.manual_seed(1)  # dropout
        y = model.train()(x)
        y.square().mean().backward()
        outputs.append([y, *(p.grad for p in model.parameters()), *model.buffers()])
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


def test_an_optimizer_from_before_the_wiring_trains_the_gains():
    model = torchvision.models.resnet18(num_classes=5, norm_layer=norm_layer(2))
    optimizer = torch.optim.SGD(kalmannorm.parameter_groups(model, 1e-4), lr=0.1)
    rewire(model, images(2))
    before = kalmannorm.gains(model)
    assert len(before) == 19  # the first norm has no prior, so no gain
    model(images()).square().mean().backward()
    optimizer.step()
    after = kalmannorm.gains(model)
    assert all(after[name] != gain for name, gain in before.items())


def test_a_batchnorm_checkpoint_loads_before_and_after_the_wiring():
    source = torchvision.models.resnet18(num_classes=5)
    source.train()(images())
    x = images(2)
    model = torchvision.models.resnet18(num_classes=5, norm_layer=norm_layer(2))
    model.load_state_dict(source.state_dict())
    torch.testing.assert_close(model.eval()(x), source.eval()(x))
    rewire(model, x)
    model.load_state_dict(source.state_dict())
    torch.testing.assert_close(model.eval()(x), source.eval()(x))
    plain = kalmannorm.to_batchnorm(model)
    assert set(plain.state_dict()) == set(source.state_dict())
    assert type(plain.bn1) is nn.BatchNorm2d
    assert not any(isinstance(m, nn.BatchNorm2d) for m in kalmannorm.fold(model).modules())


def test_a_model_that_is_not_wired_says_so_once():
    model = torchvision.models.resnet18(num_classes=5, norm_layer=norm_layer(2))
    with pytest.warns(UserWarning, match=r"not wired.*kalmannorm\.rewire\(model, example_input\)"):
        model(images())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(images())
        model.eval()(images())
        rewire(model.train(), images())
        model(images())
    assert type(pickle.loads(pickle.dumps(model)).bn1) is BatchKalmanNorm2d


def test_batch_norms_that_the_constructor_builds_itself_stay_and_feed():
    own = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), norm_layer(2)(8))
    own[1].running_mean.fill_(0.5)
    report = rewire(own, images())
    assert [(norm.name, norm.wired) for norm in report.norms] == [("4", True)]
    assert type(own[1]) is nn.BatchNorm2d
    assert bool((own[1].running_mean == 0.5).all())


def test_volumes_and_vectors():
    volumes = nn.Sequential(nn.Conv3d(1, 4, 3), norm_layer(1, dims=3)(4), nn.Conv3d(4, 4, 3), norm_layer(1, dims=3)(4))
    assert [norm.wired for norm in rewire(volumes, torch.randn(1, 1, 8, 8, 8)).norms] == [False, True]
    vectors = nn.Sequential(nn.Linear(4, 4), norm_layer(2, dims=1)(4), nn.Linear(4, 4), norm_layer(2, dims=1)(4))
    assert [norm.wired for norm in rewire(vectors, torch.randn(4, 4)).norms] == [False, True]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: norm_layer(0), ValueError, "statistics_batch_size"),
        (lambda: norm_layer(2, dims=4), ValueError, "dims must be 1, 2 or 3, got 4"),
        (lambda: norm_layer(2, gain=1.5), ValueError, "gain"),
        (lambda: norm_layer(2, transition="learned"), TypeError, "transition"),
        (lambda: rewire(nn.Sequential(nn.Conv2d(3, 4, 3)), images()), ValueError, "was not converted"),
    ],
)
def test_mistakes(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_model_converted_as_learned_cannot_take_in_such_norms():
    model = kalmannorm.convert(torchvision.models.resnet18(num_classes=5), images(2), transition="learned")
    model.layer4[1].bn2 = norm_layer(2)(512)
    with pytest.raises(ValueError, match=r"'layer4\.1\.bn2' was built by norm_layer.*'learned'"):
        rewire(model, images(2))
