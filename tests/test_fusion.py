"""A fused model is the model it was, in fewer passes: same numbers, same names, same uses."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings

import pytest
import timm
import torch
import torchvision
from timm.models.regnet import RegNet, RegNetCfg
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torchvision.models.densenet import DenseNet
from torchvision.models.resnet import BasicBlock, Bottleneck

import kalmannorm
from kalmannorm.fused import is_fused
from kalmannorm.grouped import GroupedNorm
from kalmannorm.lab import models

SHAPE = (4, 3, 24, 24)


def stem():
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))


def block(kind, inputs, planes, stride=1):
    """One of torchvision's, whose shortcut ends in a norm where it is a projection."""
    outputs = planes * kind.expansion
    projection = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
    return kind(inputs, planes, stride, projection if inputs != outputs else None)


class Residual(nn.Module):
    """torchvision's ResNet with fewer blocks and channels."""

    def __init__(self, kind):
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 3, 2, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        wide = 8 * kind.expansion
        self.layer1 = nn.Sequential(block(kind, 8, 8), block(kind, wide, 8))
        self.layer2 = nn.Sequential(block(kind, wide, 16, 2), block(kind, 2 * wide, 16))
        self.fc = nn.Linear(2 * wide, 5)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))


class Gated(nn.Module):
    """Control flow on values at the top; the blocks inside can be traced."""

    def __init__(self):
        super().__init__()
        self.stem = stem()
        self.block = BasicBlock(8, 8)
        self.other = BasicBlock(8, 8)
        self.norm = nn.BatchNorm2d(8)
        self.classifier = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        x = self.block(x) if x.mean() > 0 else self.other(x)
        return self.classifier(F.relu(self.norm(x)).mean((2, 3)))


NETS = {
    # shortcuts that are norms, and the ReLU of a block shared by all its sums and norms
    "basic": lambda: Residual(BasicBlock),
    "bottleneck": lambda: Residual(Bottleneck),
    "resnet18": lambda: torchvision.models.resnet18(num_classes=5),
    # pre-activation: functions, a list of tensors as argument, a norm at the end of a child
    "densenet": lambda: DenseNet(8, (2, 2), 16, num_classes=5),
    "cifar-resnet": lambda: models.build("cifar-resnet-20", classes=5, shape=(3, 16, 16), width=0.5),
    "bn-inception": lambda: models.build("bn-inception", classes=5, shape=SHAPE[1:], width=0.125),
    # timm: BatchNormAct2d with its own ReLU; without, in a sum; identities in between
    "regnet": lambda: RegNet(RegNetCfg(stem_width=8, depth=5, w0=8, wa=8.0, wm=1.5, group_size=4), 3, 5),
    "timm-resnet": lambda: timm.models.resnet.ResNet(
        timm.models.resnet.BasicBlock, (1, 1, 1, 2), 5, channels=(64, 8, 8, 8)
    ),
    "gated": Gated,
}
# Norms fused with ReLU, with sum and ReLU, and left.
COUNTS = {
    "basic": (5, 4, 1),
    "bottleneck": (9, 4, 2),
    "resnet18": (9, 8, 3),
    "densenet": (11, 0, 0),
    "cifar-resnet": (19, 0, 0),
    "bn-inception": (69, 0, 0),
    "regnet": (11, 5, 4),
    "timm-resnet": (6, 5, 3),
    "gated": (2, 1, 3),
}


def converted(name="basic", to="kalman", seed=0, **options):
    torch.manual_seed(seed)
    model = NETS[name]().double()
    size = {} if to == "group" else {"statistics_batch_size": 2}
    return kalmannorm.convert(model, torch.randn(SHAPE).double(), to=to, **size, **options)


def images():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).double()


@pytest.fixture
def x():
    return images()


@functools.cache
def _pair(name):
    model = converted(name)
    return model, kalmannorm.fuse(model, images())


def pair(name="basic"):
    """A model and the same one fused."""
    return copy.deepcopy(_pair(name))


def trained(model, x, steps=3, mode=True):
    """Outputs, gradients and buffers of a few steps of training."""
    model.train(mode)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    seen = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        out = model(x)
        F.cross_entropy(out, torch.arange(len(x)) % 5).backward()
        optimizer.step()
        seen.append(out.detach())
    grads = [p.grad for p in model.parameters()]
    return seen, grads, list(model.buffers()), list(model.parameters())


def assert_same(actual, expected, tolerance=1e-10):
    for a, b in zip(actual, expected, strict=True):
        if isinstance(a, list):
            assert_same(a, b, tolerance)
        elif a is None or b is None:
            assert a is b
        else:
            scale = float(b.detach().abs().max()) if b.numel() else 0.0
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance * (scale + 1e-3))


def counts(model):
    kinds = list(model.fusion.fused.values())
    return kinds.count("ReLU"), kinds.count("sum and ReLU"), len(model.fusion.left)


@pytest.mark.parametrize("name", NETS)
def test_trains_with_the_same_numbers(name, x):
    model, fused = pair(name)
    assert counts(fused) == COUNTS[name], str(fused.fusion)
    assert list(fused.state_dict()) == list(model.state_dict())
    assert_same(list(fused.buffers()), list(model.buffers()), 0)
    assert_same(trained(fused, x), trained(model, x))
    with torch.no_grad():
        assert_same([fused.eval()(x)], [model.eval()(x)])


@pytest.mark.parametrize("to", ["ghost", "renorm"])
def test_the_baselines_fuse_too(to, x):
    model = converted("basic", to)
    fused = kalmannorm.fuse(model, x)
    assert counts(fused) == COUNTS["basic"]
    assert_same(trained(fused, x), trained(model, x))


@pytest.mark.parametrize("options", [{}, {"covariance": "full"}], ids=["diagonal", "full"])
def test_learned_priors(options, x):
    model = converted("basic", transition="learned", **options)
    fused = kalmannorm.fuse(model, x)
    assert counts(fused) == COUNTS["basic"]
    assert_same(trained(fused, x, 2), trained(model, x, 2))


@pytest.mark.parametrize("mode", ["population", "batch", "example"])
def test_every_inference(mode, x):
    model = converted("bottleneck")
    trained(model, x, 1)
    fused = kalmannorm.fuse(model, x)
    assert counts(fused) == COUNTS["bottleneck"]
    for each in (model, fused):
        kalmannorm.set_inference(each, mode)
    assert_same(trained(fused, x, mode=False), trained(model, x, mode=False))  # gradients in eval mode, too
    with torch.no_grad():
        assert_same([fused(x)], [model(x)])


def test_frozen_statistics(x):
    model = converted()
    kalmannorm.freeze_statistics(model)
    fused = kalmannorm.fuse(model, x)
    assert counts(fused) == COUNTS["basic"]
    assert_same(trained(fused, x), trained(model, x))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_autocast(layout):
    """The dtypes that meet in a sum may differ under autocast; outputs stay near those of the unfused model."""
    torch.manual_seed(0)
    x = torch.randn(SHAPE).to(memory_format=layout)
    model = kalmannorm.convert(NETS["basic"](), x, statistics_batch_size=2).to(memory_format=layout)
    fused = kalmannorm.fuse(model, x)
    assert counts(fused) == COUNTS["basic"]
    with torch.autocast("cpu", torch.bfloat16):
        for each in (model, fused):
            each(x).float().sum().backward()
        outputs = [each.eval()(x).float() for each in (fused, model)]
    torch.testing.assert_close(*outputs, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 3, 5, 5), (3, 1, 1), (2, 4, 3, 5, 5)], ids=str)
def test_a_norm_asked_to_add_anything(shape, dtype, training):
    """What the op cannot add, of another dtype or shape, is added after it, as the model's own code would."""
    norm = kalmannorm.GhostBatchNorm2d(3, statistics_batch_size=2).train(training)
    x = torch.randn(4, 3, 5, 5).bfloat16()
    residual = torch.randn(shape).to(dtype)
    actual, expected = norm(x, residual=residual, relu=True), F.relu(norm(x) + residual)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02)


def test_another_size_of_batch_and_image(x):
    model, fused = pair()
    for shape in ((3, 3, 24, 24), (2, 3, 32, 20), (0, 3, 24, 24)):
        other = torch.randn(shape).double()
        assert_same([fused(other)], [model(other)])


def test_nothing_of_the_model_changes_in_fusing_it(x):
    model = converted("gated").train()
    model.block.eval()
    flags = [module.training for module in model.modules()]
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    fused = kalmannorm.fuse(model, x, inplace=True)
    assert fused is model
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())
    assert_same(list(model.state_dict().values()), list(before.values()), 0)


def test_a_copy_is_fused_unless_in_place(x):
    model, fused = pair()
    assert not any(is_fused(module) for module in model.modules()) and not hasattr(model, "fusion")
    assert isinstance(fused, Residual) and is_fused(fused)
    assert all(isinstance(block, BasicBlock) for block in fused.layer2)


def test_fusing_again_changes_nothing(x):
    fused = pair()[1]
    again = kalmannorm.fuse(fused, x)
    assert again.fusion == fused.fusion
    assert_same([again(x)], [fused(x)])


def test_the_wiring_stays(x):
    model, fused = pair()
    assert str(kalmannorm.wiring(fused)) == str(kalmannorm.wiring(model))
    kalmannorm.rewire(fused, torch.randn(2, 3, 40, 40).double())
    kalmannorm.rewire(model, torch.randn(2, 3, 40, 40).double())
    assert str(kalmannorm.wiring(fused)) == str(kalmannorm.wiring(model))
    assert counts(fused) == COUNTS["basic"] and is_fused(fused)
    assert_same(trained(fused, x), trained(model, x))


def _reloaded(model):
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), _reloaded], ids=["copy", "pickle", "save"]
)
@pytest.mark.parametrize("name", ["basic", "densenet"])
def test_copies_are_fused(name, again, x):
    fused = pair(name)[1]
    other = again(fused)
    assert [type(a) is type(b) for a, b in zip(other.modules(), fused.modules(), strict=True)].count(False) == 0
    assert other.fusion == fused.fusion
    assert_same(trained(other, x), trained(fused, x))


def test_replicas_of_data_parallel_are_fused(x):
    fused = pair("bottleneck")[1]
    block = fused.layer1[0]
    replica = block._replicate_for_data_parallel()
    assert type(replica) is type(block) and replica.bn1 is block.bn1


def test_distributed_data_parallel(x, tmp_path):
    own, fused = pair()[1], pair()[1]
    distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert_same(trained(DistributedDataParallel(fused), x), trained(own, x))
    finally:
        distributed.destroy_process_group()


def test_state_dicts_go_both_ways(x):
    model, other = converted(seed=0), converted(seed=5)
    fused = kalmannorm.fuse(other, x)
    fused.load_state_dict(model.state_dict())
    assert_same([fused(x)], [model(x)])
    other.load_state_dict(fused.state_dict())


def test_checkpointed_blocks(x):
    """Blocks of a fused model that are recomputed, with gradients and buffers as without."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = stem()
            self.blocks = nn.ModuleList([BasicBlock(8, 8), BasicBlock(8, 8)])
            self.classifier = nn.Linear(8, 5)
            self.save = False

        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.save else block(x)
            return self.classifier(x.mean((2, 3)))

    torch.manual_seed(0)
    model = kalmannorm.convert(Checkpointed().double(), x, statistics_batch_size=2)
    fused = kalmannorm.fuse(model, x)
    assert counts(fused) == (3, 2, 0)
    fused.save = True
    assert_same(trained(fused, x), trained(model, x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # what dynamo meets
def test_compiled_without_a_break(x):
    torch.manual_seed(0)
    net = nn.Sequential(stem(), block(BasicBlock, 8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
    fused = kalmannorm.fuse(kalmannorm.convert(net.double(), x, statistics_batch_size=2), x)
    assert counts(fused) == (2, 1, 1)
    own = copy.deepcopy(fused)
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    assert_same(trained(compiled, x, 2), trained(own, x, 2))


def test_exported(x):
    fused = pair()[1].eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(fused, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert_same([program.module()(x[:3])], [fused(x[:3])])


def test_shipped(x):
    """What becomes plain torch holds nothing of ours; to re-estimate statistics takes no other call."""
    model = converted("regnet")
    trained(model, x, 1)
    fused = kalmannorm.fuse(model, x)
    for each in (model, fused):
        kalmannorm.recalibrate(each, [x, x.flip(0)], progress=False)
    expected = model.eval()(x)
    for plain in (kalmannorm.to_batchnorm(fused).eval(), kalmannorm.fold(fused), kalmannorm.fold(fused, x)):
        assert not hasattr(plain, "fusion")
        assert {type(module).__module__.split(".")[0] for module in plain.modules()} <= {"torch", "timm"}
        assert not any(is_fused(module) for module in plain.modules())
        assert_same([plain(x)], [expected], 1e-6)
    assert_same([fused.eval()(x)], [expected])
    frozen = kalmannorm.freeze_priors(fused)
    kalmannorm.set_inference(frozen, "example")
    kalmannorm.set_inference(model, "example")
    assert_same([frozen.eval()(x)], [model.eval()(x)])


def test_accumulated(x):
    model, fused = pair()
    for each in (model, fused):
        with kalmannorm.accumulate_statistics(each):
            for part in x.split(2):
                each(part).sum().backward()
    assert_same(list(fused.buffers()), list(model.buffers()))
    assert_same([p.grad for p in fused.parameters()], [p.grad for p in model.parameters()])


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", ["bottleneck", "regnet"])
def test_runs_as_reported(name, training, x):
    """Each norm is asked for the ReLU and the sum, and nobody else is."""
    fused = pair(name)[1].train(training)
    asked, relus = {}, []
    for name, module in fused.named_modules():
        if isinstance(module, GroupedNorm):
            module.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: asked.update({name: kwargs}), with_kwargs=True
            )
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(lambda *_: relus.append(1))
    fused(x)
    assert not relus
    kinds = {("relu",): "ReLU", ("relu", "residual"): "sum and ReLU"}
    assert {name: kinds[tuple(sorted(kwargs))] for name, kwargs in asked.items() if kwargs} == fused.fusion.fused


def test_torchvision_counts():
    """ResNet-50: all but the four that are added to a norm."""
    x = torch.randn(2, 3, 32, 32)
    model = kalmannorm.convert(torchvision.models.resnet50(num_classes=5), x, to="ghost")
    fused = kalmannorm.fuse(model, x, inplace=True)
    assert counts(fused) == (33, 16, 4)
    assert str(fused.fusion).splitlines()[0] == "49 of 53 norms fused: 33 with ReLU, 16 with sum and ReLU"
