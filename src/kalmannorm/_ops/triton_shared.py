"""Functions that kernels share: the wait for the kernel before, reproducible sums, the filter on rows of moments."""

from __future__ import annotations

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # Triton before 3.4
    gdc_launch_dependents = gdc_wait = None

DEPENDENT_LAUNCH = gdc_wait is not None
"""Whether this Triton can launch a kernel while the one before it runs."""


@triton.jit
def await_previous(PDL: tl.constexpr):
    """The first statement of a kernel."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def sum_of_products(a, b, axis: tl.constexpr):
    """Σ a b, each product rounded before it is added.

    Threads sum up two by two, each its own value and that of another. Were product and sum fused, each would add its
    own product unrounded and the other's rounded: the two would differ in the last bit, and which of them writes the
    result that both hold would be left to chance.
    """
    return tl.sum(tl.fma(a, b, 0.0), axis)


@triton.jit
def update(mean, var, prior_mean, prior_var, q):
    """The filter: prior and observation fused."""
    return mix(mean, var, prior_mean, prior_var, q, 1.0 - q)


@triton.jit
def mix(mean, var, prior_mean, prior_var, q, p):
    """As `_filter.mix`."""
    d = mean - prior_mean
    return p * prior_mean + q * mean, p * prior_var + q * var + p * q * d * d


@triton.jit
def update_backward(grad_mean, grad_var, mean, var, prior_mean, prior_var, q):
    """Gradients at the observation, at the prior and at the gain, from those at the posterior.

    Each from its own formula and in the order of `_filter.update_backward`.
    """
    p = 1.0 - q
    d = mean - prior_mean
    lever = q * grad_var * d
    grad_q = (grad_mean + (p - q) * grad_var * d) * d + grad_var * (var - prior_var)
    return q * grad_mean + 2.0 * p * lever, q * grad_var, p * (grad_mean - 2.0 * lever), p * grad_var, grad_q
