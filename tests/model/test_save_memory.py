"""`fuse(…, save_memory=True)`: outputs of norms are computed again in the backward. No bit changes."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import kalmannorm
from kalmannorm._norms.computed_weights import ComputedWeight
from kalmannorm._ops.normalize import aten, native
from kalmannorm._support.kept_tensors import kept_tensors
from support import two_ranks
from support.fusion_nets import NETS, assert_same, converted, images, trained
from support.wide import narrow


def fused(model, x=None, **options):
    return kalmannorm.fuse(model, images() if x is None else x, save_memory=True, **options)


def kept_bytes(model, x):
    _, kept = kept_tensors(lambda: model(x).sum(), [x, *model.parameters(), *model.buffers()])
    return sum(each.bytes for each in kept)


@pytest.mark.parametrize("name", narrow(NETS, ("bottleneck", "densenet", "timm-resnet")))
def test_no_bit_changes_and_less_is_kept(name):
    model, x = converted(name), images()
    plain, saving = kalmannorm.fuse(model, x), fused(model)
    assert kept_bytes(saving, x) < 0.8 * kept_bytes(plain, x), str(saving.fusion)
    assert list(saving.state_dict()) == list(model.state_dict())
    assert_same(trained(saving, x, 2), trained(plain, x, 2), 0)
    with torch.no_grad():
        assert_same([saving.eval()(x)], [plain.eval()(x)], 0)


@pytest.mark.parametrize("to", ["ghost", "renorm"])
def test_the_baselines_save_too(to):
    model, x = converted("basic", to), images()
    plain, saving = kalmannorm.fuse(model, x), fused(model)
    assert kept_bytes(saving, x) < 0.7 * kept_bytes(plain, x)
    assert_same(trained(saving, x, 2), trained(plain, x, 2), 0)


class Small(nn.Module):
    """A stem with a pool, six residual sums in a row, and a linear layer after a norm."""

    def __init__(self, sums=6):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.ModuleList([Block() for _ in range(sums)])
        self.head = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5))

    def forward(self, x):
        x = self.stem(x)
        for each in self.blocks:
            x = each(x)
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + x)


def small(x, sums=6, **options):
    torch.manual_seed(0)
    model = kalmannorm.convert(Small(sums).to(x.dtype), x, statistics_batch_size=2, **options)
    return kalmannorm.fuse(model, x), fused(model, x)


filters = pytest.mark.parametrize("options", [{}, {"weight_standardization": True}], ids=["plain", "computed"])


def gradients(model, x, run=None):
    model.zero_grad()
    (model if run is None else run)(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_the_report_says_what_is_saved_where():
    _, saving = small(images())
    report = saving.fusion
    assert report.saved["stem.1"] == "stem.3" and report.saved["blocks.0.bn1"] == "blocks.0.conv2"
    assert report.saved["blocks.0.bn2"] == "blocks.1.conv1" and report.saved["head.1"] == "head.3"
    assert list(report.kept) == ["blocks.4.bn2"]  # four sums before it are computed again
    assert "outputs of 13 of 14 norms computed again in the backward" in str(report).splitlines()


@pytest.mark.parametrize("to", ["kalman", "ghost"])
def test_computed_filters(to):
    """Convolutions with standardized filters save the same inputs as plain ones."""
    x = images()
    ordinary = small(x, to=to)
    plain, saving = small(x, to=to, weight_standardization=True)
    assert isinstance(saving.blocks[0].conv2, ComputedWeight)
    assert saving.fusion.saved == ordinary[1].fusion.saved and saving.fusion.kept == ordinary[1].fusion.kept
    less = [kept_bytes(one, x) - kept_bytes(other, x) for one, other in (ordinary, (plain, saving))]
    assert less[0] == less[1] > 0
    assert_same(trained(saving, x, 2), trained(plain, x, 2), 0)


def watch_again(monkeypatch, tell):
    """Call `tell` with every output that is computed again, in C or in PyTorch operations."""
    for module in (aten, native):

        def watched(*given, again=module.again):
            y = again(*given)
            tell(y)
            return y

        monkeypatch.setattr(module, "again", watched)


@filters
def test_every_output_is_computed_once(monkeypatch, options):
    calls = []
    watch_again(monkeypatch, calls.append)
    _, saving = small(images(), **options)
    calls.clear()
    gradients(saving, images())
    assert len(calls) == 13


@filters
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("examples", [4, 5])
def test_autocast(layout, examples, options):
    x = torch.randn(examples, 3, 16, 16).to(memory_format=layout)
    plain, saving = (model.to(memory_format=layout) for model in small(x, **options))
    with torch.autocast("cpu", torch.bfloat16):
        assert kept_bytes(saving, x) < 0.8 * kept_bytes(plain, x)
        outputs = [model(x) for model in (saving, plain)]
    for out in outputs:
        out.float().square().sum().backward()
    assert_same(outputs, outputs[::-1], 0)
    assert_same([p.grad for p in saving.parameters()], [p.grad for p in plain.parameters()], 0)


@filters
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_activation_checkpoints(reentrant, options):
    """Each block is one segment, so its input comes from another segment."""
    x = images()
    plain, saving = small(x, 3, **options)

    def run(model):
        def forward(x):
            x = model.stem(x)
            for each in model.blocks:
                x = checkpoint(each, x, use_reentrant=reentrant)
            return model.head(x.mean((2, 3)))

        return forward

    expected = gradients(plain, x, run(plain))
    assert_same(gradients(saving, x, run(saving)), expected, 0)
    assert_same([list(saving.buffers())], [list(plain.buffers())], 0)
    x.requires_grad_()
    whole = [gradients(m, x, lambda x, m=m: checkpoint(m, x, use_reentrant=reentrant)) for m in (saving, plain)]
    assert_same(*whole, 0)


class Checkpointed(Small):
    """Each block is one segment."""

    def forward(self, x):
        x = self.stem(x)
        for each in self.blocks:
            x = checkpoint(each, x, use_reentrant=False)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("transition", ["weights", "learned"])
@filters
def test_segments_of_checkpoints_are_freed(monkeypatch, transition, options):
    """A tensor that holds its segment would stay for ever: the segment holds the tensor where Python cannot see it."""
    segments, frame = [], torch.utils.checkpoint._CheckpointFrame
    first = frame.__init__

    def noted(self, *given, **named):
        first(self, *given, **named)
        segments.append(weakref.ref(self))

    monkeypatch.setattr(frame, "__init__", noted)
    x = images()
    torch.manual_seed(0)
    net = Checkpointed(3).to(x.dtype)
    model = kalmannorm.convert(net, x, statistics_batch_size=2, transition=transition, **options)
    for each in (model, kalmannorm.fuse(model, x), fused(model, x)):
        for run in (each, functools.partial(checkpoint, each, use_reentrant=False)):
            segments.clear()
            gradients(each, x, run)
            run(x)  # and without a backward
            assert len(segments) >= 6
            each(x)  # the last forward may be remembered until the next one
            kept = segments[:-3]
            gc.collect()
            assert not any(segment() for segment in kept), (type(each), run)


@filters
def test_twice_through_the_same_graph(options):
    x = images()
    plain, saving = small(x, **options)
    for model in (plain, saving):
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same([p.grad for p in saving.parameters()], [p.grad for p in plain.parameters()], 0)


@filters
def test_second_derivatives(options):
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    results = []
    for model in small(x, 2, **options):
        weights = list(model.parameters())
        first = torch.autograd.grad(model(x).square().sum(), weights, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), weights))
    largest = max(float(g.abs().max()) for g in results[0])
    for actual, expected in zip(*reversed(results), strict=True):
        assert (actual - expected).abs().max() < 1e-10 * largest  # some are noise around zero


@filters
def test_only_some_parameters_learn(options):
    x = images()
    plain, saving = small(x, **options)
    for model in (plain, saving):
        for name, p in model.named_parameters():
            p.requires_grad_(name.startswith(("blocks.3", "head")) or name.endswith("conv1.weight"))
    results = []
    for model in (plain, saving):
        learning = [p for p in model.parameters() if p.requires_grad]
        results.append(torch.autograd.grad(model(x).square().sum(), learning))
    assert_same(*results, 0)


@filters
@pytest.mark.parametrize("mode", ["population", "batch", "example"])
def test_gradients_in_every_inference(mode, options):
    x = images()
    results = []
    for model in small(x, 2, **options):
        model(x)
        kalmannorm.set_inference(model.eval(), mode)
        results.append(gradients(model, x))
    assert_same(*results, 0)


@filters
def test_functional_gradients(options):
    x = images()
    results = []
    for model in small(x, 1, **options):
        parameters = dict(model.named_parameters())
        kalmannorm.set_inference(model.eval(), "batch")

        def loss(parameters, model=model):
            return torch.func.functional_call(model, parameters, (x,)).square().sum()

        results.append(list(torch.func.grad(loss)(parameters).values()))
    assert_same(*results, 1e-10)


def test_writes_into_an_output():
    """A changed output is not what the norm would compute again."""

    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
            self.second, self.third = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            y = self.norm(self.first(x))
            y += 1
            return self.third(y) + self.second(y)

    x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    torch.manual_seed(0)
    model = kalmannorm.convert(Writes().double(), x, statistics_batch_size=2)
    saving = fused(model, x)
    assert saving.fusion.kept == {"norm": "its output is kept"}  # and not because a copy had other results
    assert_same(gradients(saving, x), gradients(model, x))


def test_a_changed_input_of_a_norm_is_noticed():
    x = images()
    _, saving = small(x, 1)
    inputs = []
    saving.blocks[0].bn1.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    loss = saving(x).sum()
    inputs[0].data.add_(0)  # not noticed, as everywhere in torch
    with torch.no_grad():
        inputs[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("to", ["kalman", "ghost"])
def test_memory_is_free_after_the_backward(to, monkeypatch):
    x = images()
    _, saving = small(x, to=to)
    inputs, rebuilt = [], []
    watch_again(monkeypatch, lambda y: rebuilt.append(weakref.ref(y.untyped_storage())))
    for module in saving.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_pre_hook(lambda _, given: inputs.append(weakref.ref(given[0].untyped_storage())))
    gc.collect()
    gc.disable()
    try:
        loss = saving(x).sum()
        loss.backward()  # the graph lives on in `loss`
        assert (len(inputs), len(rebuilt)) == (13, 13)
        assert not any(each() is not None for each in inputs + rebuilt)
    finally:
        gc.enable()


def test_copies_pickles_and_unfusing():
    x = images()
    plain, saving = small(x, 2)
    expected = gradients(plain, x)
    for twin in (copy.deepcopy(saving), pickle.loads(pickle.dumps(saving))):
        assert kept_bytes(copy.deepcopy(twin), x) == kept_bytes(copy.deepcopy(saving), x)
        assert_same(gradients(twin, x), expected, 0)
    assert isinstance(saving.blocks[0].conv1, nn.Conv2d) and type(saving.blocks[0].conv1).__name__ == "Conv2d"
    again = kalmannorm.fuse(saving, x)  # starts from the unfused one
    assert not again.fusion.saved and type(again.blocks[0].conv1) is nn.Conv2d
    assert kept_bytes(again, x) == kept_bytes(copy.deepcopy(plain), x)
    assert type(kalmannorm.to_batchnorm(saving.eval()).blocks[0].conv1) is nn.Conv2d


def test_folding_says_nothing_of_fused_layers():
    """A convolution gets a bias. Warnings are errors here."""
    x = images()
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False))
    net = net.append(nn.BatchNorm2d(4)).to(x.dtype)
    saving = fused(kalmannorm.convert(net, x, statistics_batch_size=2), x).eval()
    folded = kalmannorm.fold(saving)
    assert [type(each) for each in folded] == [nn.Conv2d, nn.Identity, nn.ReLU, nn.Conv2d, nn.Identity]
    torch.testing.assert_close(folded(x), saving(x))


def test_an_output_can_be_saved_to_a_file():
    x = images()
    _, saving = small(x, 1)
    y = saving.stem[1](saving.stem[0](x), relu=True)
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded, y)
    assert torch.equal(saving.stem[3](loaded), saving.stem[3](y))


def test_what_another_operation_keeps_is_left():
    class Squared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.second = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            y = F.relu(self.norm(self.first(x)))
            return self.second(y) + y.square()

    x = torch.randn(4, 3, 5, 5)
    saving = fused(kalmannorm.convert(Squared(), x, statistics_batch_size=2), x)
    assert saving.fusion.saved == {} and saving.fusion.kept == {"norm": "another operation keeps its output"}
    assert not saving.norm.rebuilds


def test_compiled_code_keeps_them_and_says_so():
    x = torch.randn(4, 3, 16, 16)
    plain, saving = small(x, 1)
    expected = gradients(plain, x)
    with pytest.warns(UserWarning, match="in compiled code outputs of norms are kept"):
        actual = gradients(saving, x, torch.compile(saving, backend="aot_eager"))
    assert_same(actual, expected, 1e-4)


def ddp_gradients(rank):
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(rank)).double()
    return [gradients(nn.parallel.DistributedDataParallel(model), x) for model in small(x, 2)]


def test_two_ranks(tmp_path):
    for rank in two_ranks.run(tmp_path, {"ddp": ddp_gradients}):
        plain, saving = rank["ddp"]
        assert_same(saving, plain, 0)
