"""Elementwise work of a bundle as Triton kernels. It is imported on the CUDA path only; `triton_bundle.py` launches it.

Entries are (2, E): means, then variances. Elementwise work is a tape. Every lane executes its own instructions. An
instruction only reads entries that the lane itself computed or that existed before the launch. So a chain of residual
blocks is one launch. Activations are computed in float64, as in `moments/closed.py`, which has the equations.

Kernels of layers read a table of pointers and sizes, with one row per layer, and a work list of layers and blocks.

Gradients are never added in place. Each use of an entry has its own slot. To get the gradient of an entry, a kernel
sums the slots of its uses in fixed order. So equal inputs give equal bits. Sizes do not recompile a kernel, because
every bundle has other sizes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kalmannorm._ops.triton_shared import await_previous, settle_keys

# Kinds of instructions.
ADD = tl.constexpr(1)
SUBTRACT = tl.constexpr(2)
PRODUCT = tl.constexpr(3)
AFFINE = tl.constexpr(4)
PIECEWISE = tl.constexpr(5)
SMOOTH = tl.constexpr(6)
NUMBERS = tl.constexpr(16)  # per function: affine 3; piecewise 2 knots and 9 coefficients; smooth its index

# Columns of the table of layers.
COLUMNS = tl.constexpr(21)
WEIGHT = tl.constexpr(0)  # its address
BIAS = tl.constexpr(1)
GRADIENT = tl.constexpr(2)  # start of the gradient of the weight
OUTPUTS = tl.constexpr(3)
GROUP_OUTPUTS = tl.constexpr(4)
GROUP_INPUTS = tl.constexpr(5)
STEP_GROUP = tl.constexpr(6)  # strides of the weight between groups, outputs, inputs and taps
STEP_OUTPUT = tl.constexpr(7)
STEP_INPUT = tl.constexpr(8)
STEP_TAP = tl.constexpr(9)
TAPS = tl.constexpr(10)
KINDS = tl.constexpr(11)
INDEX = tl.constexpr(12)  # start of the list of its input entries
START = tl.constexpr(13)  # its first output entry
GEOMETRY = tl.constexpr(14)  # start of: shares of taps, shares of kinds, inside taps of each kind
SUMS = tl.constexpr(15)  # start of its sums by tap
SLOTS = tl.constexpr(16)  # start of the slots for the gradients of its inputs, split by split
INPUTS = tl.constexpr(17)
ROWS = tl.constexpr(18)  # outputs of a group per program of the backward
WANTED = tl.constexpr(19)  # whether the weight needs a gradient
MOVES = tl.constexpr(20)  # 1: the address is counted from the memory of the filters, 0: from 0


@triton.jit
def mills(d):
    """The ratio of the tail beyond d and the density at d, for d >= 0.

    It is a polynomial in (d - 4) / (d + 4), divided by d + 1, fitted to 5e-16.
    """
    u = (d - 4.0) / (d + 4.0)
    p = u * -1.6952996818880583e-09 - 3.874300207686973e-09
    p = p * u + 1.3723059452459651e-08
    p = p * u + 4.372207364651429e-08
    p = p * u - 4.494916382038613e-08
    p = p * u - 2.7628944223830873e-07
    p = p * u - 3.101083609757584e-09
    p = p * u + 1.3805876779523012e-06
    p = p * u + 1.0194890870987357e-06
    p = p * u - 6.546928120500802e-06
    p = p * u - 8.606187876096938e-06
    p = p * u + 3.4156106940806135e-05
    p = p * u + 5.3266970938315365e-05
    p = p * u - 0.00022021482490664187
    p = p * u - 0.00023670175882712258
    p = p * u + 0.001741848641757937
    p = p * u - 0.0007159509052838121
    p = p * u - 0.01253910360671188
    p = p * u + 0.04495912907706981
    p = p * u - 0.08070800967978549
    p = p * u + 0.07169048120143744
    p = p * u + 0.03509188023476339
    p = p * u - 0.2423996705218081
    p = p * u + 1.1832619145678034
    return p / (d + 1.0)


@triton.jit
def about(c0, c1, c2, origin):
    return c0 + origin * (c1 + origin * c2), c1 + 2.0 * origin * c2, c2


@triton.jit
def beyond(mean, var, deviation, value, knot, a0, a1, a2, b0, b1, b2):
    """Contributions of a knot between pieces a and b to E[f - f(mean)], E[(f - f(mean))²] and their derivatives."""
    gap = mean - knot
    d = tl.abs(gap) / deviation
    density = tl.exp(-0.5 * d * d) * 0.3989422804014327
    tail = density * mills(d)
    m0 = tl.where(gap >= 0.0, -tail, tail)
    m1 = deviation * density + gap * m0
    m2 = var * m0 + gap * m1
    m3 = 2.0 * var * m1 + gap * m2
    m4 = 3.0 * var * m2 + gap * m3
    n = density / deviation
    h = n * gap / var * -0.5
    l0, l1, l2 = about(a0, a1, a2, knot)
    r0, r1, r2 = about(b0, b1, b2, knot)
    j0, j1, j2 = r0 - l0, r1 - l1, r2 - l2
    s0, s1, s2 = r0 + l0 - 2.0 * value, r1 + l1, r2 + l2
    p0 = j0 * s0
    p1 = j0 * s1 + j1 * s0
    p2 = j0 * s2 + j1 * s1 + j2 * s0
    p3 = j1 * s2 + j2 * s1
    p4 = j2 * s2
    first = j0 * m0 + j1 * m1 + j2 * m2
    first_mean = j0 * n + j1 * m0 + 2.0 * j2 * m1
    first_var = j0 * h + 0.5 * j1 * n + j2 * m0
    second = p0 * m0 + p1 * m1 + p2 * m2 + p3 * m3 + p4 * m4
    second_mean = p0 * n + p1 * m0 + 2.0 * p2 * m1 + 3.0 * p3 * m2 + 4.0 * p4 * m3
    second_var = p0 * h + 0.5 * p1 * n + p2 * m0 + 3.0 * p3 * m1 + 6.0 * p4 * m2
    return first, first_mean, first_var, second, second_mean, second_var


@triton.jit
def piecewise(mean, var, numbers):
    """Mean and variance after a piecewise quadratic, and their derivatives by mean and var, in float64."""
    varies = var >= 1e-20
    var = tl.maximum(var, 1e-20)
    deviation = tl.sqrt(var)
    k0, k1 = tl.load(numbers), tl.load(numbers + 1)
    a0, a1, a2 = tl.load(numbers + 2), tl.load(numbers + 3), tl.load(numbers + 4)
    b0, b1, b2 = tl.load(numbers + 5), tl.load(numbers + 6), tl.load(numbers + 7)
    c0, c1, c2 = tl.load(numbers + 8), tl.load(numbers + 9), tl.load(numbers + 10)
    h0 = tl.where(mean >= k1, c0, tl.where(mean >= k0, b0, a0))
    h1 = tl.where(mean >= k1, c1, tl.where(mean >= k0, b1, a1))
    curve = tl.where(mean >= k1, c2, tl.where(mean >= k0, b2, a2))
    slope = h1 + 2.0 * curve * mean
    value = h0 + (h1 + curve * mean) * mean
    f, fm, fv, s, sm, sv = beyond(mean, var, deviation, value, k0, a0, a1, a2, b0, b1, b2)
    g, gm, gv, t, tm, tv = beyond(mean, var, deviation, value, k1, b0, b1, b2, c0, c1, c2)
    centre = curve * var
    first = centre + f + g
    first_mean = slope + fm + gm
    first_var = curve + fv + gv
    second = slope * slope * var + 3.0 * centre * centre + s + t
    second_mean = 6.0 * slope * centre + sm + tm
    second_var = slope * slope + 6.0 * curve * centre + sv + tv
    spread = tl.maximum(second - first * first, 0.0)
    by_mean = second_mean - 2.0 * first * first_mean
    by_var = tl.where(varies, second_var - 2.0 * first * first_var, 0.0)
    return value + first, spread, first_mean, tl.where(varies, first_var, 0.0), by_mean, by_var


@triton.jit
def smooth_at(x, which):
    """A smooth function and its slope: 0 sigmoid, 1 SiLU, 2 GELU, 3 tanh."""
    s = 1.0 / (1.0 + tl.exp(-x))
    t = 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0
    upper = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    density = tl.exp(-0.5 * x * x) * 0.3989422804014327
    f = tl.where(which == 0, s, tl.where(which == 1, x * s, tl.where(which == 2, x * upper, t)))
    slope = tl.where(which == 2, upper + x * density, 1.0 - t * t)
    slope = tl.where(which == 0, s * (1.0 - s), tl.where(which == 1, s + x * s * (1.0 - s), slope))
    return f, slope


@triton.jit
def quadrature(mean, var, which, weights_ptr, NODES: tl.constexpr, DENSITY: tl.constexpr):
    """As `piecewise`, for a smooth function, in float32 like the quadrature of `moments/activations.py`."""
    varies = var >= 1e-20
    deviation = tl.sqrt(tl.maximum(var, 1e-20))
    middle, _ = smooth_at(mean, which)
    shift = mean * 0.0
    for i in range(NODES):
        z = (i - NODES // 2) * (1.0 / DENSITY)
        f, _ = smooth_at(mean + deviation * z, which)
        shift += tl.load(weights_ptr + i) * (f - middle)
    spread = mean * 0.0
    mean_mean, mean_var, var_mean, var_var = spread, spread, spread, spread
    for i in range(NODES):
        z = (i - NODES // 2) * (1.0 / DENSITY)
        w = tl.load(weights_ptr + i)
        f, slope = smooth_at(mean + deviation * z, which)
        away = f - middle - shift
        spread += w * away * away
        mean_mean += w * slope
        mean_var += w * slope * z
        var_mean += w * slope * away
        var_var += w * slope * away * z
    scale = tl.where(varies, 0.5 / deviation, 0.0)
    return middle + shift, spread, mean_mean, mean_var * scale, 2.0 * var_mean, 2.0 * var_var * scale


@triton.jit
def through(kind, am, av, numbers, weights_ptr, HAS_PIECEWISE: tl.constexpr, HAS_SMOOTH: tl.constexpr,
            NODES: tl.constexpr, DENSITY: tl.constexpr):  # fmt: skip
    """A function of one entry: mean and variance, and their derivatives by mean and var."""
    factor = tl.load(numbers).to(tl.float32)
    spread = tl.load(numbers + 2).to(tl.float32)
    mean = am * factor + tl.load(numbers + 1).to(tl.float32)
    var = av * spread
    mm, mv, vm, vv = factor, am * 0.0, am * 0.0, spread
    if HAS_PIECEWISE:
        is_it = kind == PIECEWISE
        if tl.max(is_it.to(tl.int32), 0) > 0:
            m, v, a, b, c, d = piecewise(am.to(tl.float64), av.to(tl.float64), numbers)
            mean, var = tl.where(is_it, m.to(tl.float32), mean), tl.where(is_it, v.to(tl.float32), var)
            mm, mv = tl.where(is_it, a.to(tl.float32), mm), tl.where(is_it, b.to(tl.float32), mv)
            vm, vv = tl.where(is_it, c.to(tl.float32), vm), tl.where(is_it, d.to(tl.float32), vv)
    if HAS_SMOOTH:
        is_it = kind == SMOOTH
        if tl.max(is_it.to(tl.int32), 0) > 0:
            which = tl.load(numbers).to(tl.int32)
            m, v, a, b, c, d = quadrature(am, av, which, weights_ptr, NODES, DENSITY)
            mean, var = tl.where(is_it, m, mean), tl.where(is_it, v, var)
            mm, mv, vm, vv = (
                tl.where(is_it, a, mm),
                tl.where(is_it, b, mv),
                tl.where(is_it, c, vm),
                tl.where(is_it, d, vv),
            )
    return mean, var, mm, mv, vm, vv


@triton.jit
def instruction(offset, there, code_ptr, a_ptr, b_ptr, out_ptr):
    """Load code, operands and result of an instruction. A masked one has code 0, which does nothing."""
    code = tl.load(code_ptr + offset, mask=there, other=0)
    a, b = tl.load(a_ptr + offset, mask=there, other=0), tl.load(b_ptr + offset, mask=there, other=0)
    return code, a, b, tl.load(out_ptr + offset, mask=there, other=0)


@triton.jit(do_not_specialize=["E", "T"])
def tape_kernel(
    entries_ptr, E, slopes_ptr, T, code_ptr, a_ptr, b_ptr, out_ptr, offset_ptr, depth_ptr, numbers_ptr, weights_ptr,
    LANES: tl.constexpr, HAS_PIECEWISE: tl.constexpr, HAS_SMOOTH: tl.constexpr,
    NODES: tl.constexpr, DENSITY: tl.constexpr, SLOPES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Run the instructions of LANES lanes. A code is kind + 8 · (row of numbers). Code 0 does nothing.

    Each instruction is loaded while the previous one is computed. Derivatives of functions of one entry, (4, T), are
    kept for the backward. Otherwise it would have to compute them again, one after the other.
    """
    await_previous(PDL)
    offset = tl.load(offset_ptr + tl.program_id(0)) + tl.arange(0, LANES)
    depth = tl.load(depth_ptr + tl.program_id(0))
    code, a, b, out = instruction(offset, offset >= 0, code_ptr, a_ptr, b_ptr, out_ptr)
    for t in range(depth):
        lane = offset + t * LANES
        kind, numbers = code % 8, numbers_ptr + code // 8 * NUMBERS
        live, two = kind > 0, (kind > 0) & (kind <= PRODUCT)
        am = tl.load(entries_ptr + a, mask=live, other=0.0)
        av = tl.load(entries_ptr + E + a, mask=live, other=1.0)
        bm = tl.load(entries_ptr + b, mask=two, other=0.0)
        bv = tl.load(entries_ptr + E + b, mask=two, other=0.0)
        here = out
        there = (offset >= 0) & (t + 1 < depth)
        code, a, b, out = instruction(lane + LANES, there, code_ptr, a_ptr, b_ptr, out_ptr)
        mean, var, mm, mv, vm, vv = through(
            kind, am, av, numbers, weights_ptr, HAS_PIECEWISE, HAS_SMOOTH, NODES, DENSITY
        )
        mean = tl.where(kind == ADD, am + bm, tl.where(kind == SUBTRACT, am - bm, mean))
        var = tl.where((kind == ADD) | (kind == SUBTRACT), av + bv, var)
        mean = tl.where(kind == PRODUCT, am * bm, mean)
        var = tl.where(kind == PRODUCT, av * bv + av * bm * bm + bv * am * am, var)
        tl.store(entries_ptr + here, mean, mask=live)
        tl.store(entries_ptr + E + here, var, mask=live)
        if SLOPES:
            tl.store(slopes_ptr + lane, mm, mask=live)
            tl.store(slopes_ptr + T + lane, mv, mask=live)
            tl.store(slopes_ptr + 2 * T + lane, vm, mask=live)
            tl.store(slopes_ptr + 3 * T + lane, vv, mask=live)
        tl.debug_barrier()  # another thread may read the result in the next instruction


@triton.jit
def collect(slots_ptr, S, first_ptr, start_ptr, step_ptr, count_ptr, entry, mask):
    """The gradients of entries: sums over the slots of their uses. A use has `count` slots with stride `step`."""
    begin = tl.load(first_ptr + entry, mask=mask, other=0)
    end = tl.load(first_ptr + entry + 1, mask=mask, other=0)
    return collect_uses(slots_ptr, S, start_ptr, step_ptr, count_ptr, begin, end)


@triton.jit
def collect_uses(slots_ptr, S, start_ptr, step_ptr, count_ptr, begin, end):
    mean = tl.zeros(begin.shape, tl.float32)
    var = tl.zeros(begin.shape, tl.float32)
    for i in range(tl.max(end - begin, 0)):
        use = begin + i
        there = use < end
        start = tl.load(start_ptr + use, mask=there, other=0)
        step = tl.load(step_ptr + use, mask=there, other=0)
        count = tl.load(count_ptr + use, mask=there, other=0)
        for j in range(tl.max(count, 0)):
            mean += tl.load(slots_ptr + start + j * step, mask=j < count, other=0.0)
            var += tl.load(slots_ptr + S + start + j * step, mask=j < count, other=0.0)
    return mean, var


@triton.jit
def instruction_back(
    offset, there, entries_ptr, E, slopes_ptr, T, first_ptr, code_ptr, a_ptr, b_ptr, out_ptr
):  # fmt: skip
    """Load an instruction and everything for its gradients but the incoming gradient. None of it changes in the
    backward, so it can be loaded early."""
    code, a, b, out = instruction(offset, there, code_ptr, a_ptr, b_ptr, out_ptr)
    kind = code % 8
    product, one = kind == PRODUCT, kind > PRODUCT
    begin = tl.load(first_ptr + out, mask=kind > 0, other=0)
    end = tl.load(first_ptr + out + 1, mask=kind > 0, other=0)
    am, av = tl.load(entries_ptr + a, mask=product, other=0.0), tl.load(entries_ptr + E + a, mask=product, other=0.0)
    bm, bv = tl.load(entries_ptr + b, mask=product, other=0.0), tl.load(entries_ptr + E + b, mask=product, other=0.0)
    mm, mv = tl.load(slopes_ptr + offset, mask=one, other=0.0), tl.load(slopes_ptr + T + offset, mask=one, other=0.0)
    vm, vv = (
        tl.load(slopes_ptr + 2 * T + offset, mask=one, other=0.0),
        tl.load(slopes_ptr + 3 * T + offset, mask=one, other=0.0),
    )
    return kind, out, begin, end, am, av, bm, bv, mm, mv, vm, vv


@triton.jit(do_not_specialize=["E", "S", "T"])
def tape_backward_kernel(
    entries_ptr, E, slopes_ptr, T, slots_ptr, S, first_ptr, start_ptr, step_ptr, count_ptr,
    code_ptr, a_ptr, b_ptr, out_ptr, offset_ptr, depth_ptr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Run the tape backwards. The first E slots belong to operands a, the next E to operands b."""
    await_previous(PDL)
    offset = tl.load(offset_ptr + tl.program_id(0)) + tl.arange(0, LANES)
    depth = tl.load(depth_ptr + tl.program_id(0))
    last = offset + (depth - 1) * LANES
    kind, out, begin, end, am, av, bm, bv, mm, mv, vm, vv = instruction_back(
        last, (offset >= 0) & (depth > 0), entries_ptr, E, slopes_ptr, T, first_ptr, code_ptr, a_ptr, b_ptr, out_ptr
    )
    for t in range(depth):
        gm, gv = collect_uses(slots_ptr, S, start_ptr, step_ptr, count_ptr, begin, end)
        live, two, product = kind > 0, (kind > 0) & (kind <= PRODUCT), kind == PRODUCT
        to_am = tl.where(product, gm * bm + 2.0 * gv * bv * am, tl.where(two, gm, gm * mm + gv * vm))
        to_av = tl.where(product, gv * (bv + bm * bm), tl.where(two, gv, gm * mv + gv * vv))
        to_bm = tl.where(product, gm * am + 2.0 * gv * av * bm, tl.where(kind == SUBTRACT, -gm, gm))
        to_bv = tl.where(product, gv * (av + am * am), gv)
        tl.store(slots_ptr + out, to_am, mask=live)
        tl.store(slots_ptr + S + out, to_av, mask=live)
        tl.store(slots_ptr + E + out, to_bm, mask=two)
        tl.store(slots_ptr + S + E + out, to_bv, mask=two)
        kind, out, begin, end, am, av, bm, bv, mm, mv, vm, vv = instruction_back(
            last - (t + 1) * LANES, (offset >= 0) & (t + 1 < depth),
            entries_ptr, E, slopes_ptr, T, first_ptr, code_ptr, a_ptr, b_ptr, out_ptr,
        )  # fmt: skip
        tl.debug_barrier()  # another thread may read the result in the next instruction


settle_keys(globals())
