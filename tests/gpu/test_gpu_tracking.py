"""Statistics of a converted model on CUDA: moved together at the end of a forward, as each norm would alone."""

from __future__ import annotations

import copy

import pytest
import torch

from kalmannorm._model.settings import norms
from support.gpu_kernels import kernels_in
from support.gpu_nets import TRANSITIONS, Shuffled, image, net
from support.waiting import nothing_waits

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def assert_moved_alike(one, other):
    for (name, actual), expected in zip(one.named_buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(
            actual.cpu(), expected.cpu(), rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


def step(model, x):
    model.zero_grad(set_to_none=False)
    model(x).square().sum().backward()


def one_by_one(model):
    """Its norms take the long way, and move their statistics at once."""
    model.block1.bn1.wire.relay.postpone = lambda request, kernels: False
    for _, norm in norms(model):
        norm._normalize = norm._normalize
    return model


def tables_of(model):
    """The tables of norms on the long way, and of norms on the short way."""
    relay = model.block1.bn1.wire.relay
    parts = [part.short for bundles in relay.bundles.values() for part in bundles.parts if part.short is not None]
    together = [each for part in parts for each in part.tables.values()]
    return [*relay.tables.values(), *(table for each in together for table in each.tables)]


def forget_tables(model):
    relay = model.block1.bn1.wire.relay
    relay.tables.clear()
    for part in (part for bundles in relay.bundles.values() for part in bundles.parts):
        if part.short is not None:
            part.short.tables.clear()


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_statistics_are_those_of_the_cpu(transition):
    there = net(transition, "cpu")
    here = copy.deepcopy(there).cuda()
    for seed, batch in enumerate((4, 4, 3, 4)):
        step(there, image(batch, seed))
        step(here, image(batch, seed).cuda())
        assert_moved_alike(here, there)
    tables = tables_of(here)
    assert len(tables) == 2 and not any(table.arrived.any() for table in tables)


def test_one_kernel_moves_all_norms():
    model, x = net("weights"), image().cuda()
    together = kernels_in(lambda: model(x))
    alone = kernels_in(lambda: one_by_one(model)(x))
    assert sum("track_many" in name for name in together) == 1
    assert sum("track_kernel" in name for name in together) == 0
    assert sum("track_kernel" in name for name in alone) == 7
    assert len(together) < len(alone)


@pytest.mark.filterwarnings("ignore:.*AccumulateGrad node's stream")
@pytest.mark.parametrize("known", [True, False], ids=["table known", "table not known"])
@pytest.mark.parametrize("transition", TRANSITIONS)
def test_in_a_cuda_graph(transition, known):
    """What is not known when the capture begins is tracked norm by norm: nothing may be uploaded then."""
    model = net(transition)
    twin = copy.deepcopy(model)
    x = image().cuda()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(one_by_one(copy.deepcopy(twin)), x)  # compiles what tracks one norm
        for _ in range(3):
            step(twin, x)
    torch.cuda.current_stream().wait_stream(stream)
    if not known:
        forget_tables(twin)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(twin, x)
    assert [table.captured for table in tables_of(twin)] == ([True] if known else [])
    for seed in range(2):
        x.copy_(image(seed=seed))
        graph.replay()
    for seed in (0, 0, 0, 0, 1):
        step(model, image(seed=seed).cuda())
    torch.cuda.synchronize()
    assert_moved_alike(twin, model)


def test_nothing_waits_for_the_device():
    """Not for a batch of another size either, which needs another table."""
    model = net("weights")
    inputs = [image(batch).cuda() for batch in (4, 6)]
    step(model, inputs[0])
    step(one_by_one(copy.deepcopy(model)), inputs[1])  # whatever else a new size may bring
    with nothing_waits():
        for x in inputs:
            step(model, x)
    assert len(tables_of(model)) == 2


def test_a_bad_batch_stops_the_norms_that_saw_it():
    model = net("weights")
    model(image().cuda())
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    handle = model.block3.register_forward_pre_hook(lambda module, args: (args[0] * float("nan"),))
    model(image(seed=1).cuda())
    handle.remove()
    for name, buffer in model.named_buffers():
        if not name.startswith("block3"):
            assert name.endswith("skipped_batches") or not torch.equal(buffer, before[name]), name
        else:
            assert torch.equal(buffer, before[name] + name.endswith("skipped_batches")), name
    with pytest.warns(RuntimeWarning, match="NaN or Inf"):
        model.eval()


def test_branches_on_streams_of_their_own():
    class Branched(Shuffled):
        @staticmethod
        def run(block, x):
            here, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(here)
            with torch.cuda.stream(side):
                y = block(x)
            here.wait_stream(side)
            y.record_stream(here)
            return y

    model = net("weights")
    twin = copy.deepcopy(model)
    twin.__class__ = Branched
    for seed in range(3):
        x = image(64, seed).cuda()
        model(x), twin(x)
        assert_moved_alike(twin, model)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device")
def test_each_device_has_its_own_launch():
    class Split(Shuffled):
        def run(self, block, x):
            return block(x.to(next(block.parameters()).device))

        def forward(self, x):
            return self.head(self.features(x).mean((2, 3)).to(self.head.weight.device))

    model = net("weights")
    twin = copy.deepcopy(model)
    twin.__class__ = Split
    twin.block2.to("cuda:1")
    for seed in range(2):
        model(image(seed=seed).cuda()), twin(image(seed=seed).cuda())
        assert_moved_alike(twin, model)
