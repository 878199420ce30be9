"""`fuse(…, save_memory=True)` on a GPU: the same bits, less memory, also in CUDA graphs and activation checkpoints."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import kalmannorm
from kalmannorm._ops.normalize import registered
from kalmannorm._ops.normalize.arguments import Inputs

pytestmark = pytest.mark.gpu

NETS = {"resnet": torchvision.models.resnet50, "densenet": torchvision.models.densenet121}


@pytest.fixture(autouse=True)
def _the_same_convolutions():
    """Convolutions of torch are the same in every run."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("relu", [False, True], ids=["plain", "relu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("last", [True, False], ids=["NHWC", "NCHW"])
@pytest.mark.parametrize(
    ("shape", "m"),
    [
        ((32, 64, 56, 56), 2),  # on chip
        ((32, 256, 56, 56), 32),  # streamed
        ((32, 2048, 7, 7), 2),  # held
        ((8, 96, 28, 28), 8),  # positions abreast
        ((5, 33, 13, 7), 2),  # ragged, odd
        ((64, 512), 4),  # one position
    ],
    ids=str,
)
def test_an_output_again_has_the_same_bits(shape, m, last, dtype, relu, residual):
    torch.manual_seed(0)
    C = shape[1]
    x, other = torch.randn(2, *shape, device="cuda").to(dtype) * 2 + 1
    if last and len(shape) == 4:
        x, other = (t.contiguous(memory_format=torch.channels_last) for t in (x, other))
    prior = torch.randn(1, C, device="cuda"), torch.rand(1, C, device="cuda") + 0.5, torch.tensor(0.3, device="cuda")
    weight, bias = torch.randn(2, C, device="cuda")
    added = other if residual else None
    y, mean, var, observed, _ = registered.batch_kalman_norm(x, *prior, weight, bias, m, 1e-5, added, relu)
    again = registered.again(Inputs(x, None, None, None, weight, bias, m, 1e-5, added, relu), mean, var, observed)
    assert torch.equal(again, y) and again.stride() == y.stride()


def models(net=torchvision.models.resnet18, to="kalman", size=64):
    torch.manual_seed(0)
    x = torch.randn(8, 3, size, size, device="cuda").contiguous(memory_format=torch.channels_last)
    model = net(num_classes=10).cuda().to(memory_format=torch.channels_last)
    model = kalmannorm.convert(model, x[:2], to=to, statistics_batch_size=2)
    return x, kalmannorm.fuse(model, x[:2]), kalmannorm.fuse(model, x[:2], save_memory=True)


def step(model, x, run=None):
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        out = (model if run is None else run)(x)
    loss = F.cross_entropy(out.float(), torch.arange(len(x), device="cuda") % 10)
    loss.backward()
    return [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]


def assert_equal(actual, expected, names):
    for name, a, e in zip(["loss", *names], actual, expected, strict=True):
        assert torch.equal(a, e), name


@pytest.mark.parametrize("to", ["kalman", "ghost"])
@pytest.mark.parametrize(
    "net", [torchvision.models.resnet50, torchvision.models.densenet121], ids=["resnet", "densenet"]
)
def test_no_bit_changes(net, to):
    x, plain, saving = models(net, to)
    names = [name for name, _ in plain.named_parameters()]
    first = step(plain, x)
    if not all(map(torch.equal, step(models(net, to)[1], x), first)):
        pytest.skip("torch's own operations differ from run to run here")
    assert_equal(step(saving, x), first, names)
    for a, b in zip(saving.buffers(), plain.buffers(), strict=True):
        assert torch.equal(a, b)


def test_as_cuda_graphs():
    x, plain, saving = models()
    names = [name for name, _ in plain.named_parameters()]
    graphed = kalmannorm.graphed(saving)
    for _ in range(5):
        actual, expected = step(graphed, x), step(plain, x)
        for name, a, e in zip(["loss", *names], actual, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=2e-2, atol=2e-3, msg=name)
    assert graphed.cuda_graphs.replays >= 2, str(graphed.cuda_graphs)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_in_activation_checkpoints(reentrant):
    x, plain, saving = models()

    def run(model):
        def forward(x):
            x = model.maxpool(model.relu(model.bn1(model.conv1(x))))
            for layer in (model.layer1, model.layer2, model.layer3, model.layer4):
                for block in layer:
                    x = checkpoint(block, x, use_reentrant=reentrant)
            return model.fc(model.avgpool(x).flatten(1))

        return forward

    for a, e in zip(step(saving, x, run(saving)), step(plain, x, run(plain)), strict=True):
        torch.testing.assert_close(a, e, rtol=2e-2, atol=2e-3)


def peak(model, x):
    step(model, x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(model, x)
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(
    "net", [torchvision.models.resnet50, torchvision.models.densenet121], ids=["resnet", "densenet"]
)
def test_the_peak_is_lower(net):
    x, plain, saving = models(net, size=224)
    lower, higher = peak(saving, x), peak(plain, x)
    assert lower < 0.75 * higher, f"{lower / 2**20:.0f} of {higher / 2**20:.0f} MiB"


def test_nothing_lives_on_after_the_backward():
    x, _, saving = models()
    step(saving, x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        loss = saving(x).float().square().sum()
    loss.backward()
    assert torch.cuda.memory_allocated() <= before + 2**20  # the graph of `loss` still exists


class Side(nn.Module):
    """A second convolution runs on a stream of its own."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU()
        self.first, self.second = nn.Conv2d(64, 64, 3), nn.Conv2d(64, 64, 3)

    def forward(self, x):
        y = self.relu(self.norm(self.conv(x)))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            other = self.second(y)
        y.record_stream(stream)
        torch.cuda.current_stream().wait_stream(stream)
        return (self.first(y) + other).mean((2, 3))


def test_readers_on_two_streams():
    x = torch.randn(8, 3, 64, 64, device="cuda")
    torch.manual_seed(0)
    model = kalmannorm.convert(Side().cuda(), x[:2], statistics_batch_size=2)
    saving = kalmannorm.fuse(model, x[:2], save_memory=True)
    grads = []
    for each in (saving, model):
        each(x).square().sum().backward()
        grads.append([p.grad for p in each.parameters()])
    for a, e in zip(*grads, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-3)
