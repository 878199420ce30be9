"""A converted model at work: state passes between norms inside one forward only, whatever runs it."""

from __future__ import annotations

import copy
import threading
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from kalmannorm import convert, freeze_statistics, set_inference
from kalmannorm._running.hooks import Begin
from support import two_ranks
from support.converted_net import KINDS, NON_LEAF, TRANSITIONS, Net, assert_same, image, net, state, step
from support.listening import given
from support.wide import narrow, wide


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_every_parameter_learns_and_nothing_is_left_behind(transition):
    model = net(transition)
    gradients, _ = step(model)
    assert all(g is not None and torch.isfinite(g).all() for g in gradients.values())
    assert any(g.abs().max() > 0 for n, g in gradients.items() if n.endswith("gain_logit"))
    left = state(model)
    assert left.memo is None and not left.posteriors and not left.counts and not left.inner and left.depth == 0


def checkpointed(reentrant):
    def run(block, x):
        return checkpoint(block, x, use_reentrant=reentrant)

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing_is_exact(kind):
    """pytorch#96136, fairscale#1035: same gradients, also after several forwards; the statistics move once."""
    model = net(kind)
    expected = step(copy.deepcopy(model))
    model.run = checkpointed(False)
    assert_same(step(model), expected)
    assert not state(model).posteriors and not state(model).inner


@pytest.mark.parametrize("kind", ["weights", "ghost"])
def test_activation_checkpointing_reentrant_is_exact_without_posteriors(kind):
    model = net(kind)
    expected = step(copy.deepcopy(model))
    model.run = checkpointed(True)
    assert_same(step(model), expected)


class Shortcut(nn.Module):
    """A sum of two norms, whose biases get the same gradient from the prior of the norm behind it."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.after = nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.conv, self.run = nn.Conv2d(3, 3, 3), lambda part, x: part(x)

    def last(self, x):
        return self.after(self.conv(x))

    def forward(self, x):
        return self.run(self.last, self.left(x) + self.right(x * x))


def test_activation_checkpointing_reentrant_behind_a_sum_of_norms():
    """Two biases with one memory for their gradients would each get what is added to the other."""
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    model = convert(Shortcut().double(), x, statistics_batch_size=2)
    again = copy.deepcopy(model)
    again.run = checkpointed(True)
    for each in (model, again):
        each(x).square().mul(x[:, :, 1:-1, 1:-1]).sum().backward()
    for (name, expected), found in zip(model.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-10, atol=1e-12, msg=name)
    assert again.left.bias.grad.data_ptr() != again.right.bias.grad.data_ptr()


def test_activation_checkpointing_reentrant_detaches_the_learned_prior_and_says_so_once():
    model = net("learned")
    plain = copy.deepcopy(model)
    model.run = checkpointed(True)
    with pytest.warns(UserWarning, match="re-entrant checkpoint cuts the gradient") as caught:
        gradients, buffers = step(model)
    assert len(caught) == 1
    expected, updated = step(plain)
    assert_same([buffers], [updated])
    # What the last block does by itself is right; before it, only the gradient through the prior is missing.
    torch.testing.assert_close(gradients["block3.bn2.weight"], expected["block3.bn2.weight"], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(gradients["stem.0.weight"], expected["stem.0.weight"], rtol=1e-3)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing_of_the_whole_model(kind, reentrant):
    model = net(kind)
    expected = step(copy.deepcopy(model))
    twin = copy.deepcopy(model)
    x = [image(seed=seed).requires_grad_() for seed in (0, 1)]
    sum(checkpoint(twin, part, use_reentrant=reentrant).square().sum() for part in x).backward()
    assert_same([{n: p.grad for n, p in twin.named_parameters()}, dict(twin.named_buffers())], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing_of_a_sequence_without_the_model(kind):
    """As timm's `checkpoint_seq` does it, from a method that is not the model's forward."""
    model = net(kind).double()  # the bias before a norm has no gradient but rounding
    twin, x = copy.deepcopy(model), image().double()
    model.features(x).square().sum().backward()
    blocks = [twin.block1, twin.block2, twin.block3]
    checkpoint_sequential(blocks, 2, twin.stem(x).relu(), use_reentrant=False).square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        if p.grad is not None:
            torch.testing.assert_close(q[1].grad, p.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.filterwarnings("ignore:kalmannorm. a Batch.* ran, but not the norms that feed it:UserWarning")
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing_of_parts_of_two_models(kind, reentrant):
    """One segment recomputes both, and their steps have the same numbers."""
    pair = nn.ModuleList([net(kind), net(kind)])
    for parameter in pair[1].parameters():
        nn.init.normal_(parameter, std=0.5)
    twin = copy.deepcopy(pair)
    x = torch.randn(4, 6, 5, 5, requires_grad=True)

    def run(models, x):
        return models[1].block2(models[0].block2(x).relu())

    results = []
    for function in (run, lambda models, x: checkpoint(run, models, x, use_reentrant=reentrant)):
        function(twin if results else pair, x).square().sum().backward()
        results.append(x.grad.clone())
        x.grad = None
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@NON_LEAF
@pytest.mark.parametrize("kind", narrow(KINDS, ["learned", "ghost"]))  # whose posteriors pass between norms
def test_torch_compile_has_no_graph_break_and_no_recompile(kind):
    """pytorch#194504, timm#1725."""
    torch._dynamo.reset()
    model = net(kind)
    twin = copy.deepcopy(model)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(twin, backend=counter, fullgraph=True)
    for seed in range(3):
        torch.testing.assert_close(compiled(image(seed=seed)), model(image(seed=seed)))
    assert counter.frame_count == 1
    # Nothing that passes between norms leaves the graph: its outputs are the model's and the moments for the hook.
    assert len(counter.graphs[0].graph.output_node().args[0]) == (1 if kind == "ghost" else 2)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(twin.get_buffer(name), buffer)
    for part in (model, twin):
        set_inference(part.eval(), "example")
    torch.testing.assert_close(compiled(image()), model(image()))


@NON_LEAF
@pytest.mark.parametrize("kind", narrow(KINDS, ["weights", "ghost"]))
def test_torch_compile_gradients(kind):
    torch._dynamo.reset()
    model = net(kind)
    expected = step(copy.deepcopy(model))
    model.compile(backend="aot_eager", fullgraph=True)
    assert_same(step(model), expected)


@NON_LEAF
@pytest.mark.parametrize("kind", narrow(KINDS, ["learned", "ghost"]))
def test_torch_compile_of_a_part(kind):
    torch._dynamo.reset()
    model = net(kind)
    expected = step(copy.deepcopy(model))
    for block in (model.block1, model.block2, model.block3):
        block.compile(backend="aot_eager", fullgraph=True)
    assert_same(step(model), expected)


@NON_LEAF
@pytest.mark.inductor
def test_torch_compile_with_inductor():
    torch._dynamo.reset()
    net = Net()
    layers = nn.Sequential(net.stem, nn.ReLU(), net.block1.conv1, net.block1.bn1).double()
    model = convert(layers, image().double(), statistics_batch_size=2)
    x, twin = image().double(), copy.deepcopy(model)
    model.compile(fullgraph=True)
    torch.testing.assert_close(model(x), twin(x))
    model(x).square().sum().backward(), twin(x).square().sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_part_by_part_equals_the_whole(kind):
    """Calling the parts in turn, as `forward_features` does, gives every norm the prior it has in the whole."""
    model = net(kind)
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin.features(image()), model.features(image()))
    whole, parts = copy.deepcopy(model), copy.deepcopy(model)
    torch.testing.assert_close(parts.head(parts.features(image()).mean((2, 3))), whole(image()))


def test_a_posterior_of_another_forward_is_never_used():
    model = net("learned")
    fresh = copy.deepcopy(model)
    model(image(seed=5))
    x = torch.randn(4, 6, 7, 7)
    with pytest.warns(UserWarning, match="not the norms that feed it"):
        y = model.block2(x)
    with pytest.warns(UserWarning, match="not the norms that feed it"):
        torch.testing.assert_close(y, fresh.block2(x))
    # The whole model works on.
    assert torch.isfinite(model(image())).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_forward_leaves_nothing(kind):
    model = net(kind)
    expected = copy.deepcopy(model)(image())

    def fail(module, args):
        raise RuntimeError("on purpose")

    handle = model.block3.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(image(seed=3))
    handle.remove()
    assert state(model).memo is None and not state(model).posteriors and state(model).depth == 0
    torch.testing.assert_close(model(image()), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_functional_call_uses_the_parameters_it_is_given(kind):
    model = net(kind)
    other = net(kind)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.05 * torch.randn_like(p))
    tensors = {**dict(other.named_parameters()), **{n: b.clone() for n, b in model.named_buffers()}}
    found = functional_call(model, tensors, (image(),))
    torch.testing.assert_close(found, copy.deepcopy(other)(image()))
    found.sum().backward()
    assert all(p.grad is not None for p in other.parameters()) and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_averaged_model(kind):
    model = net(kind)
    averaged = AveragedModel(model, use_buffers=True)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    averaged.update_parameters(model)
    assert averaged.module.block1.bn1.wire.relay is not model.block1.bn1.wire.relay
    torch.testing.assert_close(averaged(image()), copy.deepcopy(model)(image()))


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_automatic_mixed_precision_keeps_the_filter_in_float32(transition):
    model = net(transition)
    priors = given(model, "block2.bn1")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(image())
    y.sum().backward()
    assert priors[0].mean.dtype == priors[0].var.dtype == torch.float32
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parts(kind):
    """`requires_grad_(False)` and `.eval()` on a sub-tree: what is frozen stays, the rest learns with its priors."""
    model = net(kind)
    model(image())
    for part in (model.stem, model.block1):
        part.requires_grad_(False).eval()
    before = {n: b.clone() for n, b in model.named_buffers()}
    model(image()).sum().backward()
    for name, parameter in model.named_parameters():
        frozen = name.startswith(("stem", "block1")) or name.endswith("noise")
        assert (parameter.grad is None) == (frozen and not parameter.requires_grad), name
    updated = {n for n, b in model.named_buffers() if not torch.equal(b, before[n])}
    assert updated and all(name.startswith(("block2", "block3")) for name in updated)


def test_frozen_statistics_survive_train():
    """pytorch#66073, Lightning#15062."""
    model = net("learned")
    model(image())
    freeze_statistics(model)
    before = {n: b.clone() for n, b in model.named_buffers()}
    model.train()
    model(image()).sum().backward()
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_may_run_one_model(kind):
    model = net(kind)
    model(image())
    set_inference(model.eval(), "example")
    inputs = [image(seed=seed) for seed in range(8)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
        results, meeting = {}, threading.Barrier(2)

        def run(part):
            meeting.wait()
            with torch.no_grad():
                for _ in range(5):
                    for i in range(part, 8, 2):
                        results[i] = model(inputs[i])

        threads = [threading.Thread(target=run, args=(part,)) for part in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for i, y in enumerate(expected):
        torch.testing.assert_close(results[i], y)


def test_batch_of_one():
    """pytorch#4534, #77014: no "Expected more than 1 value per channel", where a prior gives the variance."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2), nn.BatchNorm1d(2))
    converted = convert(model, torch.randn(1, 3), statistics_batch_size=1)
    with pytest.raises(ValueError, match="value"):
        converted(torch.randn(1, 3))  # the first norm has no prior and one value: there is no variance to be had
    converted = convert(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), *model[3:]), torch.randn(1, 3))
    y = converted(torch.randn(1, 3))
    y.sum().backward()
    assert torch.isfinite(y).all()


def test_rows_that_do_not_match_are_pooled():
    """Video: the second norm sees every frame as an example, so its groups are others than the first's."""

    class Video(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4)
            self.conv2, self.bn2 = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x):
            x = self.bn1(self.conv1(x)).relu()
            return self.bn2(self.conv2(x.transpose(1, 2).flatten(0, 1)))

    for transition in TRANSITIONS:
        model = convert(Video(), torch.randn(2, 2, 3, 6, 6), statistics_batch_size=1, transition=transition)
        model(torch.randn(2, 2, 3, 6, 6)).sum().backward()
        assert model.bn2.gain_logit.grad is not None


def accumulated(model):
    """Two forwards before one backward, then a second step: an unused parameter would raise there."""
    results = []
    for _ in range(2):
        results.append(step(model))
    return results[-1][0]


def ddp(make, rank):
    model = make()
    plain = copy.deepcopy(model)
    wrapped = DistributedDataParallel(model)
    found = {n.removeprefix("module."): g for n, g in accumulated(wrapped).items()}
    accumulated(plain)
    return {n: (g, plain.get_parameter(n).grad) for n, g in found.items()}


def frozen_net(kind):
    model = net(kind)
    model(image())
    freeze_statistics(model)
    return model


@wide
def test_ddp_several_forwards_before_backward(tmp_path):
    """pytorch#175024, #22095: no unused parameter, no buffer written between forward and backward; as one process."""
    scenarios = {}
    for kind in KINDS:
        scenarios[kind] = partial(ddp, partial(net, kind))
        scenarios[f"frozen {kind}"] = partial(ddp, partial(frozen_net, kind))
    for results in two_ranks.run(tmp_path, scenarios):
        for name, gradients in results.items():
            for parameter, (found, expected) in gradients.items():
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=f"{name}: {parameter}")


@pytest.mark.parametrize("kind", ["weights", "ghost"])
def test_hooks_are_only_ours_to_begin_and_end(kind):
    model = net(kind)
    hooks = [h for m in model.modules() for h in m._forward_pre_hooks.values()]
    assert all(isinstance(h, Begin) for h in hooks)
    assert [h.whole for h in model._forward_pre_hooks.values()] == [True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(model, "/dev/null")


class AllInside(Net):
    """`whole` may wrap all norms."""

    whole = staticmethod(lambda part, x: part(x))

    def forward(self, x):
        return self.head(self.whole(self.features, x).mean((2, 3)))


def test_activation_checkpointing_with_a_weight_that_is_computed():
    """A bundle reads the computed weight. Nothing that this saves belongs to the segment, which asks for it first."""
    torch.manual_seed(0)
    bare = AllInside()
    parametrizations.weight_norm(bare.block2.conv1)
    model = convert(bare, image(), statistics_batch_size=2)
    expected = step(copy.deepcopy(model))
    model.whole = checkpointed(False)
    assert_same(step(model), expected)
