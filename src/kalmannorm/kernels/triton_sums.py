"""Sums that come out the same in every thread that holds them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_of_products(a, b, axis: tl.constexpr):
    """Σ a b, each product rounded before it is added.

    Threads sum up two by two, each its own value and that of another. Were product and sum fused, each would add its
    own product unrounded and the other's rounded: the two would differ in the last bit, and which of them writes the
    result that both hold would be left to chance.
    """
    return tl.sum(tl.fma(a, b, 0.0), axis)
