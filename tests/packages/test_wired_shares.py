"""The table of docs/packages.md: how many norms of nets from other packages have a prior, and why the others have none.

Each converted net also makes a training step in groups of two examples.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor

import kalmannorm

os.environ.setdefault("HF_HUB_OFFLINE", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of their imports
    import monai.networks.nets as monai
    import segmentation_models_pytorch as smp
    import transformers

PAGE = Path(__file__).parents[2] / "docs" / "packages.md"
VOLUME, SLICE, IMAGE = (2, 1, 16, 16, 16), (2, 1, 32, 32), (2, 3, 64, 64)


def frozen_detector():
    """Frozen norms in the backbone, batch norms in the feature pyramid and in the box head."""
    resnet = torchvision.models.resnet18(norm_layer=torchvision.ops.FrozenBatchNorm2d)
    layers = {f"layer{i}": str(i) for i in range(1, 5)}
    backbone = BackboneWithFPN(resnet, layers, [64, 128, 256, 512], 32, norm_layer=nn.BatchNorm2d)
    head = FastRCNNConvFCHead((32, 7, 7), [32, 32], [64], norm_layer=nn.BatchNorm2d)
    return FasterRCNN(backbone, box_head=head, box_predictor=FastRCNNPredictor(64, 3), min_size=64, max_size=64)


def pictures():
    targets = [{"boxes": torch.tensor([[1.0, 1.0, 30.0, 30.0]]), "labels": torch.tensor([1])}] * 2
    return [torch.rand(3, 64, 64) for _ in range(2)], targets


def conformer():
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    convolutions = {"conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "conv_depthwise_kernel_size": 5}
    config = transformers.Wav2Vec2ConformerConfig(
        **sizes, **convolutions, **positions, mask_time_prob=0.0, layerdrop=0.0
    )
    return transformers.Wav2Vec2ConformerModel(config)


def backbone(kind, **stages):
    return kind(embedding_size=8, layer_type="basic", **stages)


DETR = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_queries": 4}  # fmt: skip


def rt_detr():
    stages = {"hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4, "out_features": ["stage2", "stage3", "stage4"]}
    channels = {"encoder_hidden_dim": 16, "encoder_in_channels": [8, 16, 16], "decoder_in_channels": [16] * 3}
    resnet = backbone(transformers.RTDetrResNetConfig, **stages)
    return transformers.RTDetrModel(transformers.RTDetrConfig(backbone_config=resnet, **channels, **DETR))


def detr():
    resnet = backbone(transformers.ResNetConfig, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"])
    return transformers.DetrModel(
        transformers.DetrConfig(
            use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=resnet, **DETR
        )
    )


def monai_dynunet():
    return monai.DynUNet(
        2, 1, 2, (3, 3, 3), (1, 2, 2), (2, 2), norm_name="batch", deep_supervision=True, res_block=True,
        filters=(8, 16, 32),
    )  # fmt: skip


def noise(*shape):
    return lambda: torch.randn(shape)


NETS = {
    "MONAI UNet, residual": (
        lambda: monai.UNet(3, 1, 2, (4, 8, 16), (2, 2), num_res_units=2, norm="batch"), noise(*VOLUME),
    ),
    "MONAI SegResNet": (lambda: monai.SegResNet(init_filters=8, norm="batch"), noise(*VOLUME)),
    "MONAI VNet": (monai.VNet, noise(*VOLUME)),
    "MONAI DynUNet": (monai_dynunet, noise(*SLICE)),
    "MONAI BasicUNet": (
        lambda: monai.BasicUNet(2, 1, 2, features=(8, 8, 16, 16, 32, 8), norm="batch"), noise(*SLICE),
    ),
    "MONAI HighResNet": (lambda: monai.HighResNet(2, 1, 2, norm_type="batch"), noise(*SLICE)),
    "Conformer (transformers, Wav2Vec2-Conformer)": (conformer, noise(2, 400)),
    "RT-DETR (transformers)": (rt_detr, noise(*IMAGE)),
    "Faster R-CNN with a frozen backbone (torchvision)": (frozen_detector, pictures),
    "Unet (segmentation-models-pytorch)": (lambda: smp.Unet("resnet18", encoder_weights=None), noise(*IMAGE)),
    "DeepLabV3+ (segmentation-models-pytorch)": (
        lambda: smp.DeepLabV3Plus("resnet18", encoder_weights=None), noise(*IMAGE),
    ),
}  # fmt: skip


def rows():
    found = re.findall(r"^\| (.+?) \| (\d+) \| (\d+) \| (\d+) \| (.+?) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    return {name: (int(norms), int(now), left) for name, norms, _, now, left in found}


def test_the_page_has_these_nets():
    assert list(rows()) == list(NETS)


def tensors(out):
    if isinstance(out, torch.Tensor):
        return [out]
    values = out.values() if isinstance(out, dict) else out if isinstance(out, (list, tuple)) else ()
    return [tensor for value in values for tensor in tensors(value)]


@pytest.mark.parametrize("name", NETS)
def test_share_of_norms_with_a_prior(name):
    net, example = NETS[name]
    x = example()
    model = kalmannorm.convert(net(), x, statistics_batch_size=2)
    wiring = kalmannorm.wiring(model)
    reasons = Counter(norm.reason for norm in wiring.norms if not norm.wired)
    left = "; ".join(f"{count}: {reason}" for reason, count in reasons.items()) or "–"
    assert (len(wiring.norms), sum(norm.wired for norm in wiring.norms), left) == rows()[name]
    outputs = [t for t in tensors(model(*x) if isinstance(x, tuple) else model(x)) if t.requires_grad]
    sum(t.float().square().mean() for t in outputs).backward()
    gains = [p.grad for n, p in model.named_parameters() if n.endswith("gain_logit")]
    assert gains and all(grad is not None and grad.isfinite().all() for grad in gains)
    assert not kalmannorm.wiring(model).notes  # every norm had the norms that feed it


def test_detr_has_frozen_norms_only():
    with pytest.raises(ValueError, match=r"frozen batch norms only \(DetrFrozenBatchNorm2d"):
        kalmannorm.convert(detr(), torch.randn(IMAGE))


def test_dynunet_after_a_training_forward():
    """Its forward keeps tensors in a list."""
    x = torch.randn(SLICE)
    model = kalmannorm.convert(monai_dynunet(), x)
    model(x).sum().backward()
    expected = model.eval()(x)
    for deploy in (kalmannorm.fold, kalmannorm.to_batchnorm, kalmannorm.freeze_priors):
        torch.testing.assert_close(deploy(model).eval()(x), expected, rtol=1e-3, atol=1e-4)
