"""Priors that read computed filters, with kernels on a GPU: exact, in steps whose filters have other addresses."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from kalmannorm import convert
from kalmannorm._ops.propagate import triton_bundle
from support.gpu_kernels import kernels_in

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def resnet(layout: torch.memory_format = torch.channels_last) -> nn.Module:
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10)
    model.maxpool = nn.Identity()
    model = convert(model, torch.zeros(2, 3, 32, 32), statistics_batch_size=2, weight_standardization=True)
    return model.to(memory_format=layout)


def images(seed: int, layout: torch.memory_format = torch.channels_last) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 3, 32, 32, generator=rng).contiguous(memory_format=layout)
    return x, torch.randint(0, 10, (8,), generator=rng)


def step(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> None:
    model.zero_grad()
    F.cross_entropy(model(x), target).backward()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_gradients_are_those_of_float64(layout):
    """Without ReLU, at which rounding makes gradients jump."""
    torch.manual_seed(0)
    sizes = [3, 16, 24, 24, 32, 10]
    blocks = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.SiLU()) for a, b in itertools.pairwise(sizes)
    ]
    net = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()).to(memory_format=layout)
    exact = convert(net, torch.zeros(2, 3, 32, 32), statistics_batch_size=2, weight_standardization=True).double()
    model, kept = copy.deepcopy(exact).float().cuda(), []
    for seed in range(3):
        x, target = images(seed, layout)
        kept.append(torch.empty(1_000 + 7_000 * seed, device="cuda"))  # memory is elsewhere in each step
        step(exact, x.double(), target)
        step(model, x.cuda(), target.cuda())
        for (name, mine), theirs in zip(exact.named_parameters(), model.parameters(), strict=True):
            size = mine.grad.abs().max()
            assert (theirs.grad.cpu() - mine.grad).abs().max() <= 1e-3 * size + 1e-6, name


def test_one_table_serves_all_steps(monkeypatch):
    written, bind = [], triton_bundle.bind
    monkeypatch.setattr(triton_bundle, "bind", lambda *given: written.append(given) or bind(*given))
    model, kept = resnet().cuda(), []
    for seed in range(5):
        x, target = images(seed)
        kept.append(torch.empty(1_000 + 7_000 * seed, device="cuda"))
        step(model, x.cuda(), target.cuda())
    assert len(written) == 1


def test_filters_that_are_computed_one_by_one():
    """As for a part of a model. They are copied into one memory."""
    model, (x, target) = resnet().cuda(), images(0)
    x, target = x.cuda(), target.cuda()
    step(model, x, target)
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    assert model._forward_pre_hooks
    model._forward_pre_hooks.clear()  # they compute the filters together
    step(model, x, target)
    for mine, theirs in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(mine.grad, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))


def test_few_launches():
    """Of priors until they fade. Each layer by itself would be some hundreds."""
    model, (x, target) = resnet().cuda(), images(0)
    x, target = x.cuda(), target.cuda()
    plain = torchvision.models.resnet18(num_classes=10).to(memory_format=torch.channels_last)
    plain.maxpool = nn.Identity()
    plain = convert(plain, torch.zeros(2, 3, 32, 32), statistics_batch_size=2).cuda()
    counts = []
    for each in (plain, model):
        step(each, x, target)
        counts.append(sum("layers" in name for name in kernels_in(lambda each=each: step(each, x, target))))
    assert counts[0] == counts[1] > 0


def test_a_cuda_graph():
    model = resnet().cuda()
    other = copy.deepcopy(model)
    x, target = (each.cuda() for each in images(0))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(model, x, target)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    model.zero_grad()
    with torch.cuda.graph(graph):
        F.cross_entropy(model(x), target).backward()
    for seed in range(3):
        now, labels = (each.cuda() for each in images(seed))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                theirs.copy_(mine)
            x.copy_(now)
            target.copy_(labels)
        graph.replay()
        step(other, now, labels)
        for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
            close = {"rtol": 1e-2, "atol": 1e-3 * float(theirs.grad.abs().max()) + 1e-7}
            torch.testing.assert_close(mine.grad, theirs.grad, **close, msg=lambda m, n=name: f"{n}: {m}")
