"""Small nets, data and comparisons for the tests of population statistics."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from kalmannorm import BatchKalmanNorm2d, BatchRenorm2d, GhostBatchNorm2d, finish_on_population, moments, recalibrate

quiet = partial(recalibrate, progress=False)
finish = partial(finish_on_population, progress=False)


def data(n=24, C=3, dtype=torch.float64):
    """Examples with means of their own, so that the variance between groups matters."""
    return torch.randn(n, C, 4, 4, dtype=dtype) * 2 + 3 * torch.randn(n, C, 1, 1, dtype=dtype)


class Chain(nn.Module):
    """Two norms and what lies between; the second has a prior where its kind takes one."""

    def __init__(self, kind=BatchKalmanNorm2d, transition=None, **options):
        super().__init__()
        self.transition = transition
        prior = (
            {"prior_features": {"learned": 3, "weights": 4}[transition], "transition": transition} if transition else {}
        )
        self.first = kind(3, **options)
        self.dropout = nn.Dropout(0.5)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.second = kind(4, **prior, **options)

    def forward(self, x):
        y = self.dropout(self.first(x).relu())
        if self.transition == "learned":
            return self.second(self.conv(y), self.first.posterior)
        if self.transition == "weights":
            belief = moments.relu(moments.belief(self.first.weight, self.first.bias))
            return self.second(self.conv(y), moments.convolution(belief, self.conv.weight, self.conv.bias, padding=1))
        return self.second(self.conv(y))


def chain(kind=BatchKalmanNorm2d, transition=None, **options):
    torch.manual_seed(1)
    net = Chain(kind, transition, **options).double()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else nn.init.uniform_(parameter, 0.5, 1.5)
    return net


KINDS = {
    "BKN": partial(chain, statistics_batch_size=2),
    "BKN-m1": partial(chain, statistics_batch_size=1),
    "BKN-learned": partial(chain, transition="learned", statistics_batch_size=2),
    "BKN-weights": partial(chain, transition="weights", statistics_batch_size=2),
    "BKN-plain-average": partial(chain, statistics_batch_size=2, total_variance=False),
    "Ghost": partial(chain, GhostBatchNorm2d, statistics_batch_size=2),
    "BatchRenorm": partial(chain, BatchRenorm2d, statistics_batch_size=2, warmup_steps=0, r_steps=1, d_steps=1),
}


def statistics(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers() if "mean" in name or "var" in name}


def same(a, b, **tolerance):
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], **tolerance, msg=lambda text, name=name: f"{name}: {text}")
