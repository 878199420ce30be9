"""The averages of all norms in one tensor, and the sums that they collect in another: who may exchange what."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load, load_file, save, save_model
from torch import nn

from kalmannorm import ClosingPhase, GhostBatchNorm2d, convert
from kalmannorm._norms.closing_state import ROWS, _runs


def net(*channels: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in zip((3, *channels[:-1]), channels, strict=True):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return convert(model, statistics_batch_size=2, to="ghost")


def train(model, phase, steps, after=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(steps):
        x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        phase.step()
        if after is not None:
            after(model)
    return model


def states(model):
    return [module.closing for module in model.modules() if isinstance(module, GhostBatchNorm2d)]


def memory_of(model):
    place = states(model)[0].place
    assert place is not None and place.memory.holds(states(model))
    return place.memory


def values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def phase_of(model):
    return ClosingPhase(model, 100, start=0, end=0)


def trained(*channels, after=None, steps=4):
    model = net(*channels)
    train(model, phase_of(model), steps, after)
    return model


@pytest.mark.parametrize("channels", [(4, 8, 4), (5, 4, 7)])
def test_norms_have_views_at_multiples_of_16_bytes(channels):
    model = trained(*channels)
    memory = memory_of(model)
    for state in states(model):
        place = state.place
        assert place.memory is memory and state.collects_in_place()
        assert state.averages._base is memory.averages and state.probe.grad._base is memory.sums
        assert place.row % ROWS == 0
        assert torch.equal(memory.averages[place.row : place.row + len(state.averages)], state.averages)
        assert (state.averages[:, 2] == 4).all()
    assert len(memory.averages) == sum(-(-count // ROWS) * ROWS for count in channels)


def separate(model):
    """Each norm with tensors of its own, as before there was such memory."""
    for state in states(model):
        state.averages, state.probe.grad = state.averages.clone(), state.probe.grad.clone()


def moved(model):
    model.to(torch.float64).to(torch.float32)


def reloaded(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def half_reloaded(model):
    first = states(model)[0]
    first.averages = first.averages.clone()


def unpickled(model):
    for module in model.modules():
        if isinstance(module, GhostBatchNorm2d):
            module.closing = pickle.loads(pickle.dumps(module.closing))


@pytest.mark.parametrize("exchange", [separate, moved, reloaded, half_reloaded, unpickled])
@pytest.mark.parametrize("channels", [(4, 8, 4), (5, 4, 7)])
def test_tensors_may_be_exchanged_between_steps(exchange, channels):
    """After some exchanges the model parameters are new, so one step follows that an optimizer does not see."""
    model, exchanged = net(*channels), net(*channels)
    phases = phase_of(model), phase_of(exchanged)
    for each, phase in zip((model, exchanged), phases, strict=True):
        train(each, phase, 3)
    exchange(exchanged)
    for each, phase in zip((model, exchanged), phases, strict=True):
        phase._known = None if exchange is unpickled else phase._known
        train(each, phase, 3)
    assert_same(values(exchanged), values(model))
    assert memory_of(exchanged)


def test_sums_that_wait_are_not_lost():
    """A backward before the exchange, the step of the phase after it."""
    found = []
    for exchange in (None, separate, half_reloaded):
        model = net(4, 4)
        phase = phase_of(model)
        train(model, phase, 1)
        model(torch.ones(4, 3, 6, 6).cumsum(3)).square().mean().backward()
        if exchange is not None:
            exchange(model)
        phase.step()
        found.append(values(model))
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_backward_with_create_graph_exchanges_gradients():
    """Torch then makes a new gradient instead of adding to the old one."""
    model = net(4, 4)
    phase = phase_of(model)
    train(model, phase, 1)
    x = torch.randn(4, 3, 6, 6)
    for create_graph in (False, True, False):
        model(x).square().mean().backward(create_graph=create_graph)
    sums = [state.probe.grad.detach().clone() for state in states(model)]
    assert all((each[:, 2] == 3).all() for each in sums)
    phase.step()
    assert all((state.averages[:, 2] == 2).all() for state in states(model))
    assert not any(state.probe.grad.any() for state in states(model))


def test_a_copy_has_memory_of_its_own():
    model = trained(4, 5)
    before, twin = values(model), copy.deepcopy(model)
    assert all(state.place is None and state.averages._base is None for state in states(twin))
    train(twin, phase_of(twin), 2)
    assert_same(values(model), before)
    assert memory_of(twin) is not memory_of(model)
    for state in states(pickle.loads(pickle.dumps(model))):
        assert state.averages.untyped_storage().nbytes() == state.averages.nbytes


def with_torch(model, folder):
    torch.save(model.state_dict(), folder / "model.pt")
    return torch.load(folder / "model.pt")


def with_safetensors(model, folder):
    return load(save(model.state_dict()))


def of_a_whole_model(model, folder):
    """Refuses tensors that share memory, unless one of them has all of it."""
    save_model(model, folder / "model.safetensors")
    return load_file(folder / "model.safetensors")


def with_accelerate(model, folder):
    """Saves one of several tensors that share memory."""
    Accelerator(cpu=True).save_model(model, folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("copied", [False, True], ids=["", "copy"])
@pytest.mark.parametrize("saved", [with_torch, with_safetensors, of_a_whole_model, with_accelerate])
def test_checkpoints(saved, copied, tmp_path):
    model = trained(4, 5, 4)
    found = saved(copy.deepcopy(model) if copied else model, tmp_path)
    other = net(4, 5, 4)
    phase = phase_of(other)
    other.load_state_dict(found)
    assert_same(values(other), values(model))
    assert memory_of(other) and phase.settled
    storages = [each.untyped_storage().data_ptr() for each in model.state_dict().values()]
    assert len(set(storages)) == len(storages)


def test_an_average_of_a_copy_is_written_through_its_state_dict():
    """As moving averages of weights do: `for value in average.state_dict().values(): value.copy_(...)`."""
    average = copy.deepcopy(trained(4, 5))
    for value in average.state_dict().values():
        value.zero_()
    assert not any(state.averages.any() for state in states(average))


@pytest.mark.parametrize("same", [lambda m: m.to("cpu"), lambda m: m.float(), lambda m: m.share_memory()])
def test_moving_nothing_keeps_what_was_collected(same):
    found = []
    for moved in (False, True):
        model = net(4, 4)
        phase = phase_of(model)
        train(model, phase, 1)
        model(torch.ones(4, 3, 6, 6).cumsum(3)).square().mean().backward()
        if moved:
            same(model)
        phase.step()
        found.append(values(model))
    assert_same(found[1], found[0])


def test_it_is_freed_with_the_model_at_once():
    model = trained(4, 5)
    phase = phase_of(model)
    kept = [weakref.ref(each) for each in (memory_of(model), *states(model))]
    gc.disable()
    try:
        del model, phase
        assert not any(each() for each in kept)
    finally:
        gc.enable()


@pytest.mark.parametrize("sums", [2e38, float("nan"), float("inf")])
def test_large_sums_are_no_overflow(sums):
    """Only NaN and Inf skip a step, not a sum over channels that float32 cannot hold."""
    model = trained(4, 4)
    before = values(model)
    for state in states(model):
        state.probe.grad.copy_(torch.tensor([sums, 1e38, 4.0]).expand(4, 3))
    phase = phase_of(model)
    phase.step()
    averages = [state.averages for state in states(model)]
    if sums == 2e38:
        assert all((each[:, 2] == 5).all() and each.isfinite().all() and (each[:, 0] > 1e36).all() for each in averages)
    else:
        assert_same(values(model), before)


def test_norms_of_two_phases_have_memory_of_their_own():
    """As in a model whose parts have phases of different lengths."""
    model = net(4, 4, 4)
    first, rest = model[:3], model[3:]
    phases = ClosingPhase(first, 100, start=0, end=0), ClosingPhase(rest, 100, start=0, end=0)
    for _ in range(3):
        model(torch.randn(4, 3, 6, 6)).square().mean().backward()
        for phase in phases:
            phase.step()
    memories = [state.place.memory for state in states(model)]
    assert memories[0] is not memories[1] and memories[1] is memories[2]
    assert all((state.averages[:, 2] == 3).all() for state in states(model))


def test_sums_of_norms_that_are_side_by_side():
    """One addition for neighbours. Other norms are added one by one, and a stranger is refused."""
    model = trained(4, 8, 4, 4)
    first, second, third, last = states(model)
    memory = memory_of(model)
    assert _runs([0, 4, 12, 16], [4, 8, 4, 4]) == [(0, 0, 20)]
    assert _runs([4, 12, 0], [8, 4, 4]) == [(4, 0, 12), (0, 12, 4)]
    assert _runs(range(0, 80, 8), [4] * 10) is None
    given = torch.arange(36.0).view(12, 3)
    assert memory.add([second, third], given)
    assert torch.equal(second.probe.grad, given[:8]) and torch.equal(third.probe.grad, given[8:])
    assert memory.add([third, second], given.flip(0))
    assert torch.equal(third.probe.grad, given[8:] + given.flip(0)[:4])
    assert not first.probe.grad.any() and not last.probe.grad.any()
    stranger = states(trained(4))[0]
    assert not memory.add([first, stranger], torch.ones(8, 3))
    last.probe.grad = last.probe.grad.clone()
    assert not memory.add([third, last], torch.ones(8, 3))
    assert not first.probe.grad.any()


def test_padding_stays_zero():
    memory = memory_of(trained(5, 7))
    for whole in (memory.averages, memory.sums):
        assert whole.shape == (16, 3) and not whole[5:8].any() and not whole[15:].any()
