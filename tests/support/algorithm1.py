"""Algorithm 1 of the paper, transcribed on its own in numpy float64 with its moving-average signs mended.

It shares no code with the library and follows the paper line by line, one group and one layer at a time, with full
covariance matrices; the diagonal form is the same algorithm with every matrix replaced by its diagonal, A Σ A^T then
being (A∘A) σ².
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class State:
    mean: np.ndarray  # (C,)
    cov: np.ndarray  # (C, C), or (C,) in the diagonal form


def columns(x: np.ndarray) -> np.ndarray:
    """Every value of a group as a column: (m, C, *) -> (C, m')."""
    return np.moveaxis(x, 1, 0).reshape(x.shape[1], -1)


def train_step(
    x: np.ndarray,
    previous: State,
    A: np.ndarray,
    R: float,
    q: float,
    gamma: np.ndarray,
    beta: np.ndarray,
    moving: State,
    alpha: float,
    eps: float,
    *,
    full: bool,
) -> tuple[np.ndarray, State, State]:
    """y, the posterior of this layer, and the moved averages, for one group x (m, C, *)."""
    values = columns(x)
    m = values.shape[1]
    x_bar = values.sum(axis=1) / m
    centred = values - x_bar[:, None]
    S = centred @ centred.T / m
    p = 1 - q
    mean_prior = A @ previous.mean
    d = x_bar - mean_prior
    mean = p * mean_prior + q * x_bar
    if full:
        cov_prior = A @ previous.cov @ A.T + R * np.eye(len(mean))
        cov = p * cov_prior + q * S + p * q * np.outer(d, d)
        variances = np.diag(cov)
    else:
        cov_prior = (A * A) @ previous.cov + R
        cov = p * cov_prior + q * np.diag(S) + p * q * d * d
        variances = cov
    shape = (1, -1) + (1,) * (x.ndim - 2)
    y = (x - mean.reshape(shape)) / np.sqrt(variances + eps).reshape(shape)
    y = y * gamma.reshape(shape) + beta.reshape(shape)
    updated = State(
        moving.mean + alpha * (mean - moving.mean),
        moving.cov + alpha * (variances - moving.cov),
    )
    return y, State(mean, cov), updated
