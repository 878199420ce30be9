"""In a converted model statistics move at the end of a forward, where a device has kernels for it; here it is made to.

The kernels are stood in for by the separate operations, which the twin of a model runs at once.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from kalmannorm import accumulate_statistics, convert, freeze_statistics, recalibrate
from kalmannorm._model.settings import norms
from kalmannorm._norms import running_statistics
from kalmannorm._ops.track.averages import groups_of
from kalmannorm._running import postponed_tracking
from support.converted_net import KINDS, NON_LEAF, image, net, state, step
from support.loop_net import Loop


class Kernels(SimpleNamespace):
    """Moves are made by their norms; `together` and `alone` count them, call by call."""

    def __init__(self):
        super().__init__(together=[], alone=0, norms={})

    def watch(self, model):
        self.norms |= {norm.running_mean.data_ptr(): norm for _, norm in norms(model)}

    def _make(self, request):
        norm = self.norms[request.running[0].data_ptr()]
        seen = (groups_of(part, request.examples, request.size) for part in (request.posterior, request.observation))
        norm._track(*seen, request.values)

    def track(self, request):
        self.alone += 1
        self._make(request)

    def track_many(self, requests, tables):
        places = Counter(request.running[0].data_ptr() for request in requests)
        assert max(places.values()) == 1, "a norm is there twice"
        assert not torch.is_grad_enabled()
        self.together.append(len(requests))
        for request in requests:
            self._make(request)

    def __hash__(self):
        return id(self)


@pytest.fixture
def kernels(monkeypatch):
    """Norms take the long way, where each makes a request."""
    monkeypatch.setattr("kalmannorm._running.short_way.ShortForward.normalize", lambda *_: None)
    kernels = Kernels()
    known = kernels.norms
    monkeypatch.setattr(
        running_statistics, "tracking_for", lambda rows: None if torch.compiler.is_compiling() else kernels
    )
    launch = running_statistics.TrackedNorm._launch
    monkeypatch.setattr(
        running_statistics.TrackedNorm,
        "_launch",
        lambda self, rows: launch(self, rows) if self.running_mean.data_ptr() in known else None,
    )
    return kernels


def pair(kernels, kind="weights"):
    """A model for the kernels, and its twin for the separate operations."""
    model = net(kind)
    twin = copy.deepcopy(model)
    kernels.watch(model)
    return model, twin


def assert_moved_alike(model, twin):
    for (name, actual), expected in zip(model.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")
    assert not any(waiting for waiting in state(model).postponed.waiting.values())


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_move_once_and_together_when_the_forward_ends(kind, kernels):
    model, twin = pair(kernels, kind)
    seen = []
    model.head.register_forward_hook(lambda *_: seen.append(model.block1.bn1.num_batches_tracked.item()))
    step(model)
    step(twin)
    assert_moved_alike(model, twin)
    assert kernels.together == [7, 7] and kernels.alone == 0
    assert seen == [0, 1]  # before the end of its forward


@pytest.mark.parametrize("look", [lambda model: model.state_dict(), lambda model: model.eval()], ids=["saved", "eval"])
def test_who_saves_or_ends_training_inside_a_forward_has_them_moved(look, kernels):
    model, twin = pair(kernels)
    found = []

    def pause(module, args):
        look(running)
        found.append(running.block1.bn1.running_var.clone())

    for running in (model, twin):
        running.block3.register_forward_pre_hook(pause)
        running(image())
    assert torch.equal(*found) and not (found[0] == 1).any()
    assert_moved_alike(model, twin)
    assert kernels.together[0] == 5


def test_no_more_than_a_few_wait(kernels, monkeypatch):
    monkeypatch.setattr(postponed_tracking, "MOST", 3)
    model, twin = pair(kernels)
    model(image()), twin(image())
    assert_moved_alike(model, twin)
    assert kernels.together == [3, 3, 1]


@pytest.mark.parametrize("times", [1, 3])
def test_a_norm_that_comes_again_finds_its_first_move_made(times, kernels):
    model = convert(Loop(), [image()], statistics_batch_size=2)
    twin = copy.deepcopy(model)
    kernels.watch(model)
    views = [image(seed=seed) for seed in range(times)]
    model(views), twin(views)
    for (name, actual), expected in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(actual, expected), name
    assert kernels.together == [2] * (times - 1) + [3]


def test_a_failed_forward_moves_what_it_had_seen(kernels):
    model, twin = pair(kernels)

    def fail(module, args):
        raise RuntimeError("on purpose")

    for each in (model, twin):
        each.block3.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            each(image())
    assert_moved_alike(model, twin)
    assert kernels.together == [5]


def test_an_interrupted_forward_moves_what_it_had_seen_before_the_next_does(kernels):
    """Ctrl-C skips the hooks that end a forward."""
    model, twin = pair(kernels)

    def interrupt(module, args):
        raise KeyboardInterrupt

    for each in (model, twin):
        handle = each.block3.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            each(image())
        handle.remove()
        each(image(seed=1))
    assert_moved_alike(model, twin)
    assert kernels.together == [5, 7]


def test_parts_called_by_themselves(kernels):
    model, twin = pair(kernels)
    model.features(image()), twin.features(image())
    assert_moved_alike(model, twin)
    assert kernels.together == [1, 2, 2, 2]


def test_a_norm_called_by_itself_moves_at_once(kernels):
    model, twin = pair(kernels)
    x = torch.randn(4, 6, 7, 7)
    for each in (model, twin):
        each.block1.bn1._missed_previous = True  # no warning
        each.block1.bn1(x)
    assert_moved_alike(model, twin)
    assert kernels.together == [] and kernels.alone == 1


def test_a_norm_in_another_thread_moves_at_once(kernels):
    model, _ = pair(kernels)
    x = torch.randn(4, 6, 7, 7)
    alone = []

    def elsewhere(*_):
        thread = threading.Thread(target=lambda: model.stem[1](x))
        thread.start()
        thread.join()
        alone.append(kernels.alone)

    model.head.register_forward_hook(elsewhere)
    model(image())
    assert alone == [1] and kernels.together == [7]


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointed_segments_move_once(reentrant, kernels):
    model, twin = pair(kernels)
    for each in (model, twin):
        each.run = lambda block, x: checkpoint(block, x, use_reentrant=reentrant)
    step(model), step(twin)
    assert_moved_alike(model, twin)
    assert kernels.together == [7, 7]


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_checkpointed_model_moves_once(reentrant, kernels):
    model, twin = pair(kernels)
    for each in (model, twin):
        checkpoint(each, image().requires_grad_(), use_reentrant=reentrant).sum().backward()
    assert_moved_alike(model, twin)
    assert kernels.together == [7]


def test_who_accumulates_or_looks_on_is_left_alone(kernels):
    model, twin = pair(kernels)
    for each in (model, twin):
        with accumulate_statistics(each):
            each(image()), each(image(seed=1))
        recalibrate(each, [image(seed=2), image(seed=3)], progress=False)
    assert_moved_alike(model, twin)
    assert kernels.together == [] and kernels.alone == 0


def test_frozen_norms_stay(kernels):
    model, twin = pair(kernels)
    for each in (model, twin):
        each(image())
        freeze_statistics(each)
        each(image(seed=1))
    assert_moved_alike(model, twin)
    assert kernels.together == [7]


def test_a_call_with_other_buffers_moves_those(kernels):
    model, twin = pair(kernels)
    others = {name: buffer.clone() for name, buffer in model.named_buffers()}
    expected = {name: buffer.clone() for name, buffer in others.items()}
    kernels.norms |= {others[f"{name}.running_mean"].data_ptr(): norm for name, norm in norms(model)}
    functional_call(model, others, (image(),))
    functional_call(twin, expected, (image(),))
    for name, buffer in others.items():
        assert torch.equal(buffer, expected[name]), name
    assert kernels.together == [7]
    assert_moved_alike(model, twin)  # not at all


@NON_LEAF
@pytest.mark.parametrize("kind", ["weights", "ghost"])
def test_a_compiled_part_of_an_eager_model(kind, kernels):
    torch._dynamo.reset()
    model, twin = pair(kernels, kind)
    for each in (model, twin):
        each.block2.compile(backend="aot_eager", fullgraph=True)
        each(image()), each(image(seed=1))
    for (name, actual), expected in zip(model.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(actual, expected, msg=name)
    assert kernels.together == [5, 5]


def test_copies_share_no_tables(kernels):
    model, _ = pair(kernels)
    relay = model.block1.bn1.wire.relay
    relay.tables["something"] = object()
    model(image())
    other = copy.deepcopy(model).block1.bn1.wire.relay
    assert other.tables == {} and other.state.postponed is not relay.state.postponed
