"""Graphed models with real CUDA graphs: the cases of the CPU, ResNets, and what only a GPU has."""

from __future__ import annotations

import copy

import pytest
import torch
import torchvision
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from kalmannorm import convert, fuse, graphed
from support.graphed_cases import CASES, Dropping, alike, close, converted, image, images, loss_of, pair, steps_alike

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def make(model, limit=8):
    return graphed(model, limit=limit)


@pytest.mark.parametrize("name", CASES)
def test_graphed(name):
    CASES[name](make, "cuda")


def resnet(kind):
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10).cuda().to(memory_format=torch.channels_last)
    x = pictures(2)
    if kind == "BatchNorm":
        return model
    model = convert(model, x, statistics_batch_size=2)
    return fuse(model, x) if kind == "fused" else model


def pictures(batch=8, seed=0):
    x = torch.randn(batch, 3, 64, 64, generator=torch.Generator().manual_seed(seed))
    return x.cuda().to(memory_format=torch.channels_last)


@pytest.mark.parametrize("kind", ["BatchNorm", "BKN", "fused"])
def test_resnet18(kind):
    """Losses, gradients and statistics of every step, each from the weights of the eager model."""
    run, twin = pair(make, resnet(kind))
    labels = torch.arange(8).cuda() % 10
    optimizers = [torch.optim.SGD(each.parameters(), 0.01, momentum=0.9) for each in (run, twin)]
    for number in range(5):
        losses = []
        for each, optimizer in zip((run, twin), optimizers, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(each(pictures(seed=number)), labels)
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-3)
        for (name, one), other in zip(run.named_parameters(), twin.parameters(), strict=True):
            size = other.grad.abs().max()
            assert (one.grad - other.grad).abs().max() <= 1e-2 * size + 1e-6, f"step {number}: {name}"
        for (name, one), other in zip(run.named_buffers(), twin.named_buffers(), strict=True):
            torch.testing.assert_close(one, other[1], rtol=1e-3, atol=1e-3, msg=lambda m, name=name: f"{name}: {m}")
        optimizers[1].step()
        run.load_state_dict(twin.state_dict())
    assert run.cuda_graphs.replays >= 3 and run.cuda_graphs.captures == 1, str(run.cuda_graphs)


def test_autocast_with_its_cache():
    """The loop that users write: without `cache_enabled=False`, and with the last loss when a graph is captured."""
    run, twin = pair(make, resnet("BKN"))
    labels = torch.arange(8).cuda() % 10
    for number in range(5):
        losses = []
        for each in (run, twin):
            each.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(each(pictures(seed=number)), labels)
            loss.backward()
            with torch.no_grad():  # other weights: a graph with the casts of before would not see them
                for parameter in each.parameters():
                    parameter.mul_(1.01)
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, rtol=3e-2, atol=3e-2)
    assert run.cuda_graphs.replays >= 3, str(run.cuda_graphs)


def test_a_replay_launches_no_kernels_from_python():
    """The norms run inside the graphs: the number of launches from the host does not depend on the model."""
    run = make(converted("cuda"))
    for x in images("cuda", 4):
        loss_of(run, x).backward()

    def launched():
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            loss_of(run, x).backward()
        return sum("batch_norm" in each.key or "conv" in each.key for each in profile.key_averages())

    assert launched() == 0


class Waiting(Dropping):
    def __init__(self, way):
        super().__init__()
        self.way = way

    def forward(self, x):
        y = super().forward(x)
        if self.way == "item":
            return y * (2.0 if y.sum().item() > 0 else 3.0)
        torch.cuda.synchronize()
        return y


def test_a_model_that_waits_for_the_gpu():
    run, twin = pair(make, Waiting("item").cuda())
    for seed in range(4):
        x = torch.randn(8, 6).cuda()
        for each in (run, twin):
            torch.manual_seed(seed)
            each.zero_grad()
            loss_of(each, x).backward()
        alike(run, twin)
    assert run.cuda_graphs.replays == 0 and any("waits" in reason for reason in run.cuda_graphs.eager)


def test_a_capture_that_fails():
    """Afterwards random numbers, memory and captures of other models are as before."""
    run, twin = pair(make, Waiting("synchronize").cuda())
    x = torch.randn(8, 6).cuda()
    run(x), twin(x)
    with pytest.warns(UserWarning, match="runs without a graph"):
        run(x)
    for seed in range(3):
        for each in (run, twin):
            torch.manual_seed(seed)
            each.zero_grad()
            loss_of(each, x).backward()
        alike(run, twin)
    assert run.cuda_graphs.replays == 0
    CASES["random_numbers"](make, "cuda")


@pytest.mark.filterwarnings("ignore:.*AccumulateGrad node's stream")
def test_on_several_streams():
    run, twin = pair(make, converted("cuda"))
    streams = [torch.cuda.Stream() for _ in range(2)]
    for number, x in enumerate(images("cuda", 8)):
        here, side = torch.cuda.current_stream(), streams[number % 2]
        run.zero_grad(), twin.zero_grad()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            out = run(x)
            (out.square().mean()).backward()
        here.wait_stream(side)
        loss_of(twin, x).backward()
        alike(run, twin)
    assert run.cuda_graphs.replays >= 6


def test_memory_is_not_that_of_every_shape():
    """Activations of all graphs are in one pool, and dropped graphs give it back."""
    torch.cuda.empty_cache()
    run = make(nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(8))).cuda())

    def held(batches):
        for batch in batches:
            for _ in range(3):
                run(torch.randn(batch, 8, 64, 64).cuda()).sum().backward()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    before = torch.cuda.memory_reserved()
    one = held([64]) - before
    four = held([63, 62, 61]) - before
    assert four < 2.5 * one, (one, four)


@pytest.mark.filterwarnings("ignore")  # torch warns of devices that it guesses
def test_ddp(tmp_path):
    distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        model = converted("cuda")
        twin = copy.deepcopy(model)
        nets = [DistributedDataParallel(each, device_ids=[0]) for each in (make(model), twin)]
        steps_alike(*nets, images("cuda", 5))
        assert nets[0].module.cuda_graphs.replays >= 3, str(nets[0].module.cuda_graphs)
    finally:
        distributed.destroy_process_group()


def test_to_the_cpu_and_back():
    run, twin = pair(make, converted("cuda"))
    steps_alike(run, twin, images("cuda", 3))
    held = torch.cuda.memory_allocated()
    run.cpu(), twin.cpu()
    steps_alike(run, twin, images("cpu", 2))
    run.cuda(), twin.cuda()
    steps_alike(run, twin, images("cuda", 3))
    assert run.cuda_graphs.captures == 2 and torch.cuda.memory_allocated() < 2 * held
    close(run.eval()(image().cuda()), twin.eval()(image().cuda()))
