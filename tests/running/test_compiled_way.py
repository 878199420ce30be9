"""A compiled training step: registered ops, the results of eager mode, and nothing out of date."""

from __future__ import annotations

import copy
import gc
import re

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from kalmannorm import ClosingPhase, accumulate_statistics, convert, fuse
from kalmannorm._model.settings import norms
from kalmannorm._ops.propagate import registered as bundles
from kalmannorm._ops.track import registered as tracking
from support.bundled_nets import IMAGE, Blocks, Branches, converted
from support.poisoned import DEVICE
from support.short_way_cases import CHANGES, assert_same, own_step, second_order, small
from support.wide import narrow

NORM, ROWS, TRACK = (
    getattr(torch.ops.kalmannorm, name) for name in ("normalize_rows", "bundle_rows", "track")
)  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def compiled(model, backend="aot_eager", **options):
    """The compiled model, and a counter that has its graphs."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, backend=counter, fullgraph=True, **options), counter


def count(counter, target):
    return [sum(node.target is target for node in graph.graph.nodes) for graph in counter.graphs]


def assert_equals_eager(model, batches, backend="aot_eager", run=own_step, **options):
    """Steps on these batches, compiled and not. Returns the counter."""
    twin = copy.deepcopy(model)
    call, counter = compiled(twin, backend, **options)
    for x in batches:
        assert_same(renamed(run(call, x)), run(model, x))
    return counter


def doubled(given):
    """In float64, because single gradients of a bias before a norm are sums that cancel."""
    return [each.double() for each in given]


def renamed(found):
    """`torch.compile` puts the model into a wrapper."""
    return {name.replace("_orig_mod.", ""): value for name, value in found.items()}


@pytest.mark.parametrize("make", [Blocks, Branches])
@pytest.mark.parametrize("fused", [False, True])
def test_equals_eager(make, fused):
    model = converted(make(), IMAGE).to(DEVICE)
    x = torch.randn(4, *IMAGE[1:], device=DEVICE)
    counter = assert_equals_eager(fuse(model, x) if fused else model, [x, -x])
    assert count(counter, NORM) == [len(list(norms(model)))]
    assert count(counter, TRACK) == [0]  # the hook behind the graph is not compiled
    assert len(counter.graphs[0].graph.output_node().args[0]) == 2  # y, and all moments as one tensor


@pytest.mark.inductor
@pytest.mark.parametrize("layout", narrow([torch.contiguous_format, torch.channels_last], [torch.channels_last]))
def test_equals_eager_with_inductor(layout):
    model, x = doubled(small())
    model, x = model.to(memory_format=layout), x.to(memory_format=layout)
    counter = assert_equals_eager(model, [x, -x], "inductor")
    assert count(counter, NORM) == [3]


@pytest.mark.inductor
@pytest.mark.parametrize("op", ["normalize_rows", "settled", "batch_kalman_norm"])
def test_inductor_may_choose_the_layout(op):
    """It runs the convolutions of a contiguous model in channels_last. It must copy nothing around a norm."""
    torch.manual_seed(0)
    x = torch.randn(4, 16, 12, 12).double()
    blocks = [[nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()] for _ in range(2)]
    transition = "learned" if op == "batch_kalman_norm" else "weights"
    model = nn.Sequential(*[layer for block in blocks for layer in block]).double()
    model = convert(model, x, statistics_batch_size=2, transition=transition)

    def step(model):
        model(x).square().sum().backward()

    if op == "settled":
        phase = ClosingPhase(model, steps=1, start=0.0, end=0.0)
        step(model)
        phase.step()
        model.zero_grad()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True)

    anew = torch._functorch.config.patch(enable_autograd_cache=False)
    with anew, torch._inductor.config.patch(fx_graph_cache=False, force_layout_optimization=True):
        _, codes = run_and_get_code(step, compiled)
    step(model)
    for (name, a), e in zip(compiled.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, e.grad, rtol=1e-9, atol=1e-9, msg=name)
    assert len(codes) == 2 and all(f"torch.ops.kalmannorm.{op}" in code for code in codes)
    kernels = {name for code in codes for name in re.findall(r"^ +(\w*_fused_\w+)[.(]", code, re.MULTILINE)}
    assert kernels and not [name for name in kernels if op in name]


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_residual_and_relu(residual, relu):
    model, x = small()

    class Net(type(model)):
        def forward(self, x):
            x = self.norm0(self.conv0(x)).relu()
            x = self.conv1(x)
            return self.norm2(self.conv2(self.norm1(x, residual=x if residual else None, relu=relu)))

    model.__class__ = Net
    assert count(assert_equals_eager(model, [x]), NORM) == [3]


def test_batches_of_other_sizes_do_not_compile_again():
    """Whole groups, and a smaller last group."""
    model, x = small()
    x = torch.cat([x, -x, 2 * x])
    counter = assert_equals_eager(model, [x[:4], x[:6], x[:8], x[:5], x[:7]], dynamic=True)
    assert [found for found in count(counter, NORM) if found] == [3]  # `zero_grad` is compiled too


def test_without_gradients():
    """Statistics move as in eager mode."""
    model, x = small()

    @torch.no_grad()
    def run(model, x):
        return {"y": model(x), **dict(model.named_buffers())}

    assert count(assert_equals_eager(model, [x, -x], run=run), NORM) == [3]


@pytest.mark.parametrize("change", [name for name in CHANGES if name != "hook"])  # dynamo does not look for new hooks
def test_what_was_compiled_expires(change):
    """After compiled steps a setting changes. The next step sees it."""
    make, _ = CHANGES[change]
    model, x = doubled(small())
    twin = copy.deepcopy(model)
    call, _ = compiled(twin)
    for each, run in ((model, model), (twin, call)):
        own_step(run, x)
        make(each)
    assert_same(renamed(own_step(call, x)), own_step(model, x))


def test_a_setting_that_changes_back_does_not_compile_again():
    model, x = small()
    call, counter = compiled(model)
    own_step(call, x)
    for eps, expected in ((0.5, 2), (1e-5, 2), (0.5, 2)):
        for _, norm in norms(model):
            norm.eps = eps
        own_step(call, x)
        assert len([found for found in count(counter, NORM) if found]) == expected


def test_a_norm_without_gradients_among_others():
    """Rows with and rows without gradients are two results."""
    model, x = doubled(small())

    class Partly(type(model)):
        def forward(self, x):
            with torch.no_grad():
                x = self.norm0(self.conv0(x)).relu()
            return self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))

    model.__class__ = Partly

    def run(model, x):
        return {name: torch.zeros(()) if t is None or not t.any() else t for name, t in own_step(model, x).items()}

    assert count(assert_equals_eager(model, [x, -x], run=run), NORM) == [3]


@pytest.mark.parametrize("shape", [(1, 4, 3, 3), (4, 1, 3, 3), (4, 4, 1, 3), (4, 4, 3, 1), (4, 3, 3), (4, 4, 3, 3)])
def test_a_residual_of_another_shape(shape):
    """It is added as in eager mode. Only with the last shape the op adds it."""
    model, x = doubled(small())

    class Net(type(model)):
        def forward(self, x, other):
            x = self.norm0(self.conv0(x)).relu()
            return self.norm2(self.conv2(self.norm1(self.conv1(x), residual=other)))

    model.__class__ = Net
    other = torch.randn(shape, device=DEVICE, dtype=x.dtype)

    def run(model, x):
        with torch.no_grad():
            return {"y": model(x, other), **dict(model.named_buffers())}

    counter = assert_equals_eager(model, [x], run=run)
    assert count(counter, NORM) == [3 if shape == (4, 4, 3, 3) else 2]


def test_a_copy_of_a_compiled_model_is_its_own():
    model, x = small()
    call, _ = compiled(model)
    own_step(call, x)
    twin = copy.deepcopy(model)
    other, _ = compiled(twin)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    own_step(other, -x)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert twin.norm1.num_batches_tracked == model.norm1.num_batches_tracked + 1


def test_the_last_norm_does_not_run():
    """The statistics of the others move when the forward ends. Unused parameters get zeros instead of no gradient."""
    model, x = small()

    class Short(type(model)):
        def forward(self, x):
            return self.norm1(self.conv1(self.norm0(self.conv0(x)).relu()))

    model.__class__ = Short

    def run(model, x):
        return {name: torch.zeros(()) if t is None or not t.any() else t for name, t in own_step(model, x).items()}

    assert_equals_eager(model, [x, -x], run=run)


def test_a_norm_runs_twice():
    model, x = small()

    class Twice(type(model)):
        def forward(self, x):
            x = self.norm0(self.conv0(x)).relu()
            return self.norm2(self.conv2(self.norm1(self.conv1(x)) + self.norm1(2 * self.conv1(x))))

    model.__class__ = Twice
    assert_equals_eager(model, [x, -x])


def test_a_norm_that_runs_twice_in_the_example():
    """It takes the long way. Its other neighbours do not."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv0, self.norm0 = nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4)
            self.conv1, self.norm1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
            self.conv2, self.norm2 = nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8)

        def forward(self, x):
            x = self.norm0(self.conv0(x)).relu()
            for _ in range(2):
                x = self.norm1(self.conv1(x)).relu()
            return self.norm2(self.conv2(x))

    model, x = doubled((converted(Shared(), (4, 2, 5, 5)).to(DEVICE), torch.randn(4, 2, 5, 5, device=DEVICE)))
    counter = assert_equals_eager(model, [x, -x])
    assert count(counter, NORM) == [2]


def test_a_whole_step_is_compiled():
    """The hooks of the model are then traced too."""
    model, x = small()
    twin = copy.deepcopy(model)
    expected = own_step(model, x)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(x):
        y = twin(x)
        return y, y.square().sum() + y.sum()

    y, total = loss(x)
    total.backward()
    torch.testing.assert_close(y, expected["y"])
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[f"d {name}"], rtol=1e-5, atol=1e-5)
    for name, buffer in twin.named_buffers():
        torch.testing.assert_close(buffer, expected[name])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_break_of_the_graph():
    model, x = small()

    class Broken(type(model)):
        def forward(self, x):
            x = self.norm1(self.conv1(self.norm0(self.conv0(x)).relu()))
            torch._dynamo.graph_break()
            return self.norm2(self.conv2(x.relu()))

    model.__class__ = Broken
    twin = copy.deepcopy(model)
    call = torch.compile(twin, backend="aot_eager")
    for batch in (x, -x):
        assert_same(renamed(own_step(call, batch)), own_step(model, batch))


def test_statistics_that_accumulate():
    """On batches of the size that was compiled before."""
    model, x = small()

    def run(model, x):
        with accumulate_statistics(getattr(model, "_orig_mod", model)):
            own_step(model, x)
            return own_step(model, -x)

    twin = copy.deepcopy(model)
    call, _ = compiled(twin)
    own_step(call, x)
    own_step(model, x)
    run(call, x), run(model, x)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(twin.get_buffer(name), buffer, msg=name)


def test_second_derivatives_without_a_compiler():
    """The backend `eager` runs the registered ops, whose gradients can be differentiated again."""
    model, x = doubled(small())
    assert_equals_eager(model, [x], "eager", second_order)


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")  # our hooks
def test_export_has_no_op_of_one_process():
    """Numbers of models and bundles mean nothing elsewhere."""
    model, x = small()
    ways = (False, True) if hasattr(torch.compiler, "_is_exporting_flag") else (False,)  # 2.6 refuses our hooks
    for strict in ways:
        program = torch.export.export(model, (x,), strict=strict)
        assert not {NORM.default, ROWS.default, TRACK.default} & {node.target for node in program.graph.nodes}


def test_a_deleted_model_is_freed_and_named():
    model, x = small()
    call, _ = compiled(model)
    own_step(call, x)
    relay = model.norm1.wire.relay
    number, bundle = relay.number, relay.compiled[0].parts[0].number
    assert tracking.find(number) is relay
    del model, call, relay
    torch._dynamo.reset()
    gc.collect()
    for find in (lambda: tracking.find(number), lambda: bundles.find(bundle)):
        with pytest.raises(RuntimeError, match="a model that was deleted; compile the model again"):
            find()


def test_ops_keep_their_promises():
    """What torch asks of a registered op: schema, fake version, autograd."""
    model, x = small()
    call, _ = compiled(model)
    own_step(call, x)
    known = model.norm1.wire.relay.compiled[0]
    part, tensors = known.parts[0], known.collectors[0](model, {})
    # On a GPU the memory for the backward has gaps that nobody writes or reads, so it is not compared.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    also = {"test_utils": tests} if DEVICE == "cuda" else {}
    torch.library.opcheck(ROWS, (tensors, [2, 2, 2], part.number), **also)
    rows = ROWS(tensors, [2, 2, 2], part.number)[1].detach().requires_grad_()
    y = torch.randn(4, 4, 3, 3, device=DEVICE, requires_grad=True)
    for residual, relu in ((None, False), (None, True), (y.detach().clone().requires_grad_(), True)):
        torch.library.opcheck(NORM, (y, rows, residual, 2, 1e-5, relu))
