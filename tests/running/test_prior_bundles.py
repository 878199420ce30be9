"""Priors computed together are those of their steps one by one, and do not get in the way of anything."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from kalmannorm import freeze_priors, set_inference
from kalmannorm._ops.propagate import aten, native_bundle
from kalmannorm._running import bundling
from kalmannorm._running.prior_bundles import PriorBundles
from support.bundled_nets import (
    IMAGE,
    VECTOR,
    Blocks,
    Branches,
    FromInput,
    Masked,
    Pre,
    Smooth,
    Twice,
    bundles,
    converted,
)

NETS = {
    "residual blocks": (Blocks, IMAGE, {}),
    "branches": (Branches, IMAGE, {}),
    "hard functions": (lambda: Branches(F.hardswish, F.hardsigmoid), IMAGE, {}),
    "clipped": (lambda: Blocks(F.relu6), IMAGE, {}),
    "linear": (Pre, VECTOR, {"per_channel_gain": True}),
    "quadrature": (Smooth, (4, 4), {}),
    "no layers": (Twice, (4, 4), {}),
    "from the input": (FromInput, IMAGE, {}),
    "gated and masked": (Masked, IMAGE, {}),
    "no rule in a bundle": (lambda: Blocks(F.elu), IMAGE, {}),
    "standardized filters": (Blocks, IMAGE, {"weight_standardization": True}),
    "standardized filters of branches": (Branches, IMAGE, {"weight_standardization": True}),
}
every = pytest.mark.parametrize("case", NETS)


def prepared(case, **options):
    make, shape, own = NETS[case]
    model = converted(make(), shape, **own, **options).double()
    return model, torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()


@pytest.fixture
def one_by_one(monkeypatch):
    """Runs a function with every step evaluated by itself."""

    def run(function, *args):
        with monkeypatch.context() as patch:
            patch.setattr(PriorBundles, "fill", lambda *args: None)
            return function(*args)

    return run


def step(model, x):
    """The output of a copy, and the gradients of its parameters."""
    model = copy.deepcopy(model)
    y = model(x)
    y.square().sum().backward()
    return {"y": y.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    scale = max(value.abs().max() for value in expected.values() if value is not None)
    for name in expected:
        assert (found[name] is None) == (expected[name] is None), name
        if expected[name] is not None:
            # Of the largest: what comes before a norm may have no gradient but rounding.
            assert (found[name] - expected[name]).abs().max() < 1e-10 * scale, name


def work(monkeypatch):
    """How often anything was computed in bundles."""
    calls = []
    watch_forwards(monkeypatch, lambda made, bundle: calls.append(bundle))
    return calls


def watch_forwards(monkeypatch, tell):
    """Call `tell` with the results and the bundle of every forward, in C and in PyTorch operations."""
    for module in (aten, native_bundle):
        original = module.forward

        def watched(bundle, *args, original=original, **options):
            made = original(bundle, *args, **options)
            tell(made, bundle)
            return made

        monkeypatch.setattr(module, "forward", watched)


@every
@pytest.mark.usefixtures("each_kernels")
@pytest.mark.parametrize("at_once", [32, 1], ids=["one part", "many parts"])
def test_equals_one_by_one(case, at_once, one_by_one, monkeypatch):
    monkeypatch.setattr(bundling, "TOGETHER", at_once)
    model, x = prepared(case)
    calls = work(monkeypatch)
    found = step(model, x)
    assert calls
    assert_same(found, one_by_one(step, model, x))


@pytest.mark.parametrize("case", [case for case in NETS if case != "hard functions"])  # torch has none for those
def test_gradients_of_gradients(case, one_by_one):
    model, x = prepared(case)
    assert_same(twice(model, x), one_by_one(twice, model, x))


def twice(model, x):
    """Gradients of gradients."""
    model = copy.deepcopy(model)
    parameters = list(model.parameters())
    first = torch.autograd.grad(model(x).pow(3).sum(), parameters, create_graph=True)
    return dict(enumerate(torch.autograd.grad(sum(g.square().sum() for g in first), parameters, allow_unused=True)))


def test_transforms_evaluate_step_by_step(monkeypatch):
    model, x = prepared("residual blocks", inference="batch")
    expected = step(model.eval(), x)
    calls = work(monkeypatch)
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    found = torch.func.grad(lambda p: functional_call(model, p, (x,)).square().sum())(parameters)
    assert not calls
    assert_same(found, {name: expected[name] for name in found})


def test_functional_call_uses_the_parameters_it_is_given(monkeypatch):
    model, x = prepared("branches")
    other = {n: (p.detach() + 0.1).requires_grad_() for n, p in model.named_parameters()}
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.copy_(other[name])
    calls = work(monkeypatch)
    y = functional_call(model, {**other, **{n: b.clone() for n, b in model.named_buffers()}}, (x,))
    assert calls
    torch.testing.assert_close(y, twin(x))
    y.sum().backward()
    assert all(p.grad is not None for p in other.values()) and all(p.grad is None for p in model.parameters())


class Skipping(Blocks):
    skip = False

    def forward(self, x):
        x = self.act(self.norm0(self.conv0(x)))
        if not self.skip:
            x = self.act(self.norm1(self.conv1(x)) + x)
        y = self.act(self.norm2(self.conv2(x)) + x)
        return self.norm4(self.conv4(self.act(self.norm3(self.conv3(y)))))


def test_a_norm_that_does_not_run_gets_no_gradient(one_by_one):
    """As stochastic depth does: its prior is computed, nobody asks for it. The norms that it feeds have no prior."""
    model = converted(Skipping(), IMAGE).double()
    model.skip = True
    x = torch.randn(IMAGE).double()
    with pytest.warns(UserWarning, match="layer 'norm[23]', ran, but not the norms that feed it"):
        found, expected = step(model, x), one_by_one(step, model, x)
    assert found["norm1.gain_logit"] is None and found["conv1.weight"] is None
    assert found["norm1.weight"] is None and not found["norm2.gain_logit"].any()
    assert found["norm4.gain_logit"].any()
    assert_same(found, expected)


def test_a_norm_that_does_not_run_may_have_lost_what_it_was_made_of():
    model = converted(Skipping(), IMAGE).double()
    model.skip = True
    del model.conv1.weight
    model.norm1.register_parameter("bias", None)
    with pytest.warns(UserWarning, match="layer 'norm[23]', ran, but not the norms that feed it"):
        y = model(torch.randn(IMAGE).double())
    y.square().sum().backward()
    assert model.norm3.gain_logit.grad is not None and model.norm4.gain_logit.grad.any()


def test_frozen_parts(one_by_one):
    model, x = prepared("residual blocks")
    model.conv0.requires_grad_(False)
    model.norm0.requires_grad_(False).eval()
    model.conv2.requires_grad_(False)
    model.norm1.eval()
    assert_same(step(model, x), one_by_one(step, model, x))


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_activation_checkpoints(one_by_one, reentrant):
    model, x = prepared("branches")
    x.requires_grad_()

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return checkpoint(self.model, x, use_reentrant=reentrant)

    assert_same(step(Whole(), x), one_by_one(step, Whole(), x))


@pytest.mark.parametrize("change", ["another shape", "a computed weight", "no bias", "in half precision"])
def test_what_a_bundle_was_not_made_for_is_evaluated_step_by_step(change, one_by_one):
    model, x = prepared("residual blocks")
    model(x)  # bundles are made
    if change == "another shape":
        model.norm1.gain_logit = nn.Parameter(torch.zeros(8).double())
    elif change == "a computed weight":
        parametrizations.weight_norm(model.conv1)
    elif change == "no bias":
        model.norm1.bias = None
    else:
        model, x = model.bfloat16(), x.bfloat16()

    found, expected = step(model, x), one_by_one(step, model, x)
    if change != "in half precision":
        assert_same(found, expected)
        return
    exact = step(model.double(), x.double())
    for name, value in exact.items():
        error, usual = ((each[name].double() - value).abs().max() for each in (found, expected))
        assert error <= 1.25 * usual, name


def layers_of(model, x, monkeypatch):
    """The number of layers in the bundles of a step."""
    with monkeypatch.context() as patch:
        calls = work(patch)
        step(model, x)
    return sum(len(stage.layers) for bundle in calls for stage in bundle.stages)


def test_filters_are_read(monkeypatch):
    (plain, x), (model, _) = prepared("residual blocks"), prepared("standardized filters")
    assert layers_of(model, x, monkeypatch) == layers_of(plain, x, monkeypatch)


@pytest.mark.parametrize(
    "change", [lambda m: m.to(memory_format=torch.channels_last), nn.Module.float], ids=["layout", "dtype"]
)
def test_filters_of_another_form(change, one_by_one):
    model, x = prepared("standardized filters")
    model(x)  # bundles are made, and fit the filters of now
    model = change(model)
    x = x.to(next(model.parameters()).dtype)
    found, expected = step(model, x), one_by_one(step, model, x)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4 * float(value.abs().max()) + 1e-5)


def test_a_parameter_may_be_called_filter(one_by_one, monkeypatch):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))  # of something else
            self.filter = nn.Parameter(torch.randn(8, 8, 1, 1))

        def forward(self, x):
            return F.conv2d(x, self.filter)

    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), Own(), nn.BatchNorm2d(8))
    model, x = converted(net, (4, 3, 5, 5)).double(), torch.randn(4, 3, 5, 5).double()
    assert layers_of(model, x, monkeypatch) == 1
    assert_same(step(model, x), one_by_one(step, model, x))


def test_filters_follow_their_weights(one_by_one):
    model, x = prepared("standardized filters")
    model(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    assert_same(step(model, x), one_by_one(step, model, x))


def test_a_computed_weight_is_given(one_by_one):
    net = Blocks()
    parametrizations.weight_norm(net.conv2)
    model = converted(net, IMAGE).double()
    x = torch.randn(IMAGE).double()
    assert_same(step(model, x), one_by_one(step, model, x))


def test_a_part_computes_what_its_own_norms_ask_for(monkeypatch):
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
            self.one = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
            self.two = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())

        def forward(self, x):
            return self.two(self.one(self.stem(x)))

    model = converted(Parts(), IMAGE).double()
    x = torch.randn(IMAGE).double()
    calls, whole = work(monkeypatch), copy.deepcopy(model)
    y = model.two(model.one(model.stem(x)))
    assert [len(bundle.results) for bundle in calls] == [1, 1, 1]
    torch.testing.assert_close(y, whole(x))
    assert len(calls[-1].results) == 3


CHANGES = {
    "in place": lambda p: p.mul_(2),
    "through data": lambda p: p.data.mul_(2),
    "other data": lambda p: setattr(p, "data", p.data * 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_without_gradients_results_are_kept_while_parameters_stay(change, monkeypatch):
    model, x = prepared("residual blocks")
    set_inference(model(x) is not None and model.eval(), "example")
    calls = work(monkeypatch)
    with torch.no_grad():
        first = model(x)
        assert len(calls) == 1
        assert torch.equal(model(x), first)
        assert len(calls) == 1
        for name in ("conv2.weight", "norm0.weight", "norm3.bias", "norm2.gain_logit"):
            CHANGES[change](model.get_parameter(name))
            before, first = first, model(x)
            assert not torch.equal(first, before), name
        assert len(calls) == 5
    with torch.inference_mode():
        torch.testing.assert_close(model(x), first)
    assert len(calls) == 5
    model.train()(x).sum().backward()
    assert model.norm2.gain_logit.grad is not None


def test_frozen_priors_take_the_place_of_what_was_bundled():
    model, x = prepared("branches")
    model(x)
    set_inference(model.eval(), "example")
    expected = model(x)
    freeze_priors(model, inplace=True)
    torch.testing.assert_close(model(x), expected)
    priors = []
    original = model.norm2._predict
    model.norm2._predict = lambda previous, rows: priors.append(previous) or original(previous, rows)
    model(x)
    with torch.no_grad():
        model.up.weight.mul_(3)
    model(x)
    before, after = priors
    assert torch.equal(before.mean, after.mean) and torch.equal(before.var, after.var)


def test_the_backward_of_a_part_need_not_wait_for_the_first_norm(monkeypatch):
    """In parts, gradients of the last layers are there before the backward comes to the first."""
    monkeypatch.setattr(bundling, "TOGETHER", 2)
    model, x = prepared("residual blocks")
    order = []
    for name in ("conv4.weight", "conv0.weight"):
        model.get_parameter(name).register_post_accumulate_grad_hook(lambda p, name=name: order.append(name))
    model(x).sum().backward()
    assert order == ["conv4.weight", "conv0.weight"]


def test_the_same_is_computed_once(monkeypatch):
    model = converted(Twice(), (4, 4))
    ((bundle, _),) = bundles(model, torch.randn(4, 4), monkeypatch)
    assert [each.a.numel() for each in bundle.stages[0].elementwise] == [4]


def given(model, name):
    """What a norm of the model is given with its prior, from the next forward on."""
    read, norm = [], model.get_submodule(name)
    run = norm._train_alone
    norm._train_alone = lambda x, prior, *args: read.append(prior) or run(x, prior, *args)
    return read


def test_a_norm_reads_everything_from_its_rows():
    """γ, β, prior and gain are one result of the bundle, with one row for each group and no copy of it. So the op need
    not sum gradients over groups, and γ and β get theirs from one place, also if other norms believe in them."""
    model, x = prepared("residual blocks")
    read = {name: given(model, name) for name in ("norm1", "norm3", "norm4")}
    model(torch.cat([x, -x])).sum().backward()
    for name, ((prior,), norm) in {name: (found, model.get_submodule(name)) for name, found in read.items()}.items():
        parameters = norm.weight, norm.bias, None, None, norm.gain
        for rows, parameter in zip((*prior.affine, prior.mean, prior.var, prior.gain), parameters, strict=True):
            assert rows.shape == (2, norm.num_features) and rows.stride(0) == 0, name
            assert "UnbindBackward" in type(rows.grad_fn).__name__
            assert "_Bundled" in type(rows.grad_fn.next_functions[0][0]).__name__
            assert parameter is None or torch.equal(rows[0], parameter.expand(norm.num_features))


def test_gradients_of_gradients_of_rows_for_every_group(one_by_one):
    model, x = prepared("residual blocks", per_channel_gain=True)
    x = torch.cat([x, -x])
    assert_same(twice(model, x), one_by_one(twice, model, x))


def test_norms_with_different_groups(one_by_one):
    """Norms of one bundle may have different statistics batches."""
    model, x = prepared("residual blocks")
    x = torch.cat([x, -x])
    model.norm1.statistics_batch_size, model.norm3.statistics_batch_size = 1, 4
    assert_same(step(model, x), one_by_one(step, model, x))


def test_other_batches_and_modes_take_one_row(one_by_one):
    """Of three examples there are two groups, one of them smaller; in inference, each example has its own."""
    model, x = prepared("residual blocks", per_channel_gain=True)
    x = torch.cat([x, -x])
    for part in (x, x[:3], x[:2], x[:1]):
        assert_same(step(model, part), one_by_one(step, model, part))
    set_inference(model.eval(), "example")
    assert_same(step(model, x), one_by_one(step, model, x))


class Frozen(nn.Module):
    """A backbone without gradients, in training mode, and a head that learns."""

    def __init__(self):
        super().__init__()
        self.conv0, self.norm0 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.conv1, self.norm1 = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        self.conv3, self.norm3 = nn.Conv2d(8, 5, 1), nn.BatchNorm2d(5)

    def forward(self, x):
        with torch.no_grad():
            x = self.norm1(self.conv1(self.norm0(self.conv0(x)).relu())).relu()
        return self.norm3(self.conv3(self.norm2(self.conv2(x)).relu()))


def test_a_part_without_gradients_leaves_them_to_the_others(one_by_one):
    model, x = converted(Frozen(), IMAGE).double(), torch.randn(IMAGE).double()
    found = step(model, x)
    assert_same(found, one_by_one(step, model, x))
    assert found["norm2.gain_logit"] is not None and found["norm3.gain_logit"] is not None


class Heads(nn.Module):
    """A trunk and two heads. The gradient of the second does not reach the trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
        self.trunk.extend(nn.Sequential(nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.ReLU()))
        self.first = nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4))
        self.second = nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4))

    def forward(self, x):
        features = self.trunk(x)
        return self.first(features).relu().sum(), self.second(features.detach()).square().sum()


def heads():
    return converted(Heads(), (4, 3, 9, 9), statistics_batch_size=2).double(), torch.randn(4, 3, 9, 9).double()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_parts_have_backwards_of_their_own(order, monkeypatch):
    """Their gradients are those of the sum of the losses."""
    model, x = heads()
    assert len(bundles(copy.deepcopy(model), x, monkeypatch)) == 1
    twin = copy.deepcopy(model)
    losses = model(x)
    for which in order:
        losses[which].backward()
    sum(twin(x)).backward()
    for (name, found), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_a_parameter_changed_between_two_backwards():
    """The second gradient would belong to other weights than the forward."""
    model, x = heads()
    first, second = model(x)
    second.backward()
    with torch.no_grad():
        model.second[0].weight.mul_(0.5)
    with pytest.raises(RuntimeError, match="before the optimizer"):
        first.backward()


def test_a_backward_frees_the_memory_of_its_bundle(monkeypatch):
    """Even if the losses are kept."""
    saved = []
    watch_forwards(monkeypatch, lambda made, bundle: saved.extend(map(weakref.ref, made.saved)))
    model, x = heads()
    losses = model(x)
    assert saved
    sum(losses).backward()
    assert [each for each in saved if each() is not None] == []
