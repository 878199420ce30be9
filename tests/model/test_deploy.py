"""Folded or turned back, a model gives the same answers, and what cannot fold stays.

Tests with a number are the demands of users: (9) a model trained with SyncBN runs on a CPU, (14) folding.
"""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from timm.layers import BatchNormAct2d, Conv2dSame
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrizations, parametrize

import kalmannorm
from kalmannorm import convert, fold, freeze_priors, set_inference, to_batchnorm
from kalmannorm._model.deploy import fold_weights, scale_and_shift
from support.nets_to_ship import CASES, BatchStatistics, Net, Parametrized, net_and_input, pair, randomised

LAYERS = {
    "conv1d": (nn.Conv1d(4, 6, 3, padding=1), (4, 9)),
    "conv2d-bias": (nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2), (4, 9, 8)),
    "conv2d-grouped-reflect": (nn.Conv2d(4, 6, 3, 1, 1, groups=2, bias=False, padding_mode="reflect"), (4, 5, 6)),
    "conv2d-depthwise": (nn.Conv2d(6, 6, 3, groups=6, bias=False), (6, 5, 6)),
    "conv3d": (nn.Conv3d(4, 6, (1, 2, 3), bias=False), (4, 3, 4, 5)),
    "transposed1d": (nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), (4, 7)),
    "transposed2d-grouped": (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, bias=False), (4, 5, 4)),
    "transposed3d-grouped": (nn.ConvTranspose3d(4, 6, 2, groups=2), (4, 3, 3, 2)),
    "linear": (nn.Linear(4, 6), (4,)),
    "linear-no-bias": (nn.Linear(4, 6, bias=False), (4,)),
    "timm-same": (Conv2dSame(4, 6, 3, stride=2, bias=False), (4, 7, 8)),
}


@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("kind", LAYERS)
def test_14_every_layer_folds(kind, affine):
    """To float64 rounding, found by a run or by the plan of a conversion; flags and dtypes stay."""
    layer, shape = LAYERS[kind]
    norm = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}[len(shape)](6, affine=affine)
    model = randomised(nn.Sequential(copy.deepcopy(layer), norm).double())
    model[0].weight.requires_grad_(False)
    x = torch.randn(3, *shape, dtype=torch.float64)
    for folded in (fold(model, x), fold(convert(model, x))):
        assert type(folded[1]) is nn.Identity
        torch.testing.assert_close(folded(x), model(x), rtol=1e-10, atol=1e-10)
        assert type(folded[0]) is type(layer)
        assert folded[0].bias.dtype == torch.float64
        assert not folded[0].weight.requires_grad
        assert folded[0].bias.requires_grad == (affine or layer.bias is not None)
        assert not any(module.training for module in folded.modules())


def test_fold_weights_alone():
    """The function of tensors: half-precision weights get the float64 answer, rounded once."""
    conv, norm = nn.Conv2d(3, 5, 3, bias=False), randomised(nn.BatchNorm2d(5))
    scale, shift = scale_and_shift(norm)
    assert scale.dtype == shift.dtype == torch.float64
    weight, bias = fold_weights(conv.weight.half(), None, scale, shift)
    assert weight.dtype == bias.dtype == torch.float16
    assert torch.equal(weight, (conv.weight.half().double() * scale[:, None, None, None]).half())
    assert torch.equal(bias, shift.half())


def assert_plain(model):
    """No class, hook, attribute or buffer of this library: not even its name in the pickle."""
    assert b"kalmannorm" not in pickle.dumps(model)
    for module in model.modules():
        assert not type(module).__module__.startswith("kalmannorm")
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert not {"wire", "then", "inference", "converted_from", "statistics_batch_size"} & set(vars(module))
    assert not [key for key in model.state_dict() if re.search("observed|values_tracked|skipped|gain|transition", key)]


@pytest.mark.parametrize("transition", ["weights", "learned"])
def test_14_a_folded_model_is_a_plain_model(transition):
    model, x, converted = net_and_input(transition=transition)
    before = {key: value.clone() for key, value in converted.state_dict().items()}
    folded = fold(converted)
    torch.testing.assert_close(folded(x), model(x), rtol=1e-5, atol=1e-5)
    assert_plain(folded)
    assert type(folded) is Net
    assert type(folded.norm1) is type(folded.norm4) is nn.Identity
    assert vars(folded.norm1).keys() == vars(nn.Identity()).keys()
    assert type(folded.norm2) is nn.Sequential and list(folded.norm2._modules) == ["drop", "act"]
    assert type(folded.norm3) is nn.BatchNorm2d  # reads a concatenation
    assert all(torch.equal(value, before[key]) for key, value in converted.state_dict().items())
    assert fold(converted, inplace=True) is converted
    torch.testing.assert_close(converted(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transition", ["weights", "learned"])
def test_14_to_batchnorm_is_exactly_the_model_it_was(transition):
    model, x, converted = net_and_input(transition=transition)
    back = to_batchnorm(converted)
    assert torch.equal(back(x), model(x))
    assert list(back.state_dict()) == list(model.state_dict())
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in back.state_dict().items())
    assert [type(module) for module in back.modules()] == [type(module) for module in model.modules()]
    assert type(back.norm2) is BatchNormAct2d
    assert_plain(back)


def test_14_nothing_of_a_closing_phase_stays():
    net, x = Net(), torch.randn(4, 3, 16, 16)
    model = convert(net, x, statistics_batch_size=2, weight_standardization=True)
    phase = kalmannorm.ClosingPhase(model, 2, start=0, end=0, fade_prior=True)
    model.train()(x).sum().backward()
    phase.step()
    plain = to_batchnorm(model)
    assert list(plain.state_dict()) == list(net.state_dict())
    assert not any(type(module).__module__.startswith("kalmannorm") for module in plain.modules())
    assert not any("closing" in name for name in fold(model.eval()).state_dict())
    assert any("closing" in name for name in model.state_dict())  # the model itself can go on


def test_14_hooks_stay_and_see_what_they_saw():
    """A hook on a layer, on a norm, or on what holds one of the two keeps the pair apart."""
    model = randomised(nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4), nn.ReLU(), *pair(4, 4)))
    x = torch.randn(2, 3, 8, 8)
    for place in ("0.0", "0", "1"):
        for after in (False, True):
            seen, own = [], copy.deepcopy(model)
            converted = convert(own, x) if after else own
            hook = lambda module, args, out, seen=seen: seen.append((args[0], out))  # noqa: E731
            converted.get_submodule(place).register_forward_hook(hook)
            folded = fold(converted, None if after else x)
            assert type(folded[1]) is nn.BatchNorm2d and type(folded[4]) is nn.Identity
            seen.clear()
            converted(x)
            folded(x)
            for was, now in zip(*seen, strict=True):
                assert torch.equal(was, now)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("converted", [False, True], ids=["run", "plan"])
def test_14_what_cannot_fold_stays_a_batch_norm(case, converted):
    model, x = randomised(case()), torch.randn(2, 3, 8, 8)
    if converted and case is BatchStatistics:
        with pytest.raises(ValueError, match=r"'norm' has track_running_stats=False"):
            fold(convert(model, x))
        return
    folded = fold(convert(model, x)) if converted else fold(model, x)
    assert isinstance(folded.norm, _BatchNorm) and type(folded.norm2) is nn.Identity
    torch.testing.assert_close(folded(x), model(x), rtol=1e-5, atol=1e-5)
    if case is not Parametrized:  # whose class is made at run time
        assert_plain(folded)


class Doubled(nn.Module):
    def forward(self, bias):
        return 2 * bias

    def right_inverse(self, bias):
        return bias


def test_14_a_conv_changed_after_conversion_is_left():
    """The plan is older than what was done to the model since."""
    model, x = randomised(nn.Sequential(*pair(3, 4), nn.ReLU(), *pair(4, 4))), torch.randn(2, 3, 8, 8)
    tied = convert(model, x)
    tied.extra = nn.Conv2d(3, 4, 3)
    tied.extra.weight = tied[0].weight
    normed = convert(model, x)
    parametrizations.weight_norm(normed[0])
    doubled = convert(model, x)
    parametrize.register_parametrization(doubled[0], "bias", Doubled())
    doubled[0].bias = model[0].bias / 2
    replaced = convert(model, x)
    replaced[0] = copy.deepcopy(replaced[0])
    for changed in (tied, normed, doubled, replaced):
        folded = fold(changed)
        assert isinstance(folded[1], nn.BatchNorm2d) and type(folded[4]) is nn.Identity
        torch.testing.assert_close(folded[:5](x), model(x), rtol=1e-5, atol=1e-5)


def test_14_pre_activation_nets_fold_what_they_can():
    """norm → relu → conv: only the norms inside a block follow a convolution directly."""
    model = randomised(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), *pair(3, 4), nn.ReLU(), nn.Conv2d(4, 4, 3)))
    x = torch.randn(2, 3, 8, 8)
    folded = fold(convert(model, x))
    assert type(folded[0]) is nn.BatchNorm2d and type(folded[3]) is nn.Identity
    torch.testing.assert_close(folded(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("to", ["ghost", "renorm"])
def test_14_baselines_fold_from_an_example(to):
    model, x, _ = net_and_input()
    converted = convert(model, to=to, statistics_batch_size=2)
    with pytest.raises(ValueError, match="example_input must be given"):
        fold(converted)
    folded = fold(converted, x)
    assert_plain(folded)
    torch.testing.assert_close(folded(x), model(x), rtol=1e-5, atol=1e-5)


def test_14_a_part_of_a_converted_model_folds_and_so_does_what_holds_one():
    model = randomised(nn.Sequential(nn.Sequential(*pair(3, 4)), nn.ReLU(), nn.Sequential(*pair(4, 4))))
    x = torch.randn(2, 3, 8, 8)
    converted = convert(model, x)
    part = fold(converted[2])
    assert type(part[1]) is nn.Identity
    torch.testing.assert_close(part(converted[:2](x)), model(x), rtol=1e-5, atol=1e-5)
    whole = fold(nn.Sequential(converted, nn.ReLU()))
    assert_plain(whole)
    assert type(whole[0][0][1]) is type(whole[0][2][1]) is nn.Identity
    torch.testing.assert_close(whole(x), model(x).relu(), rtol=1e-5, atol=1e-5)


class Clipped(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).clamp(-1, 1)


def test_14_a_norm_of_an_unknown_class_is_left_alone():
    model = randomised(nn.Sequential(nn.Conv2d(3, 4, 3), Clipped(4), *pair(4, 4)))
    x = torch.randn(2, 3, 8, 8)
    folded = fold(model, x)
    assert type(folded[1]) is Clipped and type(folded[3]) is nn.Identity
    torch.testing.assert_close(folded(x), model(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="Clipped, a subclass of BatchNorm that kalmannorm does not know"):
        fold(model[:2], x)


def test_14_our_own_hooks_keep_no_pair_apart():
    conv, norm = pair(3, 4)
    model, x = randomised(nn.Sequential(conv, nn.Sequential(norm, nn.ReLU(), *pair(4, 4)))), torch.randn(2, 3, 8, 8)
    folded = fold(convert(model, x))
    assert type(folded[1][0]) is nn.Identity
    torch.testing.assert_close(folded(x), model(x), rtol=1e-5, atol=1e-5)


def test_9_a_model_trained_with_sync_batchnorm_runs_on_a_cpu():
    x = torch.randn(4, 3, 8, 7)
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(*pair(3, 4), nn.ReLU(), nn.BatchNorm2d(4)))
    expected = randomised(synced)(x)
    converted = convert(synced, x)
    back, folded = to_batchnorm(converted), fold(converted)
    assert type(back[1]) is type(back[3]) is type(folded[3]) is nn.BatchNorm2d
    assert torch.equal(back(x), expected)
    torch.testing.assert_close(folded(x), expected, rtol=1e-5, atol=1e-5)
    for plain in (back, folded):
        assert_plain(plain)
    back.train()(x)  # SyncBatchNorm refuses this


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_14_half_precision_folds_from_float32_statistics(dtype):
    model, x, converted = net_and_input()
    half = copy.deepcopy(converted).to(dtype)
    folded = fold(half)
    assert half.norm1.running_var.dtype == torch.float32
    weight, bias = fold_weights(half.conv1.weight, None, *scale_and_shift(half.norm1))
    assert torch.equal(folded.conv1.weight, weight) and torch.equal(folded.conv1.bias, bias)
    assert {p.dtype for p in folded.parameters()} == {dtype}
    y = folded(x.to(dtype))
    assert y.dtype == dtype
    assert (y.float() - model(x)).norm() / model(x).norm() < 2e-2


class HandBuilt(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = kalmannorm.BatchKalmanNorm2d(4, 4)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: fold(randomised(Net())), ValueError, "example_input must be given"),
        (lambda: fold(nn.Conv2d(3, 4, 3)), ValueError, "contains no batch norm"),
        (lambda: fold(nn.Sequential(nn.BatchNorm2d(3)), torch.randn(2, 3, 4, 4)), ValueError, "none of the 1 norms"),
        (lambda: fold(convert(nn.Sequential(nn.BatchNorm2d(3)), torch.randn(2, 3, 4, 4))), ValueError, "none of the 1"),
        (lambda: fold(randomised(Net()), torch.randn(2, 5, 8, 8)), ValueError, "example_input: Net does not run on it"),
        (lambda: fold(HandBuilt()), ValueError, "'norm' gets `previous` from the model's own code"),
        (lambda: fold("model"), TypeError, "model must be a torch.nn.Module"),
        (lambda: fold(torch.compile(Net())), TypeError, r"fold model\._orig_mod instead"),
        (lambda: freeze_priors(Net()), ValueError, "freeze_priors: Net contains no norm wired"),
    ],
)
def test_14_mistakes_are_named(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("mode", ["example", "batch"])
def test_14_only_population_inference_folds(mode):
    _, _, converted = net_and_input(inference=mode)
    state = copy.deepcopy(converted.state_dict())
    with pytest.raises(ValueError, match=rf"'norm1' is in '{mode}' inference.*set_inference\(model, 'population'\)"):
        fold(converted, inplace=True)
    assert converted.state_dict().keys() == state.keys()
    set_inference(converted, "population")
    assert_plain(fold(converted, inplace=True))


def test_frozen_priors_change_nothing_but_the_work():
    _, x, converted = net_and_input(inference="example")
    frozen = freeze_priors(converted.eval())
    assert torch.equal(frozen(x), converted(x))
    assert list(frozen.state_dict()) == list(converted.state_dict())
    with torch.no_grad():
        for net in (frozen, converted):
            net.conv2.weight.mul_(2)  # the same features, but the prior of one is from before
    assert (frozen(x) - converted(x)).abs().max() > 1e-3
    assert torch.equal(pickle.loads(pickle.dumps(frozen))(x), frozen(x))
    kalmannorm.rewire(frozen, x)
    assert torch.equal(frozen(x), converted(x))


def test_frozen_priors_fold_and_leave_learned_ones():
    _, x, converted = net_and_input()
    assert_plain(fold(freeze_priors(converted)))
    learned = net_and_input(inference="example", transition="learned")[2].eval()
    assert torch.equal(freeze_priors(learned)(x), learned(x))
