"""Conversion is all or nothing, keeps what others put on a norm, and refuses by name what it cannot keep."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from kalmannorm import BatchKalmanNorm2d, convert, to_batchnorm


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


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_model_that_cannot_be_copied():
    model = chain()
    model[3] = torch.nn.utils.weight_norm(model[3])
    model(image())
    with pytest.raises(RuntimeError, match="Sequential cannot be copied: pass inplace=True"):
        convert(model, image())
    convert(model, image(), inplace=True)(image()).sum().backward()
