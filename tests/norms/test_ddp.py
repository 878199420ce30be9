"""Under DistributedDataParallel: every parameter takes part, and buffers may be broadcast before the backward."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from kalmannorm import BatchKalmanNorm2d, BatchRenorm2d, convert, freeze_statistics, moments, set_inference
from kalmannorm._norms.computed_weights import compute_weights
from support import two_ranks

F64 = torch.float64


class Learned(nn.Module):
    """Two norms, the second with the posterior of the first as its `previous`."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(1)
        self.conv1, self.conv2 = (nn.Conv2d(a, b, 3, dtype=F64) for a, b in ((2, 3), (3, 4)))
        self.norm1 = BatchKalmanNorm2d(3, dtype=F64, statistics_batch_size=2, **options)
        self.norm2 = BatchKalmanNorm2d(4, 3, dtype=F64, statistics_batch_size=2, rank=2, **options)
        nn.init.constant_(self.norm2.transition.left, 0.5)

    def forward(self, x):
        y = self.norm1(self.conv1(x)).relu()
        return self.norm2(self.conv2(y), self.norm1.posterior)


class Weights(nn.Module):
    """The prior of the second norm is a belief, carried by hand through what lies between."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(1)
        self.conv1, self.conv2 = (nn.Conv2d(a, b, 3, dtype=F64) for a, b in ((2, 3), (3, 4)))
        self.norm1 = BatchKalmanNorm2d(3, dtype=F64, statistics_batch_size=2, **options)
        self.norm2 = BatchKalmanNorm2d(4, 4, dtype=F64, statistics_batch_size=2, transition="weights", **options)

    def forward(self, x):
        y = self.norm1(self.conv1(x)).relu()
        belief = moments.relu(moments.belief(self.norm1.weight, self.norm1.bias))
        prior = moments.convolution(belief, self.conv2.weight, self.conv2.bias, input_size=y.shape[2:])
        return self.norm2(self.conv2(y), prior)


class Forgotten(Learned):
    """No `previous` in the call: the filter of the second norm is not asked."""

    def forward(self, x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))


class Renorm(nn.Sequential):
    def __init__(self):
        torch.manual_seed(1)
        norm = BatchRenorm2d(4, dtype=F64, warmup_steps=0, r_steps=2, d_steps=2, statistics_batch_size=2)
        super().__init__(nn.Conv2d(2, 4, 5, dtype=F64), norm)


class ComputedFilters(nn.Sequential):
    """Convolutions with standardized filters. The hooks that compute them are inside of DDP."""

    def __init__(self):
        torch.manual_seed(1)
        super().__init__(nn.Conv2d(2, 4, 3, dtype=F64), nn.ReLU(), nn.Conv2d(4, 4, 3, dtype=F64))
        compute_weights(self, "standardized")


def frozen(kind, mode="population", **options):
    """In training, but with the statistics it has."""
    net = kind(**options)
    net(random(9, 4))
    net.zero_grad()
    set_inference(net, mode)
    freeze_statistics(net)
    return net


def norms_in_eval(kind):
    net = frozen(kind)
    freeze_statistics(net, False)
    for module in (net.norm1, net.norm2):
        module.eval()
    return net


def random(seed, n):
    return torch.randn(n, 2, 7, 7, dtype=F64, generator=torch.Generator().manual_seed(seed))


NETS = {
    "learned": Learned,
    "weights": Weights,
    "forgotten previous": Forgotten,
    "frozen": partial(frozen, Learned),
    "frozen, not affine": partial(frozen, Learned, affine=False),
    "frozen weights": partial(frozen, Weights),
    "frozen batch": partial(frozen, Learned, "batch"),
    "frozen example": partial(frozen, Learned, "example"),
    "norms in eval": partial(norms_in_eval, Learned),
    "frozen, forgotten previous, batch": partial(frozen, Forgotten, "batch"),
    "frozen, forgotten previous, example": partial(frozen, Forgotten, "example"),
    "synchronised": partial(Learned, process_group="world"),
    "synchronised, forgotten previous": partial(Forgotten, process_group="world"),
    "frozen synchronised": partial(frozen, Learned, process_group="world"),
    "renorm": Renorm,
    "computed filters": ComputedFilters,
}


def gradients(net, parts):
    """Two forwards, then one backward."""
    net.zero_grad()
    sum(net(x).pow(3).sum() for x in parts).backward()
    return {name.removeprefix("module."): p.grad for name, p in net.named_parameters()}


def wrapped(rank, name):
    """Twice, because DDP complains of what took no part in the last backward at the next forward."""
    net = DistributedDataParallel(NETS[name]())
    for _ in range(2):
        grads = gradients(net, [random(rank, 4), random(2 + rank, 4)])
    return {key: None if grad is None else grad.clone() for key, grad in grads.items()}


def compiled(rank):
    """Gradients and statistics without and with torch.compile, the collectives in one graph."""
    results = []
    for compile in (False, True):
        norm = BatchKalmanNorm2d(2, dtype=F64, process_group="world")
        run = torch.compile(norm, fullgraph=True, backend="aot_eager") if compile else norm
        results.append([*gradients(run, [random(rank, 4)]).values(), *norm.buffers()])
    return results


class Wide(nn.Module):
    """Its convolutions are together larger than a bucket of DDP. Dynamo does not enter a bare `Sequential` in DDP."""

    def __init__(self):
        super().__init__()
        sizes = (2, 96), (96, 96), (96, 96), (96, 96)
        blocks = [(nn.Conv2d(*size, 3, padding=1), nn.BatchNorm2d(96), nn.ReLU()) for size in sizes]
        self.layers = nn.Sequential(*(layer for block in blocks for layer in block))

    def forward(self, x):
        return self.layers(x)


def converted_and_compiled(rank):
    """A converted model in DDP, without and with torch.compile, which divides its graph by DDP's buckets."""
    results = []
    for compile in (False, True):
        torch.manual_seed(0)
        net = convert(Wide().to(F64), random(0, 4), statistics_batch_size=2)
        net = DistributedDataParallel(net, bucket_cap_mb=1)
        counter = CompileCounterWithBackend("aot_eager")
        run = torch.compile(net, backend=counter) if compile else net
        for seed in (rank, 2 + rank):
            grads = gradients(run, [random(seed, 4)])
        results.append([*grads.values(), *net.buffers(), torch.tensor(counter.frame_count)])
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    scenarios = {name: partial(wrapped, name=name) for name in NETS}
    return two_ranks.run(
        tmp_path_factory.mktemp("ddp"), {**scenarios, "compiled": compiled, "converted": converted_and_compiled}
    )


def interleaved(seeds):
    """Groups of both ranks side by side: two examples of one, two of the other."""
    return torch.stack([random(seed, 4).unflatten(0, (2, 2)) for seed in seeds], 1).flatten(0, 2)


@pytest.mark.parametrize("name", [name for name in NETS if name != "renorm"])
def test_ddp_several_forwards_before_backward(ranks, name):
    """Buffers are broadcast in place before each forward (pytorch#22095, #175024); gradients are the ranks' average."""
    if name.startswith("synchronised"):
        net = NETS[name]()
        for norm in (net.norm1, net.norm2):
            norm.statistics_batch_size = 4
        expected = {k: g / 2 for k, g in gradients(net, [interleaved((0, 1)), interleaved((2, 3))]).items()}
    else:
        own = [gradients(NETS[name](), [random(rank, 4), random(2 + rank, 4)]) for rank in range(2)]
        expected = {key: (own[0][key] + own[1][key]) / 2 for key in own[0]}
    for key, grad in expected.items():
        for rank in ranks:
            torch.testing.assert_close(
                rank[name][key], grad, rtol=1e-9, atol=1e-9, msg=lambda m, key=key: f"{key}: {m}"
            )


def test_ddp_renorm_with_buffers_broadcast_in_between(ranks):
    """Each rank corrects towards the buffers of rank 0, so only this: it runs, and the ranks agree."""
    assert all(torch.equal(ranks[0]["renorm"][key], grad) for key, grad in ranks[1]["renorm"].items())


@pytest.mark.parametrize("name", ["forgotten previous", "frozen", "frozen, not affine", "norms in eval"])
def test_ddp_no_parameter_is_unused(ranks, name):
    """What this forward did not ask has a gradient of zero, not none: DDP would stop at the next forward."""
    for key in ("gain_logit", "transition.left", "transition.right", "transition.noise"):
        grad = ranks[0][name][f"norm2.{key}"]
        assert torch.equal(grad, torch.zeros_like(grad)), key


def test_synchronised_and_compiled(ranks):
    for rank in ranks:
        for expected, actual in zip(*rank["compiled"], strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_converted_and_compiled(ranks):
    for rank in ranks:
        (*expected, _), (*actual, graphs) = rank["converted"]
        assert graphs > 1  # one for each bucket
        for one, other in zip(expected, actual, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-9)


def bits(t):
    return t.contiguous().view(torch.int64)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("mode", ["population", "batch", "example"])
def test_taking_part_changes_no_bit(mode, affine):
    """Neither a zero's sign, nor anything where an idle parameter is NaN."""
    layer = BatchKalmanNorm2d(3, 3, statistics_batch_size=2, affine=affine, inference=mode, dtype=F64).eval()
    layer._missed_previous = True  # the warning is not at issue
    x = torch.randn(4, 3, 2, 2, dtype=F64)
    x[:, :, 0, 0] = -0.0
    if affine:
        nn.init.constant_(layer.bias, -0.0)  # and so y = -0 where x = -0, in `population`
    nn.init.constant_(layer.gain_logit, float("nan"))
    with torch.no_grad():
        expected = layer(x)
    y = layer(x)
    assert torch.equal(bits(y), bits(expected))
    y.sum().backward()
    for name, parameter in layer.named_parameters():
        assert name in ("weight", "bias") or torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_plain_inference_pays_nothing():
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    seen = []
    layer, x = BatchKalmanNorm2d(3, 3, statistics_batch_size=2).eval(), torch.randn(4, 3, 2, 2)
    with torch.no_grad(), Names():
        layer(x)
    assert not {"clone", "sum", "sub"} & set(seen), seen


def test_frozen_and_compiled():
    torch._dynamo.reset()
    net = frozen(Learned)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    x = random(0, 4)
    assert torch.equal(compiled(x), net(x))
    expected, actual = gradients(net, [x]), gradients(compiled, [x])
    for (key, e), a in zip(expected.items(), actual.values(), strict=True):
        torch.testing.assert_close(a, e, msg=key)
    assert actual["_orig_mod.norm2.gain_logit"] == 0


def test_not_initialised_and_compiled():
    torch._dynamo.reset()
    net, x = Learned(process_group="world"), random(0, 4)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), Learned()(x))
