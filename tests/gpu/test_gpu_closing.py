"""The closing phase on a GPU: as on the CPU, in half precision, and inside a CUDA graph."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from kalmannorm import ClosingPhase, GroupedNorm, convert, fuse
from kalmannorm._ops.normalize import aten_settled
from support.gpu_kernels import kernels_in
from support.op_arguments import TOLERANCE, relative_error
from support.settled_cases import Case, doubled, inputs_of, results

pytestmark = pytest.mark.gpu
F64 = torch.float64


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def net(dtype: torch.dtype = F64, **options) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 24, 3), nn.BatchNorm2d(24), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 3)).to(dtype)
    return convert(model, torch.zeros(2, 3, 9, 9, dtype=dtype), **{"statistics_batch_size": 2, **options})


def images(seed: int, examples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(examples, 3, 9, 9, generator=rng, dtype=F64), torch.randint(0, 3, (examples,), generator=rng)


def train(model: nn.Module, steps: int = 8, layout: torch.memory_format = torch.contiguous_format) -> None:
    phase = ClosingPhase(model, steps, start=0.2, end=0.6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    like = next(model.parameters())
    for number in range(steps):
        optimizer.zero_grad()
        x, target = images(number, 8 if number else 7)
        x = x.to(like.device, like.dtype).contiguous(memory_format=layout)
        nn.functional.cross_entropy(model(x), target.to(like.device)).backward()
        optimizer.step()
        phase.step()


def assert_close(model: nn.Module, other: nn.Module, tolerance: float) -> None:
    theirs = other.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.cpu(), theirs[name].cpu(), rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("options", [{}, {"to": "ghost"}, {"transition": "learned"}], ids=str)
def test_as_on_the_cpu(options, layout):
    model = net(**options)
    other = copy.deepcopy(model).cuda()
    train(model)
    train(other, layout=layout)
    assert_close(model, other, 1e-8)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("options", [{}, {"to": "ghost"}, {"transition": "learned"}], ids=str)
@pytest.mark.parametrize("strength", [0.0, 0.4, 1.0])
def test_kernels_in_float32(strength, options, layout):
    """float64 runs in PyTorch operations, float32 in Triton kernels."""
    model = net(**options)
    for norm in model.modules():
        if isinstance(norm, GroupedNorm):
            norm.begin_closing()
            norm.closing.strength.fill_(strength)
            norm.closing.averages.normal_()
            norm.running_var.uniform_(0.5, 1.5)
    other = copy.deepcopy(model).float().cuda()
    x, target = images(0, 7)
    nn.functional.cross_entropy(model(x), target).backward()
    x = x.float().cuda().contiguous(memory_format=layout)
    nn.functional.cross_entropy(other(x), target.cuda()).backward()
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad.cpu().double(), mine.grad, rtol=1e-3, atol=1e-4, msg=name)
    for (name, mine), theirs in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(theirs.cpu().double(), mine.double(), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("m", [1, 2])
def test_autocast_stays_near_float32(m):
    losses = []
    for half in (False, True):
        model = net(torch.float32, statistics_batch_size=m).cuda().to(memory_format=torch.channels_last)
        phase = ClosingPhase(model, 20, start=0, end=0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x, target = images(0, 16)
        x, target = x.float().cuda().contiguous(memory_format=torch.channels_last), target.cuda()
        for _ in range(20):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=half):
                loss = nn.functional.cross_entropy(model(x), target)
            loss.backward()
            optimizer.step()
            phase.step()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_a_cuda_graph_of_the_step():
    """The phase moves outside the graph. It is made before: averages, sums and λ stay where the graph has them."""
    model = net(torch.float32).cuda()
    for norm in model.modules():
        if isinstance(norm, GroupedNorm):
            norm.begin_closing()
    other = copy.deepcopy(model)
    batches = [[each.cuda() for each in images(number)] for number in range(6)]
    phase, optimizer = ClosingPhase(model, 6, start=0, end=0.5), torch.optim.SGD(model.parameters(), lr=0.1)
    for x, target in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.float()), target).backward()
        optimizer.step()
        phase.step()

    x, target = (each.clone() for each in batches[0])
    phase, optimizer = ClosingPhase(other, 6, start=0, end=0.5), torch.optim.SGD(other.parameters(), lr=0.1)
    for parameter in other.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(other(x.float()), target).backward()
        optimizer.step()

    start = copy.deepcopy(other.state_dict())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    other.load_state_dict(start)
    for norm in other.modules():
        if isinstance(norm, GroupedNorm):
            norm.closing.probe.grad.zero_()
    for images_now, labels in batches:
        x.copy_(images_now)
        target.copy_(labels)
        graph.replay()
        phase.step()
    assert_close(model, other, 1e-4)


def test_a_step_of_the_phase_takes_few_launches():
    """It runs in every step, so it must not launch something for every norm."""
    counts = []
    for depth in (4, 24):
        layers = [layer for _ in range(depth) for layer in (nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))]
        x = torch.randn(4, 8, 5, 5, device="cuda")
        model = convert(nn.Sequential(*layers).cuda(), x, statistics_batch_size=2)
        phase = ClosingPhase(model, 10, start=0, end=0.5)
        model(x).sum().backward()
        phase.step()
        counts.append(len(kernels_in(phase.step)))
    assert counts[1] <= counts[0] + 8


SIZES = {
    "one position": ((7, 40, 1, 1), 2),
    "odd": ((5, 6, 3, 3), 2),
    "m = 1": ((5, 6, 3, 3), 1),
    "small maps": ((9, 96, 7, 7), 2),
    "one group": ((9, 96, 7, 7), 64),
    "large maps": ((4, 24, 56, 56), 1),
    "shared groups": ((8, 64, 56, 56), 4),
    "many groups": ((64, 16, 32, 32), 2),
    "long shares": ((3, 3, 300, 300), 2),
}
PLAIN = {"prior": 1, "gain": 1}
FULL = {"prior": 2, "gain": 2, "weight": 2, "bias": 2, "residual": True, "moments": True}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("given", [PLAIN, FULL], ids=["plain", "full"])
@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_of_settled_norms(dtype, last, given, name):
    """Results and gradients of both directions against PyTorch operations in float64, and the same bits twice."""
    from kalmannorm._ops.normalize import triton_settled_run

    case = Case(*SIZES[name], last, relu=True, dtype=dtype, device="cuda", **given)
    inputs, rest = inputs_of(case)
    exact = type(inputs)(*doubled(inputs))
    before = aten_settled.forward(exact._replace(relu=False)).y
    rest[0] = torch.where(before.abs() < 1e-3, 0, rest[0])  # near the kink, rounding decides the mask of the ReLU
    actual = results(triton_settled_run, inputs, rest)
    expected = results(aten_settled, exact, doubled(rest))
    tolerance = 2e-5 if dtype == torch.float32 else TOLERANCE[dtype]
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.shape == e.shape, index
        assert relative_error(a, e) < tolerance, index
    for index, (a, b) in enumerate(zip(actual, results(triton_settled_run, inputs, rest), strict=True)):
        assert torch.equal(a, b), index


@pytest.mark.parametrize("fused", [False, True])
def test_a_settled_model_takes_few_launches(fused):
    """No more than at a smaller λ, where the norm observes x first. The kernels are those of settled norms."""
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU())]
    x = torch.randn(4, 8, 5, 5, device="cuda")
    model = convert(nn.Sequential(*layers).cuda(), x, statistics_batch_size=2)
    model = fuse(model, x) if fused else model
    ClosingPhase(model, 10, start=0, end=0)
    norms = [norm for norm in model.modules() if isinstance(norm, GroupedNorm)]
    counts = []
    for settled in (True, False):
        for norm in norms:
            norm.settle_closing(settled)
        names = kernels_in(lambda: model(x).sum().backward())
        assert any("settled" in name for name in names) == settled
        counts.append(len(names))
    assert counts[0] < counts[1]


def test_a_settled_norm_is_population_inference():
    for layout in (torch.contiguous_format, torch.channels_last):
        model = net(torch.float32).cuda()
        ClosingPhase(model, 4, start=0, end=0)
        x = images(0, 7)[0].float().cuda().contiguous(memory_format=layout)
        expected = copy.deepcopy(model).eval()(x)
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
