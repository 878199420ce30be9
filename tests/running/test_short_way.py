"""The short way through a training step equals the long way, and is left where it could not compute the same.

Here it runs in PyTorch's operations on a CPU, and in the kernels on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from kalmannorm import convert
from kalmannorm._model.settings import norms
from kalmannorm._support.changes import Changes
from support.short_way import count_short, the_long_way
from support.short_way_cases import *  # noqa: F403
from support.short_way_cases import Small, assert_same, own_step


def test_skipped_batches(monkeypatch):
    """A norm that saw infinities keeps its statistics and counts the batch. The other norms move."""
    torch.manual_seed(0)
    x = torch.randn(4, 2, 5, 5)

    def run():
        torch.manual_seed(1)
        model = convert(Small(), x, statistics_batch_size=2)
        own_step(model, x)
        with torch.no_grad():
            model.conv2.weight.fill_(1e38)
        with pytest.warns(RuntimeWarning, match="NaN or Inf"):
            model(x)
        return {name: buffer.clone() for name, buffer in model.named_buffers()}

    taken = count_short(monkeypatch)
    found = run()
    assert taken
    assert found["norm2.skipped_batches"] == 1 and found["norm1.skipped_batches"] == 0
    assert_same(found, the_long_way(monkeypatch, run))


def test_settings_that_keep_their_values_expire_nothing():
    """Many loops call `model.train()` before every step, and set the momentum of a schedule."""
    torch.manual_seed(0)
    x = torch.randn(4, 2, 5, 5)
    model = convert(Small(), x, statistics_batch_size=2)
    own_step(model, x)
    before = Changes.count
    model.train()
    model.norm1.momentum = 0.1
    own_step(model, x)
    assert Changes.count == before
    model.norm1.momentum = 0.2
    model.eval()
    assert Changes.count == before + 4  # one momentum, three norms in evaluation


def test_tables_do_not_pile_up():
    """Evaluation between steps expires them. What they hold does not keep the moments of a forward."""
    torch.manual_seed(0)
    x = torch.randn(4, 2, 5, 5)
    model = convert(Small(), x, statistics_batch_size=2)
    for _ in range(5):
        model.eval()
        model.train()
        model(x)
    (bundles,) = model.norm1.wire.relay.bundles.values()
    assert [len(part.short.tables) for part in bundles.parts] == [1]


def test_a_backward_frees_the_moments():
    torch.manual_seed(0)
    x = torch.randn(4, 2, 5, 5)
    model = convert(Small(), x, statistics_batch_size=2)
    loss = model(x).sum()
    node = loss.grad_fn
    while "Normalize" not in type(node).__name__:
        node = node.next_functions[0][0]
    assert not any(isinstance(each, torch.Tensor) for each in vars(node.run[1]).values())
    loss.backward()
    with pytest.raises(RuntimeError, match="freed"):
        _ = node.saved_tensors


def test_norms_of_different_kinds(monkeypatch):
    """Momenta, kinds of averages and statistics batches differ between the norms of one bundle."""
    torch.manual_seed(0)
    x = torch.randn(4, 2, 5, 5)

    def run():
        torch.manual_seed(1)
        model = convert(Small(), x, statistics_batch_size=2)
        first, second, third = (norm for _, norm in norms(model))
        second.momentum, third.total_variance, third.statistics_batch_size = None, False, 3
        first.momentum = 0.5
        own_step(model, x)
        return own_step(model, -x)

    assert_same(run(), the_long_way(monkeypatch, run))
