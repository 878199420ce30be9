"""Functions that kernels share: the wait for the previous kernel, reproducible sums, the filter on rows of moments."""

from __future__ import annotations

import contextlib
from typing import Any

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # Triton before 3.4
    gdc_launch_dependents = gdc_wait = None

DEPENDENT_LAUNCH = gdc_wait is not None
"""Whether this version of Triton can launch a kernel while the previous one runs."""


def settle_keys(module: dict[str, Any]) -> None:
    """Compute the cache keys of a module's functions, in the order of their definition. Modules of kernels end with it.

    Triton computes the key of a function when it first needs it. The key contains the constants of those called
    functions whose keys were computed before. So it would depend on the order of launches, and a kernel that another
    process built would not be found in the cache.
    """
    for each in list(module.values()):
        if isinstance(each, JITFunction) and each.module == module["__name__"]:
            with contextlib.suppress(Exception):  # it raises again when the kernel is launched
                _ = each.cache_key


@triton.jit
def await_previous(PDL: tl.constexpr):
    """Wait for the previous kernel. This is the first statement of every kernel."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def sum_of_products(a, b, axis: tl.constexpr):
    """Σ a b. Each product is rounded before it is added.

    Threads reduce in pairs: each adds the other's value to its own. With an FMA instruction, each would add its own
    product unrounded and the other's product rounded. The two sums could differ in the last bit, and either thread may
    write the result.
    """
    return tl.sum(tl.fma(a, b, 0.0), axis)


@triton.jit
def update(mean, var, prior_mean, prior_var, q):
    """The filter: combine prior and observation."""
    return mix(mean, var, prior_mean, prior_var, q, 1.0 - q)


@triton.jit
def mix(mean, var, prior_mean, prior_var, q, p):
    """`_filter.mix` on rows.

    FMA instructions are written out. A kernel may compute the result twice, once to store it and once to use it. If the
    compiler chose where to round, it could choose differently, and a kernel that reads the stored rows would not get
    the same bits.
    """
    d = mean - prior_mean
    return tl.fma(p, prior_mean, q * mean), tl.fma(p, prior_var, tl.fma(q, var, p * q * d * d))


@triton.jit
def update_backward(grad_mean, grad_var, mean, var, prior_mean, prior_var, q):
    """Gradients with respect to observation, prior and gain, from those with respect to the posterior.

    The formulas and the order of factors are those of `_filter.update_backward`.
    """
    p = 1.0 - q
    d = mean - prior_mean
    lever = q * grad_var * d
    grad_q = (grad_mean + (p - q) * grad_var * d) * d + grad_var * (var - prior_var)
    return q * grad_mean + 2.0 * p * lever, q * grad_var, p * (grad_mean - 2.0 * lever), p * grad_var, grad_q


settle_keys(globals())
