"""MONAI's nets take `norm="kalman"`, with 1, 2 and 3 dimensions, and train at batch 1."""

from __future__ import annotations

import warnings

import pytest
import torch

import kalmannorm

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # MONAI's imports warn
    from monai.networks.layers import get_norm_layer
    from monai.networks.nets import SegResNet, UNet

    import kalmannorm.integrations.monai

NORM = ("kalman", {"statistics_batch_size": 1})


def unet(norm, dims=3):
    return UNet(
        spatial_dims=dims, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1,
        norm=norm,
    )  # fmt: skip


def segresnet(norm, dims=3):
    return SegResNet(spatial_dims=dims, in_channels=1, out_channels=2, init_filters=8, blocks_down=(1, 1), norm=norm,
                     blocks_up=(1,))  # fmt: skip


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("build", [unet, segresnet])
def test_a_net_learns_as_a_converted_one_at_batch_1(build, dims):
    x = torch.randn(1, 1, *[16] * dims)
    torch.manual_seed(0)
    converted = kalmannorm.convert(build("batch", dims), x, statistics_batch_size=1)
    torch.manual_seed(0)
    built = build(NORM, dims)
    report = kalmannorm.rewire(built, x)
    assert sum(not norm.wired for norm in report.norms) == 1
    for model in (built, converted):
        torch.manual_seed(1)  # SegResNet has dropout
        model.train()(x).square().mean().backward()
    torch.testing.assert_close(built.state_dict(), converted.state_dict(), rtol=0, atol=0)
    for ours, theirs in zip(built.parameters(), converted.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_norm_of_every_number_of_dimensions_without_options(dims):
    norm = get_norm_layer("kalman", spatial_dims=dims, channels=5)
    assert norm.num_features == 5
    x = torch.randn(2, 5, *[4] * dims)
    torch.testing.assert_close(norm.eval()(x), x / (1 + norm.eps) ** 0.5)
