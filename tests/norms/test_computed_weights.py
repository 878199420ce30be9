"""Convolutions with computed filters: filters are computed together at the beginning of a forward, and every way to run
a model gives the numbers of convolutions that compute their own."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import kalmannorm
from kalmannorm import convert, fold, to_batchnorm
from kalmannorm._norms import computed_weights
from kalmannorm._norms.computed_weights import (
    RUNNING,
    ComputedWeight,
    ComputeFilters,
    ForgetFilters,
    check_convolutions,
    compute_weights,
    plain_weights,
)
from kalmannorm._ops.filters import definition

COMPUTATIONS = ["centred", "standardized", "scaled"]
F64 = torch.float64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1, groups=2, bias=False)

    def forward(self, x):
        return x + self.second(self.first(x).relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.block, self.head = nn.Conv2d(3, 4, 3), Block(), nn.Linear(4, 2)
        self.within = nullcontext  # a context in which the block runs
        self.around = lambda function, x: function(x)
        self.before = lambda: None

    def forward(self, x):
        x = self.stem(x).relu()
        self.before()
        with self.within():
            x = self.around(self.block, x)
        return self.head(x.mean((2, 3)))


def image():
    return torch.randn(2, 3, 6, 6, dtype=F64, generator=torch.Generator().manual_seed(1))


def net(computation="standardized"):
    torch.manual_seed(0)
    model = Net().double()
    compute_weights(model, computation)
    return model


@pytest.fixture
def counted(monkeypatch):
    """A list that gets the number of weights whenever filters are computed."""
    found, original = [], computed_weights.filters_of

    def filters_of(weights, computation):
        found.append(len(weights))
        return original(weights, computation)

    monkeypatch.setattr(computed_weights, "filters_of", filters_of)
    return found


def expected(model, x=None):
    """The output and the gradients of plain convolutions of torch, whose weights are parametrized."""
    plain = Net().double()
    plain.load_state_dict(dict(model.named_parameters()))
    for module in (plain.stem, plain.block.first, plain.block.second):
        parametrize.register_parametrization(module, "weight", Parametrization(model.stem.computation), unsafe=True)
    out = plain(image() if x is None else x)
    out.square().sum().backward()
    grads = {name.replace("parametrizations.weight.original", "weight"): p.grad for name, p in plain.named_parameters()}
    return out.detach(), grads


class Parametrization(nn.Module):
    def __init__(self, computation):
        super().__init__()
        self.computation = computation

    def forward(self, weight):
        return getattr(definition, self.computation)(weight)


def assert_right(model, run=None):
    model.zero_grad()
    out = (run or model)(image())
    out.square().sum().backward()
    right, grads = expected(model)
    torch.testing.assert_close(out.detach(), right, rtol=1e-10, atol=1e-10)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-10, atol=1e-10)
    assert_forgotten()


def assert_forgotten():
    assert not RUNNING.known and not RUNNING.models


@pytest.mark.parametrize("computation", COMPUTATIONS)
def test_computed_together_and_read_in_the_forward(computation, counted):
    model, read = net(computation), []
    raw = dict(model.named_parameters())
    assert raw.keys() == dict(Net().named_parameters()).keys()
    assert model.state_dict().keys() == raw.keys() | {f"stem.{model.stem.option}"}
    model.before = lambda: read.extend(model.block.first.filter for _ in range(2))
    assert_right(model)
    assert counted == [3]
    assert read[0] is read[1] and read[0].requires_grad
    assert torch.equal(read[0], model.block.first.filter) and counted == [3, 1]  # outside of a forward: computed now
    assert model.block.first.weight is raw["block.first.weight"]


@pytest.mark.parametrize("computation", COMPUTATIONS)
def test_a_later_forward_has_filters_of_its_own(computation):
    model = net(computation)
    for _ in range(2):
        assert_right(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))


def test_copies_and_pickles():
    model = net()
    assert_right(copy.deepcopy(model))
    whole = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).double()
    compute_weights(whole, "standardized")
    again = pickle.loads(pickle.dumps(whole))
    assert len(again._forward_pre_hooks) == len(again._forward_hooks) == len(again._forward_hooks_always_called) == 1
    assert torch.equal(again(image()), whole(image()))


def test_parts_compute_their_own(counted):
    model = net()
    x = torch.randn(2, 4, 6, 6, dtype=F64)
    found = model.block(x)
    right = model.block.second
    weight = definition.standardized(right.weight)
    inner = nn.functional.conv2d(
        x, definition.standardized(model.block.first.weight), model.block.first.bias, padding=1
    )
    torch.testing.assert_close(found, x + nn.functional.conv2d(inner.relu(), weight, groups=2))
    assert counted == [1, 1]
    assert_forgotten()


def test_a_forward_that_fails_leaves_nothing(counted):
    model = net()

    def fail():
        raise RuntimeError("on purpose")

    model.before = fail
    with pytest.raises(RuntimeError, match="on purpose"):
        model(image())
    assert_forgotten()


def test_an_interrupted_forward_is_not_read_later():
    """Hooks are not called then."""
    model = net()

    def interrupt():
        raise KeyboardInterrupt

    model.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        model(image())
    assert RUNNING.known
    with pytest.raises(KeyboardInterrupt):
        model(image())
    with torch.no_grad():
        model.block.first.weight.add_(torch.randn_like(model.block.first.weight))
    torch.testing.assert_close(model.block.first.filter, definition.standardized(model.block.first.weight))
    model.before = lambda: None
    assert_right(model)


def test_a_forward_inside_another(counted):
    """Of the same model, and of a model inside of a model."""
    model, depth = net(), []

    def before():
        if not depth:
            depth.append(1)
            model(image())

    model.before = before
    assert_right(model)
    outer = nn.Sequential(net(), nn.Linear(2, 2).double())
    compute_weights(outer, "standardized")
    counted.clear()
    outer(image())
    assert counted == [3, 3]
    assert_forgotten()


def test_a_weight_that_changes_in_the_forward():
    model = net()

    def before():
        with torch.no_grad():
            model.block.first.weight.add_(torch.randn_like(model.block.first.weight))

    model.before = before
    out = model(image()).detach()
    model.before = lambda: None
    torch.testing.assert_close(out, expected(model)[0])


def test_a_weight_without_memory_until_its_module_runs():
    """Libraries that shard parameters give a weight its memory in a hook before its module, and free it afterwards."""
    model, whole = net(), {}
    right = expected(model)[0]

    def release(module, *_):
        whole[module], module.weight.data = module.weight.data, torch.empty(0, dtype=F64)

    def gather(module, _):
        module.weight.data = whole[module]

    for module in (model.stem, model.block.first, model.block.second):
        release(module)
        module.register_forward_pre_hook(gather)
        module.register_forward_hook(release)
    with torch.no_grad():
        torch.testing.assert_close(model(image()), right)


def test_given_weights_are_used():
    model = net()
    with torch.no_grad():
        others = {name: torch.randn_like(p).requires_grad_() for name, p in model.named_parameters()}
    other = copy.deepcopy(model)
    other.load_state_dict(others)
    right, grads = expected(other)
    out = functional_call(model, others, (image(),))
    torch.testing.assert_close(out.detach(), right)
    found = torch.autograd.grad(out.square().sum(), list(others.values()))
    for name, grad in zip(others, found, strict=True):
        torch.testing.assert_close(grad, grads[name])
    inner = {name.removeprefix("block."): tensor for name, tensor in others.items() if name.startswith("block.")}
    model.around = lambda block, x: functional_call(block, inner, (x,))  # a part of the forward
    kept = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("block.")}
    other.load_state_dict({**others, **kept})
    torch.testing.assert_close(model(image()).detach(), expected(other)[0])
    assert_forgotten()


def test_functional_gradients():
    model = net()
    given = {name: p.detach() for name, p in model.named_parameters()}
    grads = torch.func.grad(lambda weights: functional_call(model, weights, (image(),)).square().sum())(given)
    right = expected(model)[1]
    for name, grad in grads.items():
        torch.testing.assert_close(grad, right[name])
    each = torch.func.vmap(lambda x: functional_call(model, given, (x[None],))[0])(image())
    torch.testing.assert_close(each, model(image()))
    assert_forgotten()


def test_swapped_and_parametrized_weights(counted):
    model = net()
    model.block.first.weight = nn.Parameter(torch.randn(4, 4, 3, 3, dtype=F64))
    assert_right(model)
    model = net()
    parametrize.register_parametrization(model.block.first, "weight", Halved())
    counted.clear()
    found = model(image())
    assert counted == [2, 1]  # a parametrized weight is another tensor at each access
    model.block.first.parametrizations.weight.original.data.mul_(0.5)
    parametrize.remove_parametrizations(model.block.first, "weight", leave_parametrized=False)
    torch.testing.assert_close(model(image()), found)


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def out_of_inference_mode():
    return torch.inference_mode(False)


@pytest.mark.parametrize("outer", [torch.no_grad, torch.inference_mode, nullcontext])
@pytest.mark.parametrize(
    "inner", [torch.no_grad, torch.inference_mode, torch.enable_grad, out_of_inference_mode, nullcontext]
)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_gradients_are_where_they_are_enabled(outer, inner, frozen):
    """In a part of the forward, they may be enabled where the model has none, and the reverse."""
    model, seen = net(), []
    model.block.first.weight.requires_grad_(not frozen)

    def look(module, args):
        seen.append((module.filter.requires_grad, module.filter.is_inference()))
        assert seen[-1][0] or frozen or not torch.is_grad_enabled() or torch.is_inference_mode_enabled()
        assert torch.is_inference_mode_enabled() or not seen[-1][1]

    model.block.first.register_forward_pre_hook(look)
    model.within = inner
    model.around = lambda block, x: block(x.clone())
    with outer():
        out = model(image())
    assert len(seen) == 1
    torch.testing.assert_close(out.detach().clone(), expected(net())[0])


def test_frozen_weights_get_no_gradient():
    model = net()
    model.block.first.weight.requires_grad_(False)
    model(image()).sum().backward()
    assert model.block.first.weight.grad is None and model.stem.weight.grad is not None


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # the first forward of the outer segment
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("whole", [False, True], ids=["a part", "the model"])
@pytest.mark.parametrize("deep", [False, True], ids=["one segment", "in another"])
def test_activation_checkpoints(whole, reentrant, deep, counted):
    def run(function, x):
        return checkpoint(function, x, use_reentrant=reentrant)

    model = net()
    if deep:
        inner = model.block.first.forward
        model.block.first.forward = lambda x: run(inner, x)
    if not whole:
        model.around = run
        assert_right(model)
        assert counted == [3] if not reentrant and not deep else counted[0] == 3
    else:
        assert_right(model, lambda x: run(model, x.requires_grad_()))


def test_hooks_on_saved_tensors_inside_of_a_checkpoint():
    """Such hooks hide the checkpoint."""
    model = net()

    def inside(x):
        with torch.autograd.graph.save_on_cpu():
            return model.block(x)

    model.around = lambda block, x: checkpoint(inside, x, use_reentrant=False)
    assert_right(model)
    model.around = lambda block, x: block(x)

    def offloaded(x):
        with torch.autograd.graph.save_on_cpu():
            return model(x)

    assert_right(model, offloaded)


def test_a_backward_inside_of_the_forward():
    """A recomputation in it does not read the filters of the forward around it."""
    model = net()

    def before():
        x = torch.randn(2, 4, 6, 6, dtype=F64, requires_grad=True)
        checkpoint(model.block, x, use_reentrant=True).sum().backward()

    model.before = before
    model(image()).sum().backward()
    assert_forgotten()


def test_two_threads(counted):
    model, right = net(), expected(net())[0]
    meeting, found = threading.Barrier(2), {}

    def run(number):
        torch.set_grad_enabled(True)
        found[number] = model(image() * number)

    model.before = lambda: meeting.wait(10)
    threads = [threading.Thread(target=run, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted == [3, 3]
    torch.testing.assert_close(found[1].detach(), right)
    torch.testing.assert_close(found[2].detach(), expected(net(), image() * 2)[0])


def test_replicas():
    """As in DataParallel: their weights are no parameters, and their hooks are those of the model."""
    model = net()
    others = {id(module): module._replicate_for_data_parallel() for module in model.modules()}
    for module in model.modules():
        made = others[id(module)]
        for name, child in module._modules.items():
            made._modules[name] = others[id(child)]
        for name, parameter in module._parameters.items():
            made._parameters.pop(name, None)
            setattr(made, name, None if parameter is None else parameter * 1)
    others[id(model)](image()).square().sum().backward()
    right = expected(model)[1]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, right[name])
    assert_forgotten()


class Watching(torch.overrides.TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(getattr(function, "__name__", ""))
        return function(*args, **(kwargs or {}))


def test_modes_see_filters_where_they_are_read():
    """So a recording of the model knows which convolution a filter belongs to."""
    with Watching() as watching:
        net()(image())
    order = [name for name in watching.seen if name in ("layer_norm", "conv2d")]
    assert order == ["layer_norm", "conv2d"] * 3
    with torch.device("cpu"):  # it watches nothing
        assert not computed_weights.functions_watched()
        assert_right(net())


@pytest.mark.parametrize("computation", COMPUTATIONS)
def test_torch_jit_trace(computation):
    model = net(computation)
    x = torch.randn(2, 3, 6, 6, dtype=F64)
    traced = torch.jit.trace(model, (image(),))
    torch.testing.assert_close(traced(x), model(x))
    with torch.no_grad():
        model.stem.weight.add_(torch.randn_like(model.stem.weight))
    torch.testing.assert_close(traced(x), model(x))
    assert_forgotten()


@pytest.mark.parametrize("computation", COMPUTATIONS)
def test_compiled(computation, counted):
    """No graph break, nothing is kept, and changed weights count."""

    class Simple(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.block = nn.Conv2d(3, 4, 3), Block()

        def forward(self, x):
            return self.block(self.stem(x))

    model = Simple().double()
    compute_weights(model, computation)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        found = compiled(image())
        grads = torch.autograd.grad(found.square().sum(), list(model.parameters()))
        assert not counted
        out = model(image())
        torch.testing.assert_close(found, out)
        torch.testing.assert_close(grads, torch.autograd.grad(out.square().sum(), list(model.parameters())))
        counted.clear()
        with torch.no_grad():
            model.block.first.weight.add_(torch.randn_like(model.block.first.weight))
    assert_forgotten()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # what dynamo meets
def test_a_part_is_compiled():
    model = net()
    model.block.compile(backend="aot_eager", fullgraph=True)
    out = model(image())
    torch.testing.assert_close(out.detach(), expected(net())[0])
    broken = net()
    broken.before = torch._dynamo.graph_break
    torch.testing.assert_close(torch.compile(broken, backend="aot_eager")(image()).detach(), expected(net())[0])
    assert_forgotten()


def test_some_convolutions_only(counted):
    model = Net().double()
    model.block.second.forward = model.block.second.forward  # it could not be computed
    with pytest.raises(TypeError, match=r"'block.second' is a Conv2d with a weight or forward of its own"):
        check_convolutions(model)
    check_convolutions(model, [model.stem, model.block.first])
    compute_weights(model, "standardized", iter([model.stem, model.block.first]))
    assert type(model.block.second) is nn.Conv2d
    assert isinstance(model.stem, ComputedWeight) and isinstance(model.block.first, ComputedWeight)
    model(image())
    assert counted == [2]


def hooks(model):
    tables = (model._forward_pre_hooks, model._forward_hooks)
    return [hook for table in tables for hook in table.values() if isinstance(hook, (ComputeFilters, ForgetFilters))]


def test_hooks_are_added_once_and_removed():
    model = net()
    compute_weights(model, "standardized")
    assert len(hooks(model)) == 2 and len(model._forward_hooks_always_called) == 1
    right = model(image())
    assert plain_weights(model) and not hooks(model) and not model._forward_hooks_always_called
    assert not plain_weights(model)
    torch.testing.assert_close(model(image()), right)


def test_deployed_models_have_no_hooks():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).double()
    moving = convert(model, to="moving-average", statistics_batch_size=1)
    group = convert(model, to="group", num_groups=2, weight_standardization=True)
    for converted in (moving, group):
        assert len(hooks(converted)) == 2 and not hooks(model)
    for plain in (to_batchnorm(moving), fold(moving, image()), fold(group)):
        assert not hooks(plain) and type(plain[0]) is nn.Conv2d


def test_a_model_is_freed():
    model = net()
    model(image()).sum().backward()
    kept = weakref.ref(model.block.first.weight)
    gc.disable()
    try:
        del model
        assert kept() is None
    finally:
        gc.enable()


def test_priors_of_derived_filters():
    """A model that is wired after its filters are computed has priors that read the filters."""
    torch.manual_seed(0)
    parts = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)]
    model = nn.Sequential(*parts)
    compute_weights(model, "standardized")
    converted = convert(model, image().float(), statistics_batch_size=2)
    assert [norm.wired for norm in kalmannorm.wiring(converted).norms] == [False, True]
    prior = converted[4].wire.previous(0, image().float())
    plain = nn.Sequential(*parts)
    plain_weights(plain)
    right = convert(plain, image().float(), statistics_batch_size=2)[4].wire.previous(0, image().float())
    torch.testing.assert_close(prior.mean, right.mean)
    torch.testing.assert_close(prior.var, right.var)
    prior.mean.sum().backward()
    assert converted[3].weight.grad is not None
