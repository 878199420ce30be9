"""Sums that come out the same in every thread that holds them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_of_products(a, b, axis: tl.constexpr):
    """Σ a b, each product rounded before it is added.

    Threads sum up two by two, each its own value and that of another. A product that is fused with that sum is rounded
    in neither of the two's, but the other's is: they would differ in the last bit, and which of them writes the result
    that both hold would be left to chance.
    """
    return tl.sum(tl.fma(a, b, 0.0), axis)
