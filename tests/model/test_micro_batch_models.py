"""Models that people train with tiny batches: segmentation, detection, video; converted, trained one step, shipped."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchvision import models

from kalmannorm import convert, to_batchnorm, wiring
from support.wide import narrow

NONE = {"weights": None, "weights_backbone": None}


class UNet(nn.Module):
    """Up-sampling, and skips that are concatenated."""

    def __init__(self, norm=nn.BatchNorm3d):
        super().__init__()

        def unit(inputs, outputs):
            return nn.Sequential(nn.Conv3d(inputs, outputs, 3, padding=1), norm(outputs), nn.LeakyReLU(0.1, True))

        self.enter, self.down, self.bottom = unit(1, 4), unit(4, 8), unit(8, 8)
        self.up, self.leave, self.head = nn.ConvTranspose3d(8, 4, 2, stride=2), unit(8, 4), nn.Conv3d(4, 2, 1)
        self.pool = nn.MaxPool3d(2)

    def forward(self, x):
        skip = self.enter(x)
        x = self.bottom(self.down(self.pool(skip)))
        return self.head(self.leave(torch.cat([skip, self.up(x)], 1)))


def boxes():
    return [{"boxes": torch.tensor([[10.0, 10.0, 50.0, 60.0]]), "labels": torch.tensor([1])} for _ in range(2)]


CASES = {
    "segmentation": (
        lambda: models.segmentation.deeplabv3_mobilenet_v3_large(**NONE, aux_loss=True),
        torch.randn(2, 3, 64, 64),
        lambda model, x: sum(out.square().mean() for out in model(x).values()),
    ),
    "detection": (
        lambda: models.detection.ssdlite320_mobilenet_v3_large(**NONE, num_classes=3),
        [torch.rand(3, 80, 80), torch.rand(3, 80, 100)],
        lambda model, x: sum(model(x, boxes()).values()),
    ),
    "video": (
        lambda: models.video.r3d_18(weights=None, num_classes=5),
        torch.randn(2, 3, 4, 24, 24),
        lambda model, x: model(x).square().mean(),
    ),
    "3-D medical": (UNet, torch.randn(2, 1, 8, 8, 8), lambda model, x: model(x).square().mean()),
}


@pytest.mark.parametrize("transition", narrow(["weights", "learned"], ["weights"]))
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_norm_but_the_first_is_wired_and_learns(case, transition):
    make, x, loss = case
    original = make()
    options = {"rank": 4} if transition == "learned" else {}
    model = convert(original, x, transition=transition, statistics_batch_size=1, **options)
    report = wiring(model)
    assert [norm.reason for norm in report.norms if not norm.wired] == ["no norm before it"], str(report)
    value = loss(model, x)
    value.backward()
    assert torch.isfinite(value)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
    assert list(to_batchnorm(model).state_dict()) == list(original.state_dict())
