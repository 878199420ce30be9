"""`convert(..., weight_standardization=True)`: filters of convolutions with a norm after them, in priors too."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torchvision
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.utils.checkpoint import checkpoint

from kalmannorm import (
    BatchKalmanNorm2d,
    ClosingPhase,
    convert,
    fold,
    fuse,
    recalibrate,
    rewire,
    to_batchnorm,
    wiring,
)
from kalmannorm._norms.computed_weights import ComputedWeight

F64 = torch.float64
TARGETS = ["kalman", "ghost"]
OPTION = "stem.weight_standardization"
"""The key of a state dict that tells of the option."""


class Net(nn.Module):
    """Two normalized convolutions, a depthwise one, an attention between them, and a head without a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, bias=False)
        self.norm0 = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.norm1 = nn.BatchNorm2d(8)
        self.squeeze, self.excite = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)
        self.body = nn.Conv2d(8, 6, 3)
        self.norm2 = nn.BatchNorm2d(6)
        self.head = nn.Conv2d(6, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(self.depthwise(self.norm0(self.stem(x)).relu())).relu()
        weights = self.excite(self.squeeze(x.mean((2, 3), keepdim=True)).relu()).sigmoid()
        return self.head(self.norm2(self.body(x * weights)).relu()).mean((2, 3))


def net(**options) -> nn.Module:
    torch.manual_seed(0)
    given = Net().to(F64)
    options = {"statistics_batch_size": 2, "weight_standardization": True, **options}
    return convert(given, torch.zeros(2, 3, 12, 12, dtype=F64), **options)


def images(examples: int = 6, seed: int = 1) -> torch.Tensor:
    return torch.randn(examples, 3, 12, 12, dtype=F64, generator=torch.Generator().manual_seed(seed))


def computed(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, ComputedWeight)]


def plain(model: nn.Module) -> nn.Module:
    """The same norms on plain convolutions that have the computed filters as weights."""
    to = "kalman" if isinstance(model.norm2, BatchKalmanNorm2d) else "ghost"
    other = net(to=to, weight_standardization=False)
    other.load_state_dict({name: value for name, value in model.state_dict().items() if name != OPTION})
    with torch.no_grad():
        for name in computed(model):
            other.get_submodule(name).weight.copy_(model.get_submodule(name).filter)
    return other


@pytest.mark.parametrize("to", TARGETS)
def test_only_convolutions_with_a_norm_after_them(to):
    assert computed(net(to=to)) == ["stem", "body"]


@pytest.mark.parametrize("to", TARGETS)
def test_a_step_is_that_of_the_computed_filters(to):
    """Output, and the gradient by the chain rule from that of the filters: in the convolution and in the prior."""
    model = net(to=to)
    other = plain(model)
    x = images()
    y, expected = model(x), other(x)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    y.square().sum().backward()
    expected.square().sum().backward()
    for name, parameter in other.named_parameters():
        found = model.get_parameter(name)
        grad = parameter.grad
        if name in ("stem.weight", "body.weight"):
            weight = found.detach().clone().requires_grad_()
            var, mean = torch.var_mean(weight, (1, 2, 3), correction=0, keepdim=True)
            ((weight - mean) / (var + 1e-5).sqrt() / weight[0].numel() ** 0.5).backward(grad)
            grad = weight.grad
        torch.testing.assert_close(found.grad, grad, rtol=1e-8, atol=1e-8, msg=name)


@pytest.mark.parametrize("to", TARGETS)
def test_the_factor_changes_no_step(to):
    """The norm removes the factor 1 / sqrt(n), up to its eps. So the gradient of the weight stays the same."""
    model = net(to=to)
    other = plain(model)
    with torch.no_grad():
        for name in computed(model):
            other.get_submodule(name).weight.mul_(model.get_submodule(name).weight[0].numel() ** 0.5)
    y, expected = model(images()), other(images())
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    y.square().sum().backward()
    expected.square().sum().backward()
    for name in ("norm0.weight", "norm2.bias", "depthwise.weight", "head.weight"):
        torch.testing.assert_close(model.get_parameter(name).grad, other.get_parameter(name).grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"to": "ghost"}, {"transition": "learned"}], ids=str)
def test_running_statistics_begin_near_the_data(options):
    """They begin at 0 and 1. Without the factor a new ResNet-18 gave 4e21 in population inference."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, 64)
    given = torchvision.models.resnet18(num_classes=10)
    model = convert(given, x, statistics_batch_size=2, weight_standardization=True, momentum=1.0, **options)
    with torch.no_grad():
        y = copy.deepcopy(model).eval()(x)
        model(x)
    assert 0.01 < y.abs().max() < 10
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert len(norms) == 20
    for norm in norms:
        assert 0.05 < norm.observed_var.mean() < 5
        assert norm.observed_mean.abs().mean() < 1


def test_priors_read_the_filters():
    """The scale of a weight changes no prior, and so no output."""
    model = net()
    x = images()
    y = model(x)
    with torch.no_grad():
        for name in computed(model):
            model.get_submodule(name).weight.mul_(3)
    torch.testing.assert_close(model(x), y, rtol=1e-3, atol=1e-3)  # eps
    assert [norm.sources for norm in wiring(model).norms] == [norm.sources for norm in wiring(plain(model)).norms]


@pytest.mark.parametrize("to", TARGETS)
def test_names_parameters_and_checkpoints(to):
    model = net(to=to)
    given = Net().to(F64)
    model.load_state_dict(given.state_dict(), strict=False)
    assert torch.equal(model.stem.weight, given.stem.weight)
    back = to_batchnorm(model)
    assert back.state_dict().keys() == given.state_dict().keys()
    assert type(back.stem) is nn.Conv2d
    x = images()
    torch.testing.assert_close(back.eval()(x), model.eval()(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("to", TARGETS)
def test_fold(to):
    model = net(to=to)
    recalibrate(model, [images(16)], progress=False)
    folded = fold(model.eval(), images(2))
    assert not computed(folded) and not any(isinstance(each, nn.BatchNorm2d) for each in folded.modules())
    x = images()
    torch.testing.assert_close(folded(x), model(x), rtol=1e-5, atol=1e-5)  # buffers are float32


@pytest.mark.parametrize("to", TARGETS)
def test_copies(to):
    model = net(to=to)
    x = images()
    y = copy.deepcopy(model)(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(x), y, rtol=0, atol=0)
        assert computed(other) == ["stem", "body"]


def test_rewire():
    model, x = net(), images()
    y = copy.deepcopy(model)(x)
    rewire(model, images(2))
    assert computed(model) == ["stem", "body"]
    torch.testing.assert_close(model(x), y, rtol=1e-12, atol=1e-12)


def test_checkpointed_and_compiled():
    model, x = net(), images()
    outputs, gradients = [], []
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager")
    for each, run in (
        (model, model),
        (again := copy.deepcopy(model), lambda x: checkpoint(again, x, use_reentrant=False)),
        (compiled._orig_mod, compiled),
    ):
        outputs.append(run(x))
        outputs[-1].square().sum().backward()
        gradients.append(each.stem.weight.grad)
    for each in outputs[1:]:
        torch.testing.assert_close(each, outputs[0], rtol=1e-10, atol=1e-10)
    for each in gradients[1:]:
        torch.testing.assert_close(each, gradients[0], rtol=1e-9, atol=1e-9)


def test_fuse():
    model, x = net(), images()
    fused = fuse(copy.deepcopy(model), images(2))
    assert {"norm0", "norm1", "norm2"} <= fused.fusion.fused.keys()
    torch.testing.assert_close(fused(x), model(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("fade", [False, True])
@pytest.mark.parametrize("to", TARGETS)
def test_a_training_with_a_closing_phase(to, fade):
    model = net(to=to)
    phase = ClosingPhase(model, 80, start=0.2, end=0.5, fade_prior=fade)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(80):
        optimizer.zero_grad()
        x = images(8)
        loss = nn.functional.cross_entropy(model(x), torch.arange(8) % 4)
        loss.backward()
        optimizer.step()
        phase.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    x = images(8)
    torch.testing.assert_close(copy.deepcopy(model).eval()(x), model(x), rtol=1e-4, atol=1e-4)


def test_refusals():
    with pytest.raises(ValueError, match="example_input must be given for weight_standardization"):
        convert(Net(), to="ghost", weight_standardization=True)
    linear = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match="no plain convolution with a norm after it"):
        convert(linear, torch.randn(2, 3), weight_standardization=True)
    assert type(linear[1]) is nn.BatchNorm1d


def test_trained_weights_are_warned_of():
    trained = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(trained, torch.zeros(2, 3, 12, 12), weight_standardization=True)
    for _ in range(60):
        trained(torch.randn(4, 3, 12, 12))
    with pytest.warns(UserWarning, match="changes what trained convolutions compute"):
        convert(trained, torch.zeros(2, 3, 12, 12), weight_standardization=True)


class Uses(nn.Module):
    """Convolutions that must stay plain, and two that need not."""

    def __init__(self) -> None:
        super().__init__()
        self.functional, self.tied, self.twin = (nn.Conv2d(4, 4, 1, bias=False) for _ in range(3))
        self.twin.weight = self.tied.weight
        self.gated, self.single, self.other = nn.Conv2d(4, 4, 1), nn.Conv2d(1, 4, 1), nn.Conv2d(4, 4, 1)
        self.aux = nn.Conv2d(4, 4, 1)
        for name in ("functional", "tied", "twin", "gated", "single", "other", "aux"):
            self.add_module(f"norm_{name}", nn.BatchNorm2d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm_functional(nn.functional.conv2d(x, self.functional.weight))
        x = self.norm_twin(self.twin(self.norm_tied(self.tied(x))))
        x = self.norm_gated(self.gated(x).sigmoid())
        x = x + self.norm_single(self.single(x[:, :1]))
        if self.training:
            x = x + self.norm_aux(self.aux(x))
        return self.norm_other(nn.functional.leaky_relu(self.other(x)))


def test_other_uses_of_a_weight():
    model = convert(Uses(), torch.randn(4, 4, 3, 3), statistics_batch_size=2, weight_standardization=True)
    assert computed(model) == ["other", "aux"]


def test_fx():
    model = net()
    graph = torch.fx.symbolic_trace(model)
    assert {"stem", "body"} <= {node.target for node in graph.graph.nodes if node.op == "call_module"}


def test_a_weight_with_other_memory():
    """A hook that replaces `weight.data` after the forward of the model has begun."""
    model = net(to="ghost")
    other = copy.deepcopy(model)
    x = images()
    new = torch.randn_like(model.body.weight)
    with torch.no_grad():
        other.body.weight.copy_(new)
    model.body.register_forward_pre_hook(lambda module, args: setattr(module.weight, "data", new.clone()))
    torch.testing.assert_close(model(x), other(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("to", [*TARGETS, "group"])
def test_a_model_without_the_option_refuses_the_weights(to):
    given = {} if to == "group" else {"statistics_batch_size": 2}
    model, other = (
        convert(Net(), torch.zeros(2, 3, 12, 12), to=to, weight_standardization=chosen, **given)
        for chosen in (True, False)
    )
    saved = model.state_dict()
    assert [name for name in saved if "standardization" in name] == [OPTION]
    assert set(saved) - {OPTION} == set(other.state_dict())
    with pytest.raises(RuntimeError, match=rf'Unexpected key.*"{OPTION}"'):
        other.load_state_dict(saved)
    assert other.load_state_dict(saved, strict=False).unexpected_keys == [OPTION]
    with pytest.raises(RuntimeError, match=rf'Unexpected key.*"0.{OPTION}"'):
        nn.Sequential(other).load_state_dict(nn.Sequential(model).state_dict())


def test_the_option_in_state_dicts_that_fit():
    """With and without the key, which older state dicts do not have. A deployed model is plain."""
    model, other = net(), net()
    nn.init.normal_(model.stem.weight)
    saved = model.state_dict()
    for given in (saved, {name: value for name, value in saved.items() if name != OPTION}):
        nn.init.zeros_(other.stem.weight)
        other.load_state_dict(given)
        assert torch.equal(other.stem.weight, model.stem.weight)
    model.stem.load_state_dict(model.stem.state_dict())
    assert list(model.body.state_dict()) == ["weight", "bias", "weight_standardization"]
    assert not any("standardization" in name for name in to_batchnorm(model).state_dict())


def test_distributed_checkpoints_know_the_option():
    model, other = net(), net()
    nn.init.normal_(model.stem.weight)
    set_model_state_dict(other, get_model_state_dict(model))
    assert torch.equal(other.stem.weight, model.stem.weight)
