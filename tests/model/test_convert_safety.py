"""Conversion is all or nothing, keeps what others put on a norm, and refuses by name what it cannot keep."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from kalmannorm import BatchKalmanNorm2d, convert, rewire, to_batchnorm, wiring


def image(batch=4, size=8):
    return torch.randn(batch, 3, size, size)


def chain(norms=3):
    layers = []
    for i in range(norms):
        layers += [nn.Conv2d(8 if i else 3, 8, 1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers)


MISTAKES = {
    "gain": ({"gain": 2.0}, ValueError, "gain must lie inside"),
    "negative rank": ({"transition": "learned", "rank": -1}, ValueError, "rank must be at least 1"),
    "no rank": ({"transition": "learned", "rank": 0}, ValueError, "rank must be at least 1"),
    "half a rank": ({"transition": "learned", "rank": 2.5}, TypeError, "rank must be an int"),
    "gains of full covariance": (
        {"transition": "learned", "covariance": "full", "per_channel_gain": True}, ValueError, "must be False with cov"
    ),
    "momentum": ({"to": "ghost", "momentum": 3.0}, ValueError, "momentum must lie in"),
    "clip": ({"to": "renorm", "r_max": 0.5}, ValueError, "r_max must be at least 1"),
    "another's option": ({"to": "renorm", "total_variance": False}, TypeError, "does not take total_variance"),
    "groups": ({"to": "group", "num_groups": 0}, ValueError, "num_groups must be at least 1"),
    "example of nothing": (
        {"inference": "example", "statistics_batch_size": 2}, ValueError, "'4': inference='example' needs running"
    ),
    "renorm of nothing": ({"to": "renorm"}, ValueError, "'4': track_running_stats must be True"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "kind", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_leaves_the_model_as_it_was(options, kind, message):
    model = chain()
    if message.startswith("'4'"):
        model[4] = nn.BatchNorm2d(8, track_running_stats=False)
    before = {name: (type(module), set(vars(module))) for name, module in model.named_modules()}
    with pytest.raises(kind, match=message):
        convert(model, image(), inplace=True, **options)
    assert {name: (type(module), set(vars(module))) for name, module in model.named_modules()} == before
    assert isinstance(convert(model, image(), inplace=True)[1], BatchKalmanNorm2d)


@pytest.mark.parametrize("to", ["kalman", "renorm", "group"])
def test_what_others_put_on_a_norm_stays(to):
    model = chain()
    model[1].register_buffer("calibration", torch.ones(3))
    model[1].register_buffer("scratch", torch.ones(3), persistent=False)
    model[1].register_parameter("extra", nn.Parameter(torch.ones(2)))
    model[1].observer = nn.Linear(2, 2)
    extra, observer, before = model[1].extra, model[1].observer, list(model.state_dict())
    convert(model, image(), to=to, inplace=True)
    assert {"1.calibration", "1.extra", "1.observer.weight"} <= set(model.state_dict())
    assert model[1].extra is extra and model[1].observer is observer
    assert "1.scratch" in dict(model.named_buffers()) and "1.scratch" not in model.state_dict()
    model(image()).sum().backward()
    assert copy.deepcopy(model).bfloat16()[1].calibration.dtype == torch.bfloat16
    if to == "group":
        assert not hasattr(model[1], "running_mean")
        return
    to_batchnorm(model, inplace=True)
    assert list(model.state_dict()) == before
    assert set(vars(model[1])) == set(vars(nn.BatchNorm2d(8)))
    assert "1.scratch" in dict(model.named_buffers())


@pytest.mark.parametrize("to", ["kalman", "ghost"])
def test_statistics_count_and_not_the_flag(to):
    """What `eval()` gives stays where the flag was switched off on a trained norm, or its statistics taken away."""
    model = chain().train()
    model(image())
    model.eval()
    model[1].track_running_stats = False
    model[4].running_mean = model[4].running_var = None
    model[7].num_batches_tracked = None
    x = image()
    converted = convert(model, x, to=to)
    if to == "kalman":  # which without statistics of the population has those of the batch and its prior
        torch.testing.assert_close(converted[:3](x), model[:3](x))
    else:
        torch.testing.assert_close(converted(x), model(x))
    assert set(model.state_dict()) - set(converted.state_dict()) == {"4.num_batches_tracked"}
    converted.train()(x).sum().backward()
    back = to_batchnorm(converted)
    assert back[1].track_running_stats and not back[4].track_running_stats and back[4].running_mean is None


def test_a_weight_that_is_computed_is_refused():
    model = chain()
    prune.random_unstructured(model[1], "weight", 0.5)
    with pytest.raises(TypeError, match=r"'1': its weight is computed .*prune.remove\(module, 'weight'\)"):
        convert(model, image(), inplace=True)
    prune.remove(model[1], "weight")
    convert(model, image(), inplace=True)
    prune.random_unstructured(model[1], "weight", 0.5)  # afterwards it may be pruned, and go back
    model(image()).sum().backward()
    to_batchnorm(model, inplace=True)(image())
    assert {"1.weight_orig", "1.weight_mask"} <= set(model.state_dict())
    parametrize.register_parametrization(other := chain()[1], "weight", nn.Identity())
    with pytest.raises(TypeError, match=r"'0' is parametrized.*remove_parametrizations"):
        convert(nn.Sequential(other), image())


def test_names_that_clash_are_refused():
    model = chain()
    model[4].frozen = True
    with pytest.raises(TypeError, match="'4': it has 'frozen' of its own"):
        convert(model, image(), inplace=True)
    del model[4].frozen
    model[4].forward = lambda x: 2 * x
    with pytest.raises(TypeError, match="'4': it has 'forward' of its own"):
        convert(model, image(), inplace=True)


@pytest.mark.parametrize("transition", ["weights", "learned"])
def test_under_inference_mode(transition):
    model = chain()
    with torch.inference_mode():
        converted = convert(model, image(), transition=transition)
        born_there = chain()
    converted(image()).sum().backward()
    assert all(p.grad is not None for p in converted.parameters())
    with pytest.raises(TypeError, match=r"'0': its weight was made under torch.inference_mode"):
        convert(born_there, image())


def test_lazy_layers_beside_a_norm():
    model = nn.Sequential(nn.LazyConv2d(8, 3), nn.BatchNorm2d(8))
    with pytest.raises(TypeError, match="'0' is a LazyConv2d whose weight has no size yet: run the model once first"):
        convert(model, image())
    model(image())
    convert(model, image())


def test_a_model_that_cannot_be_copied():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.factor = chain(), nn.Parameter(torch.ones(1))
            self.scale = [self.factor * 2]  # a copy could not compute it again

        def forward(self, x):
            return self.body(x) * self.scale[0]

    with pytest.raises(RuntimeError, match=r"Scaled cannot be copied: its forward reads 'scale'.*pass inplace=True"):
        convert(Scaled(), image())
    converted = convert(Scaled(), image(), inplace=True)
    converted(image()).sum().backward()
    assert converted.factor.grad is not None


class Aside(nn.Module):
    """Its second branch never runs."""

    def __init__(self):
        super().__init__()
        self.body, self.never = chain(2), chain(1)

    def forward(self, x):
        return self.body(x)


def test_wiring_of_a_module_that_holds_several_converted_models():
    pair = nn.ModuleDict({"teacher": convert(Aside(), image()), "student": convert(chain(2), image())})
    report = wiring(pair)
    assert {norm.name: norm.sources for norm in report.norms} == {
        "teacher.body.1": [], "teacher.body.4": ["teacher.body.1"], "teacher.never.1": [],
        "student.1": [], "student.4": ["student.1"],
    }  # fmt: skip
    assert report.summary.startswith("2 of 5 norms of ModuleDict are wired (weights), 2 with no norm before")
    assert report.svg().count("<path d=") == 3
    pair["student"] = convert(chain(2), image(), transition="learned")
    assert "(weights and learned)" in wiring(pair).summary


def test_wiring_of_a_part():
    model = convert(nn.Sequential(chain(1), nn.Sequential(*chain(3)[3:])), image())
    assert [(norm.name, norm.sources) for norm in wiring(model[1]).norms] == [("1", ["0.1"]), ("4", ["1"])]
    assert wiring(model[1]).svg().count("<path d=") == 2
    assert [norm.name for norm in wiring(model[1][4]).norms] == [""]
    aside = convert(nn.Sequential(Aside(), nn.Flatten()), image())
    assert [norm.name for norm in wiring(aside[0]).norms] == ["body.1", "body.4", "never.1"]
    assert [norm.name for norm in wiring(aside[0].body).norms] == ["1", "4"]


def test_wiring_says_how_many_calls_are_wired():
    class Thrice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x):
            for _ in range(3):
                x = self.bn(self.conv(x))
            return x

    report = wiring(convert(Thrice(), image()))
    assert report.norms[0].wired and report.norms[0].transition == "weights, 2 of 3 calls"
    assert "bn (×3)" in str(report) and "weights, 2 of 3 calls" in str(report)


def test_wiring_names_the_run_that_failed():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = chain(2)

        def forward(self, x, targets=None):
            if self.training and targets is None:
                raise ValueError("targets are missing\nso there")
            return self.body(x)

    assert wiring(convert(Picky(), image())).summary.endswith("; training run failed: ValueError: targets are missing")
    assert not wiring(convert(Picky(), {"x": image(), "targets": 1})).notes


def test_wiring_names_a_layer_that_was_replaced():
    model = convert(chain(), image())
    assert not wiring(model).notes
    model[3] = nn.Conv2d(8, 8, 1)
    assert wiring(model).notes == ["'3' was replaced after conversion: call kalmannorm.rewire"]
    assert "'student.3' was replaced" in wiring(nn.ModuleDict({"student": model})).summary
    assert not wiring(copy.deepcopy(model)[4]).notes
    assert not rewire(model, image()).notes


def test_a_norm_wired_by_hand_does_not_go_back():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = BatchKalmanNorm2d(3), BatchKalmanNorm2d(3, 3)

        def forward(self, x):
            return self.two(self.one(x), self.one.posterior)

    with pytest.raises(ValueError, match="to_batchnorm: the model's own code passes `previous` to 'two'"):
        to_batchnorm(Net())
