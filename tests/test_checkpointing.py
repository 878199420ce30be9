"""Activation checkpointing: same gradients, and the statistics move once though the forward runs twice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kalmannorm import BatchKalmanNorm2d, BatchRenorm2d, GhostBatchNorm2d


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


BLOCKS = {
    "kalman": Block,
    "ghost": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), GhostBatchNorm2d(4, statistics_batch_size=2)),
    "renorm": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), BatchRenorm2d(4, statistics_batch_size=2)),
}


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())
def test_statistics_move_once_and_gradients_are_the_same(block, reentrant):
    plain = block()
    twin = copy.deepcopy(plain)
    for _ in range(2):
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
