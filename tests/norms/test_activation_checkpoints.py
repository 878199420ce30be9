"""Activation checkpointing: same gradients, and the statistics move once though the forward runs twice."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kalmannorm import BatchKalmanNorm2d, BatchRenorm2d, GhostBatchNorm2d, convert


class Block(nn.Module):
    """Two norms and the prior between them, inside one checkpointed segment."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 3)
        self.norm1 = BatchKalmanNorm2d(5, statistics_batch_size=2)
        self.norm2 = BatchKalmanNorm2d(4, 5, statistics_batch_size=2)
        nn.init.normal_(self.norm2.transition.matrix)

    def forward(self, x):
        x, posterior = self.norm1(self.conv1(x), return_posterior=True)
        return self.norm2(self.conv2(x.relu()), posterior)


RENORM = {"statistics_batch_size": 2, "warmup_steps": 0, "r_steps": 2, "d_steps": 2}
"""A schedule that ends with the second batch, so that r and d act."""


class Twice(nn.Module):
    """One Batch Renorm that runs twice in a segment: the second time with the statistics that the first one left."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), BatchRenorm2d(3, **RENORM)

    def forward(self, x):
        return self.norm(self.conv(self.norm(self.conv(x)).relu()))


class Nested(nn.Module):
    """A checkpoint inside a checkpoint: the inner one is entered again when the outer one is recomputed."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.inner, self.reentrant = Twice(), Twice(), reentrant

    def forward(self, x):
        return checkpoint(self.inner, self.first(x).relu(), use_reentrant=self.reentrant)


def converted():
    bare = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    return convert(bare, to="renorm", **RENORM)


BLOCKS = {
    "kalman": Block,
    "ghost": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), GhostBatchNorm2d(4, statistics_batch_size=2)),
    "renorm": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), BatchRenorm2d(4, **RENORM)),
    "renorm twice": Twice,
    "renorm nested": lambda: Nested(reentrant=False),
    "renorm nested, re-entrant inside": lambda: Nested(reentrant=True),
    "renorm converted": converted,
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # of re-entrant ones, nested
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())
def test_statistics_move_once_and_gradients_are_the_same(block, reentrant):
    plain = block()
    twin = copy.deepcopy(plain)
    for _ in range(3):
        x = torch.randn(4, 3, 8, 8, requires_grad=True)
        plain(x).square().sum().backward()
        expected = x.grad.clone()
        x.grad = None
        checkpoint(twin, x, use_reentrant=reentrant).square().sum().backward()
        torch.testing.assert_close(x.grad, expected)
    for (name, p), q in zip(plain.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg=name)
    for (name, p), q in zip(plain.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(p, q), name


def forwards_before_the_backward(norm, run):
    x = [torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(3)]
    sum(run(norm, part).pow(3).sum() for part in x).backward()
    return [t.grad for t in (*x, *norm.parameters())]


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_batch_renorm_corrects_as_in_the_forward_that_is_recomputed(reentrant):
    """Three forwards before a backward, each with other statistics; and r and d do act, or nothing would be shown."""
    norm, acting = BatchRenorm2d(3, **RENORM), []
    norm.num_batches_tracked.fill_(2)
    twin = copy.deepcopy(norm)
    norm.register_forward_pre_hook(lambda norm, _: acting.append(norm.running_var.clone()))
    expected = forwards_before_the_backward(norm, lambda norm, x: norm(x))
    found = forwards_before_the_backward(twin, lambda norm, x: checkpoint(norm, x, use_reentrant=reentrant))
    plain = forwards_before_the_backward(GhostBatchNorm2d(3, statistics_batch_size=2), lambda norm, x: norm(x))
    assert not any(torch.equal(a, b) for a, b in pairwise(acting))
    for a, e, p in zip(found, expected, plain, strict=True):
        torch.testing.assert_close(a, e)
        assert not torch.allclose(e, p, rtol=1e-3)


def test_compiled_with_checkpointing_inside():
    """The explicit form assigns nothing, so a checkpointed block compiles without a graph break."""

    class Explicit(Block):
        def forward(self, x):
            x, posterior = self.norm1(self.conv1(x), return_posterior=True)
            return self.norm2(self.conv2(x.relu()), posterior, return_posterior=True)[0]

    torch._dynamo.reset()
    block, x = Explicit(), torch.randn(4, 3, 8, 8)
    twin = copy.deepcopy(block)
    compiled = torch.compile(lambda x: checkpoint(twin, x, use_reentrant=False), fullgraph=True, backend="aot_eager")
    block(x).square().sum().backward()
    compiled(x).square().sum().backward()
    for (name, p), q in zip(block.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5, msg=name)
    # torch 2.6 recomputes the moves of the statistics too, those of its own BatchNorm as well: be as good as that.
    batchnorm = nn.BatchNorm2d(3)
    torch.compile(lambda x: checkpoint(batchnorm, x, use_reentrant=False), backend="aot_eager")(x).sum().backward()
    assert twin.norm1.num_batches_tracked == twin.norm2.num_batches_tracked == batchnorm.num_batches_tracked
    if batchnorm.num_batches_tracked == 1:
        for (name, p), q in zip(block.named_buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(q, p, rtol=1e-4, atol=1e-5, msg=name)


def test_prior_from_outside_the_segment():
    """A posterior may enter a non-reentrant segment as an argument and keeps its gradient."""
    first = BatchKalmanNorm2d(3, statistics_batch_size=2)
    second = BatchKalmanNorm2d(3, 3, statistics_batch_size=2)
    nn.init.normal_(second.transition.matrix)
    x = torch.randn(4, 3, 6, 6, requires_grad=True)

    def run(use_checkpoint):
        y, posterior = first(x, return_posterior=True)
        if use_checkpoint:
            y = checkpoint(second, y.relu(), posterior, use_reentrant=False)
        else:
            y = second(y.relu(), posterior)
        return torch.autograd.grad(y.pow(3).sum(), x)[0]

    torch.testing.assert_close(run(True), run(False))
    assert second.num_batches_tracked == 2
