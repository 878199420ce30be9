"""Models of segmentation_models_pytorch, detectors with frozen norms, and video nets: converted and trained a step."""

from __future__ import annotations

import pytest
import segmentation_models_pytorch as smp
import torch
import torchvision
from torch.nn import functional as F
from torchvision.models.detection import FasterRCNN, fasterrcnn_resnet50_fpn
from torchvision.models.detection.rpn import AnchorGenerator
from torchvision.ops import FrozenBatchNorm2d

import kalmannorm


def step(model, loss):
    """One step of SGD. Returns the gains before and after it."""
    before = kalmannorm.gains(model)
    optimizer = torch.optim.SGD(kalmannorm.parameter_groups(model, 1e-4), lr=0.1)
    loss.backward()
    optimizer.step()
    return before, kalmannorm.gains(model)


@pytest.mark.parametrize("kind", ["Unet", "FPN", "DeepLabV3Plus"])
def test_segmentation_models_at_batch_2(kind):
    x = torch.randn(2, 3, 64, 64)
    model = getattr(smp, kind)("resnet18", encoder_weights=None, classes=3)
    model = kalmannorm.convert(model, x, statistics_batch_size=2)
    norms = kalmannorm.wiring(model).norms
    assert sum(not norm.wired for norm in norms) == 1
    before, after = step(model, F.cross_entropy(model(x), torch.randint(3, (2, 64, 64))))
    assert sum(after[name] != gain for name, gain in before.items()) == len(norms) - 1


def targets():
    return [{"boxes": torch.tensor([[4.0, 4.0, 40.0, 40.0]]), "labels": torch.tensor([1])}]


def test_a_detector_at_batch_1_with_frozen_norms_in_its_backbone():
    """torchvision freezes the norms of a detection backbone. They stay frozen, and feed the norms after them."""
    backbone = torchvision.models.resnet18(norm_layer=FrozenBatchNorm2d)
    features = torch.nn.Sequential(*list(backbone.children())[:-2], torch.nn.Conv2d(512, 64, 3, padding=1),
                                   torch.nn.BatchNorm2d(64), torch.nn.ReLU())  # fmt: skip
    features.out_channels = 64
    anchors = AnchorGenerator(sizes=((16, 32),), aspect_ratios=((1.0,),))
    roi = torchvision.ops.MultiScaleRoIAlign(["0"], output_size=3, sampling_ratio=2)
    model = FasterRCNN(features, 3, rpn_anchor_generator=anchors, box_roi_pool=roi, min_size=96, max_size=96)
    images = [torch.rand(3, 64, 64)]
    model = kalmannorm.convert(model, (images, targets()), statistics_batch_size=1)
    assert sum(isinstance(module, FrozenBatchNorm2d) for module in model.modules()) == 20
    assert [(norm.name, norm.wired) for norm in kalmannorm.wiring(model).norms] == [("backbone.9", True)]
    before, after = step(model, sum(model(images, targets()).values()))
    assert all(after[name] != gain for name, gain in before.items())


def test_a_detector_built_with_batch_norms_is_converted_in_its_backbone():
    model = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=64)
    assert not any(isinstance(module, FrozenBatchNorm2d) for module in model.modules())
    images = [torch.rand(3, 64, 64)]
    model = kalmannorm.convert(model, (images, targets()), statistics_batch_size=1)
    norms = kalmannorm.wiring(model).norms
    assert (len(norms), sum(norm.wired for norm in norms)) == (53, 52)
    before, after = step(model, sum(model(images, targets()).values()))
    assert any(after[name] != gain for name, gain in before.items())


def test_a_detector_with_frozen_norms_only_is_refused_with_the_reason():
    model = torchvision.models.resnet18(norm_layer=FrozenBatchNorm2d)
    with pytest.raises(ValueError, match="frozen batch norms only"):
        kalmannorm.convert(model, torch.randn(1, 3, 64, 64))


def test_a_video_net_at_batch_1():
    clip = torch.randn(1, 3, 4, 32, 32)
    model = kalmannorm.convert(torchvision.models.video.r3d_18(num_classes=4), clip, statistics_batch_size=1)
    norms = kalmannorm.wiring(model).norms
    assert (len(norms), sum(norm.wired for norm in norms)) == (20, 19)
    before, after = step(model, F.cross_entropy(model(clip), torch.tensor([2])))
    assert all(after[name] != gain for name, gain in before.items())
