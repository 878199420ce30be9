"""Tracers other than `torch.compile` and `torch.export`: `torch.fx`, `torch.jit.trace`, the older ONNX exporter."""

from __future__ import annotations

import copy
import io

import onnxruntime
import pytest
import torch
import torchvision
from torch import nn
from torchvision.models.feature_extraction import create_feature_extractor

import kalmannorm

IGNORED = (
    "ignore:.*torch.jit.*deprecated:DeprecationWarning",
    "ignore:.*legacy TorchScript-based ONNX export:DeprecationWarning",
    "ignore::torch.jit.TracerWarning",
)


def block(channels, out):
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())


def image(examples=4):
    return torch.randn(examples, 3, 8, 8)


def converted(**options):
    net = nn.Sequential(block(3, 4), block(4, 4), block(4, 6))
    model = kalmannorm.convert(net, image(), statistics_batch_size=2, **options)
    for _ in range(3):
        model(image())
    return model


@pytest.mark.parametrize("transition", ["weights", "learned"])
def test_fx_sees_leaves(transition):
    model = converted(transition=transition).double()
    graph = torch.fx.symbolic_trace(copy.deepcopy(model))
    assert [node.target for node in graph.graph.nodes if "1" in str(node.target)[-1:]] == ["0.1", "1.1", "2.1"]
    x = image().double()
    expected, result = model(x), graph(x)
    torch.testing.assert_close(result, expected)
    (expected.square().sum() + result.square().sum()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(graph.get_parameter(name).grad, parameter.grad)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(graph.get_buffer(name), buffer)


@pytest.mark.parametrize("to", ["ghost", "renorm"])
def test_fx_sees_leaves_of_other_norms(to):
    model, x = kalmannorm.convert(block(3, 4), to=to, statistics_batch_size=2).eval(), image()
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))


def test_options_of_a_norm_reach_the_graph():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = kalmannorm.BatchKalmanNorm2d(3)

        def forward(self, x):
            y, posterior = self.norm(x, residual=x, relu=True, return_posterior=True)
            return y + posterior.mean.sum()

    model, x = Net().eval(), image()
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))


def test_features_of_a_converted_resnet():
    x = torch.randn(2, 3, 32, 32)
    model = kalmannorm.convert(torchvision.models.resnet18(), x).eval()
    features = create_feature_extractor(model, ["layer1", "layer4"])(x)
    expected = {}
    for name in ("layer1", "layer4"):
        model.get_submodule(name).register_forward_hook(lambda m, a, out, name=name: expected.update({name: out}))
    model(x)
    torch.testing.assert_close(features, expected)


MODES = ["population", "batch", "example"]


@pytest.mark.parametrize("transition", ["weights", "learned"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings(*IGNORED)
def test_jit_traces_the_same_with_and_without_gradients(mode, transition):
    model = converted(transition=transition).eval()
    kalmannorm.set_inference(model, mode)
    graphs = []
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            traced = torch.jit.trace(model, image())
        saved = io.BytesIO()
        torch.jit.save(traced, saved)
        saved.seek(0)
        x = image(6)  # another batch size
        torch.testing.assert_close(torch.jit.load(saved)(x), model(x))
        graphs.append([node.kind() for node in traced.inlined_graph.nodes()])
    assert graphs[0] == graphs[1]


@pytest.mark.filterwarnings(*IGNORED)
def test_jit_does_not_trace_training():
    with pytest.raises(ValueError, match=r"torch.jit.trace of layer '1.1' in training: .* call model.eval\(\) first"):
        torch.jit.trace(converted(), image())


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("trained", [True, False])  # before training, γ of several norms are equal
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings(*IGNORED)
def test_the_older_onnx_exporter(mode, trained, frozen):
    model = converted().eval()
    if trained:
        for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.uniform_(norm.bias)
    kalmannorm.set_inference(model, mode)
    model = kalmannorm.freeze_priors(model) if frozen else model
    file = io.BytesIO()
    torch.onnx.export(model, (image(),), file, dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "n"}})
    session = onnxruntime.InferenceSession(file.getvalue())
    x = image(6)
    torch.testing.assert_close(torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), model(x), rtol=1e-4, atol=1e-5)
