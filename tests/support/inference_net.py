"""A small net whose norms have priors, for tests of inference."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from kalmannorm import BatchKalmanNorm2d


class Net(nn.Module):
    """Three norms in a chain, the prior learned and travelling, away from its start."""

    def __init__(self, m=2, attribute=False, **options):
        super().__init__()
        self.attribute = attribute
        widths = (3, 6, 5, 4)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        priors = (None, *widths[1:-1])
        self.norms = nn.ModuleList(
            BatchKalmanNorm2d(C, P, statistics_batch_size=m, **options) for C, P in zip(widths[1:], priors, strict=True)
        )
        for norm in self.norms[1:]:
            nn.init.normal_(norm.transition.matrix, std=0.3)

    def forward(self, x):
        posterior = None
        for conv, norm in zip(self.convs, self.norms, strict=True):
            if self.attribute:
                x = norm(conv(x), posterior)
                posterior = norm.posterior
            else:
                x, posterior = norm(conv(x), posterior, return_posterior=True)
            x = x.relu()
        return x
