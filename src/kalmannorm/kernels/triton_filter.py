"""The filter on rows of moments inside a kernel: `filter.update`, `filter.mix` and `filter.update_backward`."""

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401  Triton's interpreter looks for it in every file with kernels


@triton.jit
def update(mean, var, prior_mean, prior_var, q):
    """The filter: prior and observation fused."""
    return mix(mean, var, prior_mean, prior_var, q, 1.0 - q)


@triton.jit
def mix(mean, var, prior_mean, prior_var, q, p):
    """As `filter.mix`."""
    d = mean - prior_mean
    return p * prior_mean + q * mean, p * prior_var + q * var + p * q * d * d


@triton.jit
def update_backward(at_mean, at_var, mean, var, prior_mean, prior_var, q):
    """Gradients at the observation, at the prior and at the gain, from those at the posterior.

    Each from its own formula and in the order of `filter.update_backward`.
    """
    p = 1.0 - q
    d = mean - prior_mean
    lever = q * at_var * d
    at_q = (at_mean + (p - q) * at_var * d) * d + at_var * (var - prior_var)
    return q * at_mean + 2.0 * p * lever, q * at_var, p * (at_mean - 2.0 * lever), p * at_var, at_q
