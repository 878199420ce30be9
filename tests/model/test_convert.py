"""`convert` keeps a model what it is, and says clearly what it cannot do."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import OrderedDict

import numpy as np
import pytest
import timm
import torch
import torchvision
from safetensors.torch import load_file, load_model, save_file, save_model
from timm.layers import BatchNormAct2d
from torch import nn

import kalmannorm
from kalmannorm import (
    BatchKalmanNorm1d,
    BatchKalmanNorm2d,
    BatchKalmanNorm3d,
    BatchRenorm2d,
    GhostBatchNorm2d,
    convert,
    parameter_groups,
    register_norm,
    to_batchnorm,
    wiring,
)


def small_net():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(True), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.Flatten(),
        nn.Linear(4 * 16, 5), nn.BatchNorm1d(5),
    )  # fmt: skip


def image(batch=4, size=8):
    return torch.randn(batch, 3, size, size)


def trained(model):
    """Non-trivial statistics, scales and shifts."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            module.running_mean.normal_(std=0.3)
            module.running_var.uniform_(0.5, 2.0)
            module.num_batches_tracked.fill_(7)
    return model


@pytest.mark.parametrize("transition", ["weights", "learned"])
@pytest.mark.parametrize(
    "make",
    [lambda: torchvision.models.resnet18(num_classes=10), lambda: timm.create_model("mobilenetv3_small_050")],
    ids=["torchvision resnet18", "timm mobilenetv3"],
)
def test_swap_the_norm_of_a_pretrained_model(make, transition):
    """timm#519, torchvision#1072: the logits of the pretrained model stay, and BatchNorm's checkpoint still loads."""
    model = trained(make()).eval()
    x = torch.randn(2, 3, 64, 64)
    converted = convert(model, x, statistics_batch_size=2, transition=transition)
    assert type(converted) is type(model)
    assert set(model.state_dict()) <= set(converted.state_dict())
    torch.testing.assert_close(converted(x), model(x), rtol=0, atol=0)
    other = trained(make()).eval()
    converted.load_state_dict(other.state_dict())
    torch.testing.assert_close(converted(x), other(x), rtol=0, atol=0)
    assert all(isinstance(m, kalmannorm.GroupedNorm) for m in converted.modules() if hasattr(m, "running_mean"))


def test_everything_is_kept():
    model = trained(small_net()).double()
    model[1].eval()
    model[4].weight.requires_grad_(False)
    model[1].eps, model[1].momentum, model[1].colour = 1e-3, 0.3, "blue"
    calls = []
    handle = model[1].register_forward_hook(lambda *_: calls.append("hook"))
    model[4].register_full_backward_hook(lambda *_: calls.append("backward"))
    gamma, norm = model[1].weight, model[1]
    converted = convert(model, image().double(), inplace=True)
    calls.clear()  # hooks are a part of the model, and run with it on the example
    assert converted is model and model[1] is norm and model[1].weight is gamma
    assert isinstance(norm, BatchKalmanNorm2d) and isinstance(model[7], BatchKalmanNorm1d)
    assert (norm.eps, norm.momentum, norm.colour, norm.training) == (1e-3, 0.3, "blue", False)
    assert model[4].training and not model[4].weight.requires_grad
    assert norm.running_mean.dtype == model[4].gain_logit.dtype == torch.float64
    model(image().double()).sum().backward()
    assert calls == ["hook", "backward"]
    handle.remove()
    model(image().double())
    assert calls == ["hook", "backward"]


def test_a_copy_is_converted_by_default():
    model = small_net()
    converted = convert(model, image())
    assert type(model[1]) is nn.BatchNorm2d and not model._forward_hooks
    assert converted[0].weight is not model[0].weight


def test_options_of_a_norm_without_affine_or_statistics():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False), nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4, track_running_stats=False),
    )  # fmt: skip
    converted = convert(model, image(), statistics_batch_size=2)
    assert converted[1].weight is None and converted[3].running_mean is None
    converted(image()).sum().backward()
    converted.eval()(image())
    back = to_batchnorm(converted)
    assert back[1].weight is None and back[3].running_mean is None


def test_ranks():
    for rank, (layer, norm, kind) in enumerate(
        [(nn.Conv1d, nn.BatchNorm1d, BatchKalmanNorm1d), (nn.Conv2d, nn.BatchNorm2d, BatchKalmanNorm2d),
         (nn.Conv3d, nn.BatchNorm3d, BatchKalmanNorm3d)], 1
    ):  # fmt: skip
        model = nn.Sequential(layer(2, 3, 3), norm(3), nn.ReLU(), layer(3, 3, 3), norm(3))
        converted = convert(model, torch.randn(2, 2, *[6] * rank))
        assert type(converted[1]) is type(converted[4]) is kind
        assert wiring(converted).norms[1].wired


def test_convert_sync_batchnorm_runs_on_a_cpu():
    """mmseg#387, mmocr#398: a model trained with SyncBatchNorm converts, runs and goes back without a GPU."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(small_net())
    converted = convert(model, image(), statistics_batch_size=2)
    assert type(converted[1]) is BatchKalmanNorm2d and type(converted[7]) is BatchKalmanNorm1d
    assert converted[1].process_group == "world"
    converted(image()).sum().backward()
    back = to_batchnorm(converted)
    assert type(back[1]) is nn.BatchNorm2d and type(back[7]) is nn.BatchNorm1d
    convert(model, to="ghost", statistics_batch_size=2)(image())


def test_convert_never_touches_instance_norm():
    """apex#437: an InstanceNorm stays one."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
    )
    converted = convert(model, image())
    assert type(converted[1]) is nn.InstanceNorm2d
    with pytest.raises(ValueError, match="contains no batch norm"):
        convert(model[:2], image())


class Scaled(nn.BatchNorm2d):
    def forward(self, x):
        return 2 * super().forward(x)


class WithAct(nn.BatchNorm2d):
    def __init__(self, channels):
        super().__init__(channels)
        self.act = nn.PReLU(channels)

    def forward(self, x):
        return self.act(super().forward(x))


def test_convert_does_not_silently_drop_a_subclass_behaviour():
    """pytorch#187298, timm#1254: an unknown subclass is refused by name, and can be taught."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Scaled(4))
    with pytest.raises(TypeError, match=r"'1' is a .*Scaled.*register_norm\(Scaled"):
        convert(model, image())
    model = trained(nn.Sequential(nn.Conv2d(3, 4, 3), WithAct(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))).eval()
    x = image()
    with pytest.raises(TypeError, match="WithAct"):
        convert(model, x)
    register_norm(WithAct, then=("act",))
    converted = convert(model, x)
    torch.testing.assert_close(converted(x), model(x), rtol=0, atol=0)
    assert "prelu" in wiring(converted).norms[1].path
    assert type(to_batchnorm(converted)[1]) is WithAct
    with pytest.raises(TypeError, match="must be a subclass"):
        register_norm(nn.Linear)
    with pytest.raises(TypeError, match="tuple of child names"):
        register_norm(WithAct, then="act")


@pytest.mark.parametrize("to", ["kalman", "ghost", "renorm", "group", "layer", "instance"])
def test_timm_fused_activation_and_drop_are_kept(to):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), BatchNormAct2d(8, act_layer=nn.SiLU), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4)
    )
    converted = convert(model, image(), to=to)
    assert isinstance(converted[1].act, nn.SiLU) and isinstance(converted[1].drop, nn.Identity)
    x = torch.randn(3, 8, 5, 5)
    y = converted[1](x)
    converted[1].act = nn.Identity()
    assert y.min() > -0.3 and converted[1](x).min() < -0.5
    if to == "kalman":
        assert wiring(converted).norms[1].path.startswith("silu")
        assert type(to_batchnorm(converted)[1]) is BatchNormAct2d


def test_baselines_need_no_example():
    kinds = {"ghost": GhostBatchNorm2d, "renorm": BatchRenorm2d, "group": nn.GroupNorm, "layer": nn.GroupNorm}
    for to, kind in kinds.items():
        options = {"statistics_batch_size": 2} if to in ("ghost", "renorm") else {}
        converted = convert(small_net()[:6], to=to, **options)
        assert isinstance(converted[1], kind)
        assert converted[1].weight.shape == (6,)
        converted(image()).sum().backward()
    assert convert(small_net()[:6], to="group", num_groups=4)[1].num_groups == 3  # the largest divisor of 6 up to 4
    assert convert(small_net()[:6], to="group")[1].num_groups == 6
    assert convert(small_net()[:6], to="layer")[1].num_groups == 1
    x = torch.randn(2, 6, 5, 5)
    instance = convert(small_net()[:6], to="instance")[1]
    torch.testing.assert_close(instance(x), nn.functional.instance_norm(x))
    assert set(convert(small_net(), to="group").state_dict()) == {
        k for k in small_net().state_dict() if "running" not in k and "tracked" not in k
    }
    ghost = convert(small_net(), to="ghost", statistics_batch_size=2)
    assert type(convert(ghost, to="batch")[1]) is nn.BatchNorm2d
    assert type(convert(small_net(), to="batch")[1]) is nn.BatchNorm2d


def test_one_noise_for_the_model_and_safetensors_get_along(tmp_path):
    model = convert(small_net(), image(), transition="learned")
    assert [name for name in model.state_dict() if name.endswith("noise")] == ["4.transition.noise"]
    assert model[7].transition.shared_noise() is model[4].transition.noise
    model(image()).sum().backward()
    assert model[4].transition.noise.grad is not None
    save_file(model.state_dict(), str(tmp_path / "a.safetensors"))
    save_model(model, str(tmp_path / "b.safetensors"))
    twin = convert(small_net(), image(), transition="learned")
    twin.load_state_dict(load_file(str(tmp_path / "a.safetensors")))
    load_model(twin, str(tmp_path / "b.safetensors"))
    model.eval(), twin.eval()
    x = image()
    assert torch.equal(model(x), twin(x))
    twin[4].transition.noise.data.fill_(3.0)
    assert twin[7].transition.shared_noise() == 3


def test_options_reach_the_norms():
    model = convert(
        small_net(), image(), transition="learned", rank=2, gain=0.9, per_channel_gain=True, inference="example",
        statistics_batch_size=2, momentum=0.01, total_variance=False,
    )  # fmt: skip
    assert model[4].transition.rank == 2 and model[4].gain.shape == (4,)
    torch.testing.assert_close(model[4].gain, torch.full((4,), 0.9))
    assert model[4].inference == "example" and model[4].momentum == 0.01 and not model[4].total_variance
    assert sum(len(group["params"]) for group in parameter_groups(model, 0.1)) == len(list(model.parameters()))


class Head(nn.Sequential):
    """A part of a model that has a class of its own."""


def parted_net():
    head = Head(nn.Linear(4, 5), nn.BatchNorm1d(5), Head(nn.Linear(5, 5), nn.BatchNorm1d(5)))
    trunk = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    return nn.Sequential(OrderedDict(trunk=trunk, pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), head=head))


BY_LAYER = {
    "default": ({"": 2}, [2, 2, 2, 2]),
    "no default": ({"head": 2}, [None, None, 2, 2]),
    "prefix": ({"trunk": 4, "": 2}, [4, 4, 2, 2]),
    "whole batch": ({"trunk": None, "": 2}, [None, None, 2, 2]),
    "longer names first": ({"trunk.3": 8, "trunk": 4, "head": 2}, [4, 8, 2, 2]),
    "type of norm": ({nn.BatchNorm1d: 4, "": 2}, [2, 2, 4, 4]),
    "type of module": ({Head: 4, nn.Sequential: 2}, [2, 2, 4, 4]),
    "names before types": ({nn.BatchNorm1d: 4, "head.1": 2}, [None, None, 2, 4]),
    "inner type first": ({nn.BatchNorm1d: 4, Head: 2}, [None, None, 4, 4]),
    "numpy": ({"": np.int64(2)}, [2, 2, 2, 2]),
    "empty": ({}, [None] * 4),
}


@pytest.mark.parametrize("to", ["kalman", "ghost", "renorm"])
@pytest.mark.parametrize(("given", "expected"), BY_LAYER.values(), ids=BY_LAYER.keys())
def test_statistics_batch_by_layer(given, expected, to):
    model = convert(parted_net(), image(4), to=to, statistics_batch_size=given)
    norms = [model.get_submodule(name) for name in ("trunk.1", "trunk.3", "head.1", "head.2.1")]
    assert [norm.statistics_batch_size for norm in norms] == expected
    model(image(4)).sum().backward()


@pytest.mark.parametrize("transition", ["weights", "learned"])
def test_groups_by_layer_are_those_of_one_layer(transition):
    """Each norm uses its own m: with m = None in the trunk and m = 2 in the head, as with these set by hand."""
    torch.manual_seed(0)
    net = parted_net()
    mixed = convert(net, image(4), transition=transition, statistics_batch_size={"head": 2})
    by_hand = convert(net, image(4), transition=transition)
    for norm in (by_hand.head[1], by_hand.head[2][1]):
        norm.statistics_batch_size = 2
    x = image(4)
    torch.testing.assert_close(mixed(x), by_hand(x))
    for name, buffer in mixed.named_buffers():
        torch.testing.assert_close(buffer, by_hand.get_buffer(name))


def test_a_shared_module_may_have_either_name():
    net = parted_net()
    net.alias = net.trunk
    model = convert(net, to="ghost", statistics_batch_size={"alias": 2})
    assert model.trunk[1].statistics_batch_size == 2


def test_untrained_statistics_start_afresh_and_trained_ones_are_carried():
    fresh, used = convert(small_net(), image()), convert(trained(small_net()), image())
    assert fresh[1].values_tracked == 0 and used[1].values_tracked > 1 << 30
    torch.testing.assert_close(used[1].observed_mean, used[1].running_mean)


ERRORS = {
    "twice": (lambda: convert(convert(small_net(), image()), image()), ValueError, "already converted.*rewire"),
    "no norms": (lambda: convert(nn.Linear(2, 2), torch.ones(1, 2)), ValueError, "Linear contains no batch norm"),
    "no example": (lambda: convert(small_net()), ValueError, "example_input must be given"),
    "unknown target": (lambda: convert(small_net(), image(), to="kalmann"), ValueError, "to must be one of 'kalman'"),
    "unknown transition": (lambda: convert(small_net(), image(), transition="full"), ValueError, "'weights' or"),
    "unknown option": (lambda: convert(small_net(), image(), gian=0.5), TypeError, "did you mean gain"),
    "misnamed": (lambda: convert(small_net(), image(), stats_batch_size=2), TypeError, "mean statistics_batch_size"),
    "a shape": (lambda: convert(small_net(), (2, 3, 8, 8)), TypeError, "not a shape"),
    "rank of weights": (lambda: convert(small_net(), image(), rank=2), ValueError, "rank belongs to transition"),
    "groups of a baseline": (lambda: convert(small_net(), to="group", statistics_batch_size=2), ValueError, "'ghost'"),
    "unknown part": (
        lambda: convert(parted_net(), image(), statistics_batch_size={"haed": 2, nn.BatchNorm3d: 2, "head": 2, 3: 1}),
        ValueError,
        r"keys without a norm in Sequential: 'haed', BatchNorm3d, 3; did you mean 'head'\?",
    ),
    "part without norms": (
        lambda: convert(parted_net(), to="ghost", statistics_batch_size={"pool": 2}),
        ValueError,
        "keys without a norm in Sequential: 'pool'",
    ),
    "m of a part": (
        lambda: convert(parted_net(), image(), statistics_batch_size={"head": 0}),
        ValueError,
        r"statistics_batch_size\['head'\] must be at least 1, got 0",
    ),
    "example without m in a part": (
        lambda: convert(parted_net(), image(), statistics_batch_size={"head": 2}, inference="example"),
        ValueError,
        "'trunk.1': .*statistics_batch_size=None",
    ),
    "not a model": (lambda: convert(small_net), TypeError, "must be a torch.nn.Module"),
    "itself a norm": (lambda: convert(nn.BatchNorm2d(3), image()), ValueError, "itself a BatchNorm2d"),
    "compiled": (lambda: convert(torch.compile(small_net()), image()), TypeError, "wrapped by torch.compile"),
    "parallel": (lambda: convert(nn.DataParallel(small_net()), image()), TypeError, "convert first, then wrap"),
    "lazy": (lambda: convert(nn.Sequential(nn.LazyBatchNorm2d()), image()), TypeError, "run the model once"),
    "nothing to go back from": (lambda: to_batchnorm(nn.Linear(1, 1)), ValueError, "no norm of kalmannorm"),
}


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_mistakes_are_named(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("inplace", [False, True])
def test_an_optimizer_built_before_conversion_is_named(inplace):
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.warns(UserWarning, match="a AdamW built before conversion has parameters of this model"):
        convert(model, image(), inplace=inplace)
    del optimizer
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(small_net(), image())


@pytest.mark.parametrize("transition", ["weights", "learned"])
def test_copies_and_pickles_are_models_of_their_own(transition):
    model = convert(small_net(), image(), transition=transition, statistics_batch_size=2)
    model(image())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin[4].wire is not model[4].wire
        with torch.no_grad():
            for p in twin.parameters():
                p.add_(0.1)
        x = image()
        expected = copy.deepcopy(twin)(x)
        assert torch.equal(twin(x), expected)
        twin(x).sum().backward()
        assert all(p.grad is None for p in model.parameters())


def test_to_batchnorm_leaves_no_trace():
    model = trained(timm.create_model("resnetv2_18", num_classes=7)).eval()
    reference = {name: vars(module).keys() for name, module in model.named_modules()}
    x = torch.randn(2, 3, 64, 64)
    for transition in ("weights", "learned"):
        back = to_batchnorm(convert(model, x, transition=transition))
        assert list(back.state_dict()) == list(model.state_dict())
        assert torch.equal(back(x), model(x))
        for name, module in back.named_modules():
            assert type(module) is type(model.get_submodule(name))
            assert vars(module).keys() == reference[name], name
            assert not module._forward_hooks and not module._forward_pre_hooks


def test_channels_last_and_half_precision():
    model = trained(small_net()).to(torch.bfloat16)
    converted = convert(model, image().to(torch.bfloat16), statistics_batch_size=2)
    assert converted[1].weight.dtype == torch.bfloat16 and converted[1].running_mean.dtype == torch.float32
    converted(image().to(torch.bfloat16, memory_format=torch.channels_last)).sum().backward()
    assert to_batchnorm(converted)[1].running_mean.dtype == torch.bfloat16
