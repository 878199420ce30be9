"""Calibrated priors: a network that was trained with batch norm has priors that meet its running statistics."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import kalmannorm
from kalmannorm import (
    BatchKalmanNorm2d,
    ClosingPhase,
    calibrate_priors,
    convert,
    fold,
    norm_layer,
    rewire,
    to_batchnorm,
)

X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def build(norm=nn.BatchNorm2d) -> nn.Sequential:
    layers = [nn.Conv2d(3, 6, 3, padding=1), norm(6), nn.ReLU(), nn.Conv2d(6, 5, 3, bias=False), norm(5), nn.SiLU()]
    return nn.Sequential(*layers, nn.Conv2d(5, 4, 3), norm(4))


def trained(batches: int = 40) -> nn.Sequential:
    """A batch norm network with correlated filters, so that its priors are wrong, after some batches."""
    torch.manual_seed(1)
    model = build().double()
    with torch.no_grad():
        for conv in (model[3], model[6]):
            conv.weight.add_(0.3)
        for norm in (model[1], model[4], model[7]):
            norm.weight.uniform_(0.5, 2)
            norm.bias.normal_()
    rng = torch.Generator().manual_seed(2)
    for _ in range(batches):
        model(torch.randn(16, 3, 8, 8, generator=rng, dtype=torch.float64))
    return model


def norms_of(model: nn.Module) -> list[BatchKalmanNorm2d]:
    return [module for module in model.modules() if isinstance(module, BatchKalmanNorm2d)]


def worst(model: nn.Module) -> float:
    """How far priors are from the running statistics, relative to the running deviation and variance."""
    found = []
    for norm in norms_of(model)[1:]:
        prior = norm.wire.previous(0, X)
        found.append(((prior.mean[0] - norm.running_mean) / norm.running_var.sqrt()).abs().max().item())
        found.append((prior.var[0] / norm.running_var - 1).abs().max().item())
    return max(found)


def test_priors_of_a_trained_network_meet_its_running_statistics():
    model = trained()
    assert worst(convert(model, X, calibrate=False)) > 0.5
    converted = convert(model, X)
    assert worst(converted) < 1e-4
    assert [norm.calibrated for norm in norms_of(converted)] == [False, True, True]  # the first has no prior
    torch.testing.assert_close(converted.eval()(X), model.eval()(X))


@pytest.mark.parametrize("batches", [0, 5, 40])
def test_only_trained_statistics_calibrate(batches):
    converted = convert(trained(batches), X)
    assert norms_of(converted)[1].calibrated == (batches == 40)


def test_statistics_of_old_checkpoints_without_a_count_calibrate():
    model = trained()
    for norm in (model[1], model[4], model[7]):
        norm.num_batches_tracked.zero_()
    assert worst(convert(model, X)) < 1e-4


def by_hand(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The forward, with every prior computed here and calibrated by the norm's constants."""
    moments, norms = kalmannorm.moments, norms_of(model)
    wires = [norm.wire for norm in norms]
    for norm in norms:
        norm.wire = None

    def prior(norm, belief, conv):
        found = moments.convolution(belief, conv.weight, conv.bias, padding=conv.padding, input_size=sizes[conv])
        scale = norm.prior_scale.flatten()
        return kalmannorm.Moments(scale * found.mean + norm.prior_shift, scale**2 * found.var)

    sizes = {model[3]: (8, 8), model[6]: (6, 6)}
    y = norms[0](model[0](x))
    belief = moments.relu(moments.belief(norms[0].weight, norms[0].bias))
    y = norms[1](model[3](y.relu()), prior(norms[1], belief, model[3]))
    belief = moments.ACTIVATIONS["silu"](moments.belief(norms[1].weight, norms[1].bias))
    y = norms[2](model[6](nn.functional.silu(y)), prior(norms[2], belief, model[6]))
    for norm, wire in zip(norms, wires, strict=True):
        norm.wire = wire
    return y


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_forward_and_gradients_by_hand(dtype):
    x, close = X.to(dtype), {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-3}
    model = convert(trained().to(dtype), x, statistics_batch_size=2)
    other = copy.deepcopy(model)
    results = []
    for each, run in ((model, model), (other, lambda x: by_hand(other, x))):
        y = run(x)
        y.square().sum().backward()
        results.append([y, *(p.grad for p in each.parameters()), *(b.to(dtype) for b in each.buffers())])
    torch.testing.assert_close(*results, **close)
    (part,) = model[4].wire.relay.bundles[model].parts
    assert len(part.calls) == 3 and not part.given  # a bundle computed the priors, with the constants


def test_compiled_code_uses_calibrated_priors():
    model = convert(trained(), X, statistics_batch_size=2)
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager")
    torch.testing.assert_close(compiled(X), model(X))


def test_state_dicts():
    source = trained()
    calibrated, plain = convert(source, X), convert(source, X, calibrate=False)
    with torch.no_grad():
        calibrated[4].prior_shift.add_(1)
    fresh = convert(build().double(), X)
    fresh(X)
    fresh.load_state_dict(calibrated.state_dict())
    assert fresh[4].calibrated
    torch.testing.assert_close(fresh.train()(X), copy.deepcopy(calibrated).train()(X), rtol=0, atol=0)
    kept = {name: value.clone() for name, value in calibrated.state_dict().items() if "prior_" in name}
    calibrated.load_state_dict(source.state_dict())  # of a batch norm: the constants stay
    assert all(torch.equal(calibrated.state_dict()[name], value) for name, value in kept.items())
    calibrated.load_state_dict(plain.state_dict())  # of a norm that was not calibrated
    torch.testing.assert_close(calibrated.train()(X), plain.train()(X))


def test_calibrate_priors_after_a_checkpoint():
    model = convert(build().double(), X)
    model.load_state_dict(trained().state_dict())
    assert worst(model) > 0.5
    calibrate_priors(model)
    assert worst(model) < 1e-4
    before = {name: value.clone() for name, value in model.state_dict().items()}
    calibrate_priors(model)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name])


def test_norm_layer_and_rewire():
    built = build(norm_layer(2)).double()
    built.load_state_dict(trained().state_dict())
    rewire(built, X)
    assert worst(built) < 1e-4
    rewire(built, torch.cat([X, X], 3))
    assert norms_of(built)[1].calibrated and worst(built) < 0.2  # padding matters less on a wider image
    rewire(built, X)
    assert worst(built) < 1e-4


def test_copies_dtypes_and_deployment():
    source = trained()
    model = convert(source, X)
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(each.train()(X), copy.deepcopy(model).train()(X), rtol=0, atol=0)
    half = copy.deepcopy(model).float().half()
    assert {half[4].prior_scale.dtype, half[4].prior_shift.dtype} == {torch.float32}
    back = to_batchnorm(model)
    assert back.state_dict().keys() == source.state_dict().keys()
    assert not hasattr(back[4], "calibrated")
    expected = source.eval()(X)
    torch.testing.assert_close(back.eval()(X), expected, rtol=0, atol=0)
    torch.testing.assert_close(fold(model)(X), expected)


def test_reset_parameters_forgets_the_constants():
    model = convert(trained(), X)
    model[4].reset_parameters()
    assert bool((model[4].prior_scale == 1).all()) and not model[4].prior_shift.any()


def test_errors():
    with pytest.raises(ValueError, match="calibrate must be None or False"):
        convert(trained(), X, transition="learned", calibrate=True)
    with pytest.raises(ValueError, match="contains no norm with a prior from weights"):
        calibrate_priors(convert(trained(), X, transition="learned"))
    with pytest.raises(ValueError, match="contains no norm with a prior from weights"):
        calibrate_priors(trained())


@pytest.mark.parametrize("to", ["kalman", "ghost"])
def test_fine_tuning_starts_where_the_network_stands(to):
    """With a closing phase from the first step on, the first output is that of inference, at m = 1 too."""
    source = trained()
    model = convert(source, X, to=to, statistics_batch_size=1)
    phase = ClosingPhase(model, 10, start=0, end=0)
    expected = source.eval()(X)
    torch.testing.assert_close(model.train()(X), expected)
    model.load_state_dict(source.state_dict())  # also after the phase was built
    assert float(model[4].closing.strength) == 1
    y = model(X)
    torch.testing.assert_close(y, expected)
    y.square().mean().backward()
    phase.step()
