"""The prior of a learned transition in PyTorch operations, into given memory, and its gradients.

forward    mean_p = A mean    var_p = (A∘A) var + |r|
backward   dA = dmeanᵀ mean + 2 A ∘ (dvarᵀ var)    dmean A    dvar (A∘A)    sign(r) Σ dvar
"""

from __future__ import annotations

import torch
from torch import Tensor

from kalmannorm._ops.normalize.row_kernels import Predicted, Transition
from kalmannorm.moments.core import full_precision


def forward(given: Transition, prior: Tensor) -> None:
    """Write mean and variance into `prior`, (2, G, C)."""
    previous, matrix, noise = given
    (mean, var), (prior_mean, prior_var) = previous.unbind(0), prior.unbind(0)
    with full_precision(matrix.device):
        torch.mm(mean, matrix.t(), out=prior_mean)
        torch.mm(var, matrix.square().t(), out=prior_var).add_(noise.abs())


def backward(d_mean: Tensor, d_var: Tensor, given: Transition | None, to_matrix: bool) -> Predicted:
    """Gradients of the posterior before, of the matrix (if `to_matrix`) and of the noise."""
    if given is None:
        return None, None, None
    previous, matrix, noise = given
    mean, var = previous.unbind(0)
    with full_precision(matrix.device):
        d_previous = torch.stack([d_mean @ matrix, d_var @ matrix.square()])
        d_matrix = (d_var.t() @ var).mul_(matrix * 2).add_(d_mean.t() @ mean) if to_matrix else None
    return d_previous, d_matrix, d_var.sum_to_size(noise.shape) * noise.sgn()
