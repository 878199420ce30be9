"""timm's constructors take `norm_layer`, and their own activations stay."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.layers import BatchNormAct2d

import kalmannorm
from kalmannorm.integrations.timm import KalmanNormAct2d, norm_layer
from support.wide import narrow

NAMES = ["resnet10t", "efficientnet_b0", "regnetx_002"]
MORE = ["densenet121", "ese_vovnet19b_dw", "gernet_s", "mobilevit_xxs", "repvgg_a0", "resnetv2_50", "xception41p"]


@pytest.mark.parametrize("name", narrow([*NAMES, *MORE], NAMES))
def test_a_built_model_equals_a_converted_one(name):
    x = torch.randn(2, 3, 64, 64)
    converted = kalmannorm.convert(timm.create_model(name, num_classes=5), x, statistics_batch_size=2)
    built = timm.create_model(name, num_classes=5, norm_layer=norm_layer(2))
    report = kalmannorm.rewire(built, x)
    assert sum(norm.wired for norm in report.norms) == sum(norm.wired for norm in kalmannorm.wiring(converted).norms)
    assert [type(m) for m in built.modules()] == [type(m) for m in converted.modules()]
    built.load_state_dict(converted.state_dict())
    for training in (True, False):
        torch.manual_seed(1)
        y = built.train(training)(x)
        torch.manual_seed(1)
        torch.testing.assert_close(y, converted.train(training)(x), rtol=0, atol=0)


def test_a_norm_with_its_activation_takes_the_arguments_of_batchnormact():
    norm = KalmanNormAct2d(4, 1e-3, act_layer=torch.nn.SiLU, drop_layer=torch.nn.Dropout, statistics_batch_size=2)
    assert norm.eps == 1e-3
    assert (type(norm.drop), type(norm.act)) == (torch.nn.Dropout, torch.nn.SiLU)
    assert type(KalmanNormAct2d(4, apply_act=False).act) is torch.nn.Identity
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), norm)
    kalmannorm.rewire(net, torch.randn(2, 3, 8, 8))
    assert type(kalmannorm.to_batchnorm(net)[1]) is BatchNormAct2d
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(net.eval()(x), kalmannorm.to_batchnorm(net)(x), rtol=0, atol=0)
