"""Transitions: how the posterior of the layer before becomes this layer's prior.

`learned` is the paper: mean_p = A mean, var_p = (A∘A) var + r, with A learned and r one noise for the whole model.
`identity` and `weights` take what they are given as the prior itself; for `weights` that is a belief carried through
the very weights that lie between the two norms (see `kalmannorm.moments`), and nothing is learned here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kalmannorm import filter as kalman
from kalmannorm.moments import Moments
from kalmannorm.moments.core import full_precision

TRANSITIONS = ("learned", "identity", "weights")


class LearnedTransition(nn.Module):
    """A (C, P), dense or of low rank, starting at zero, and the noise r, starting at 1.

    At the start the prior is therefore N(0, r) whatever the layer before says, about what a He-initialised layer makes
    of normalized features; the means then teach A where to go.

    `noise` holds r. It enters as |noise|, so that no optimizer step can make the variance negative.
    """

    def __init__(
        self,
        num_features: int,
        prior_features: int,
        *,
        rank: int | None = None,
        noise: nn.Parameter | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        options = {"device": device, "dtype": dtype}
        self.prior_features = prior_features
        self.rank = rank
        if rank is None:
            self.matrix = nn.Parameter(torch.empty(num_features, prior_features, **options))  # type: ignore[arg-type]
        else:
            self.left = nn.Parameter(torch.empty(num_features, rank, **options))  # type: ignore[arg-type]
            self.right = nn.Parameter(torch.empty(rank, prior_features, **options))  # type: ignore[arg-type]
        self._reset_matrix()
        self.noise = nn.Parameter(torch.ones((), **options)) if noise is None else noise  # type: ignore[arg-type]

    def _reset_matrix(self) -> None:
        if self.rank is None:
            nn.init.zeros_(self.matrix)
        else:
            # One factor must be non-zero, or neither would ever receive a gradient.
            nn.init.zeros_(self.left)
            nn.init.xavier_uniform_(self.right)

    def reset_parameters(self) -> None:
        """A = 0 and r = 1; a noise that other layers share is reset for them too."""
        self._reset_matrix()
        nn.init.ones_(self.noise)

    def dense(self) -> Tensor:
        """A itself, (C, P)."""
        return self.matrix if self.rank is None else self.left @ self.right

    def forward(self, previous: Moments, full: bool = False) -> Moments:
        with full_precision(self.noise.device):
            matrix = self.dense()
        return kalman.predict(previous.to(matrix.dtype), matrix, self.noise.abs(), full=full)

    def extra_repr(self) -> str:
        return f"prior_features={self.prior_features}" + ("" if self.rank is None else f", rank={self.rank}")
