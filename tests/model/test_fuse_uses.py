"""A fused model is the model it was: same names, copies, checkpoints and wrappers, and it ships as before."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torchvision.models.resnet import BasicBlock

import kalmannorm
from kalmannorm._support.fused_modules import is_fused
from support.fusion_nets import COUNTS, Residual, assert_same, converted, counts, images, pair, stem, trained


@pytest.fixture
def x():
    return images()


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
    (model, fused), other = pair(), pair()[0]
    trained(model, x, 1)
    fused.load_state_dict(model.state_dict())
    other.load_state_dict(fused.state_dict())
    assert_same([fused(x), other(x)], [model(x)] * 2)


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
            for each in self.blocks:
                x = checkpoint(each, x, use_reentrant=False) if self.save else each(x)
            return self.classifier(x.mean((2, 3)))

    torch.manual_seed(0)
    model = kalmannorm.convert(Checkpointed().double(), x, statistics_batch_size=2)
    fused = kalmannorm.fuse(model, x)
    assert counts(fused) == (3, 2, 0)
    fused.save = True
    assert_same(trained(fused, x), trained(model, x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # what dynamo meets
def test_compiled_without_a_break(x):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)

        def forward(self, x):
            return (self.bn(self.conv(x)) + x).relu()

    torch.manual_seed(0)
    net = nn.Sequential(stem(), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    fused = kalmannorm.fuse(kalmannorm.convert(net.double(), x, statistics_batch_size=2), x)
    assert counts(fused) == (1, 1, 0)
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
    model, fused = pair("regnet")
    trained(model, x, 1)
    fused.load_state_dict(model.state_dict())
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
