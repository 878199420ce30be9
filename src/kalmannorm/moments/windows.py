"""Which taps of a convolution lie inside the image: the geometry behind `convolution`.

Along one axis, tap t connects output position o with input position i if

    ordinary     o stride - padding + t dilation = i
    transposed   o + padding - t dilation        = i stride

Tap t is inside at o if such an i exists with 0 <= i < size. Both rules have the form o a + b + t e = i q.
Output positions with the same inside taps form one *kind*. A 3-tap axis padded by 1 has three kinds: first, middle and
last. The interior of an axis transposed with stride 2 has two kinds, which alternate. A kind is a row of taps (0/1) and
its share of the positions. With several axes, the shares are multiplied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

Size = int | Sequence[int]


class Axis(NamedTuple):
    """One spatial axis of a convolution. `size` is the size of the input. None: the image has no edges."""

    kernel: int
    size: int | None
    stride: int
    before: int
    after: int
    dilation: int
    transposed: bool
    output_padding: int


# A function, because torch.compile cannot trace properties of a named tuple.
def _outputs(axis: Axis) -> int:
    """Number of output positions."""
    assert axis.size is not None
    span, around = axis.dilation * (axis.kernel - 1) + 1, axis.before + axis.after
    if axis.transposed:
        return (axis.size - 1) * axis.stride - around + span + axis.output_padding
    return (axis.size + around - span) // axis.stride + 1


def _per_axis(name: str, value: Size, dims: int, least: int) -> tuple[int, ...]:
    given = (value,) * dims if isinstance(value, int) else value
    values = tuple(given) if isinstance(given, (tuple, list)) else ()
    if len(values) != dims or any(not isinstance(each, int) for each in values):
        raise ValueError(f"convolution: `{name}` must be one int or {dims} (one for each axis), got {value!r}")
    if any(each < least for each in values):
        raise ValueError(f"convolution: `{name}` must be at least {least}, got {value!r}")
    # Under torch.compile a size may be symbolic. The length of a range is a plain int, so the geometry is constant.
    return tuple(len(range(each)) for each in values)


def axes_of(
    kernel_size: Size,
    input_size: Size | None,
    *,
    stride: Size,
    padding: Size | str,
    dilation: Size,
    transposed: bool,
    output_padding: Size,
) -> tuple[Axis, ...]:
    """The axes of a convolution from its options, which are those of `torch.nn.Conv2d`. Options are checked."""
    dims = 1 if isinstance(kernel_size, int) else len(kernel_size)
    kernels = _per_axis("kernel_size", kernel_size, dims, 1)
    strides = _per_axis("stride", stride, dims, 1)
    dilations = _per_axis("dilation", dilation, dims, 1)
    extras = _per_axis("output_padding", output_padding, dims, 0)
    if any(extras) and not transposed:
        raise ValueError(f"convolution: `output_padding` is for transposed=True, got {output_padding!r} without it")
    if any(extra >= max(s, d) for extra, s, d in zip(extras, strides, dilations, strict=True)):
        raise ValueError(
            f"convolution: `output_padding` must be smaller than stride or dilation, got {output_padding!r} "
            f"with stride {stride!r} and dilation {dilation!r}"
        )
    sizes: tuple[int | None, ...] = (None,) * dims
    if input_size is not None:
        given = (input_size,) * dims if isinstance(input_size, int) else tuple(input_size)
        if len(given) != dims:
            raise ValueError(
                f"convolution: `input_size` must hold the {dims} spatial sizes of the input "
                f"(without batch and channels), got {input_size!r}"
            )
        sizes = _per_axis("input_size", given, dims, 1)

    if isinstance(padding, str):
        if padding not in ("same", "valid"):
            raise ValueError(f"convolution: `padding` must be 'same', 'valid' or ints, got {padding!r}")
        if transposed:
            raise ValueError(f"convolution: a transposed convolution takes `padding` as ints, got {padding!r}")
        if padding == "same" and any(s != 1 for s in strides):
            raise ValueError(f"convolution: padding='same' needs stride 1, got {stride!r}")
        around = [d * (k - 1) if padding == "same" else 0 for k, d in zip(kernels, dilations, strict=True)]
        befores = tuple(total // 2 for total in around)  # an odd total pads one more after, as in torch
        afters = tuple(total - total // 2 for total in around)
    else:
        befores = afters = _per_axis("padding", padding, dims, 0)

    axes = tuple(
        Axis(k, n, s, b, a, d, transposed, extra)
        for k, n, s, b, a, d, extra in zip(kernels, sizes, strides, befores, afters, dilations, extras, strict=True)
    )
    if any(axis.size is not None and _outputs(axis) < 1 for axis in axes):
        raise ValueError(
            f"convolution: `input_size` {input_size!r} leaves no output with kernel_size {kernels}, padding "
            f"{padding!r} and dilation {dilation!r}; give the size of the map that enters this layer"
        )
    return axes


def output_size(
    input_size: Size,
    kernel_size: Size,
    *,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    transposed: bool = False,
    output_padding: Size = 0,
) -> tuple[int, ...]:
    """The spatial size after a convolution of `input_size`, or after a pooling with the same arguments."""
    if isinstance(kernel_size, int) and not isinstance(input_size, int):
        kernel_size = (kernel_size,) * len(input_size)
    axes = axes_of(
        kernel_size,
        input_size,
        stride=stride,
        padding=padding,
        dilation=dilation,
        transposed=transposed,
        output_padding=output_padding,
    )
    return tuple(_outputs(axis) for axis in axes)


@cache
def kinds(axis: Axis) -> tuple[tuple[tuple[float, ...], ...], tuple[float, ...]]:
    """The row of taps and the share of positions of each kind.

    If the whole window of a position lies inside the image, its kind repeats with period 1, or with the stride of a
    transposed convolution. Such positions are counted without visiting each, so the cost does not grow with the size.
    """
    if axis.transposed:
        a, b, e, q = 1, axis.before, -axis.dilation, axis.stride
    else:
        a, b, e, q = axis.stride, -axis.before, axis.dilation, 1
    low, high = b + min(0, (axis.kernel - 1) * e), b + max(0, (axis.kernel - 1) * e)

    if axis.size is None:
        first, last, outputs = 0, q - 1, q
    else:
        outputs = _outputs(axis)
        first = min(max(-(low // a), 0), outputs)
        last = min((axis.size - 1) * q - high, (outputs - 1) * a) // a

    def row(position: int) -> tuple[float, ...]:
        met = (divmod(position * a + b + tap * e, q) for tap in range(axis.kernel))
        return tuple(float(rest == 0 and (axis.size is None or 0 <= i < axis.size)) for i, rest in met)

    count: Counter[tuple[float, ...]] = Counter()
    for position in (*range(first), *range(max(first, last + 1), outputs)):
        count[row(position)] += 1
    for position in range(first, min(first + q, last + 1)):
        count[row(position)] += (last - position) // q + 1
    assert count.total() == outputs
    return tuple(count), tuple(number / outputs for number in count.values())


_tensors: dict[tuple[tuple[Axis, ...], torch.dtype, torch.device], tuple[Tensor, ...]] = {}


def windows(axes: tuple[Axis, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """For each axis its rows of taps (kinds, kernel). Then, over all axes, the shares of kinds and of taps.

    The shares have one dimension per axis: (kinds of axis 1, kinds of axis 2, ...), (taps of axis 1, ...).
    """
    # A mode that makes fake tensors (export, shape propagation) must neither fill nor read the cache.
    faked = type(torch.empty(0)) is not Tensor
    key = (axes, dtype, device)
    if not faked and key in _tensors:
        return _tensors[key]
    # An inference tensor in the cache would break the next training step.
    with torch.inference_mode(False):
        rows = [torch.tensor(kinds(axis)[0], dtype=dtype, device=device) for axis in axes]
        of_kinds = of_taps = torch.ones((), dtype=dtype, device=device)
        for axis, row in zip(axes, rows, strict=True):
            share = torch.tensor(kinds(axis)[1], dtype=dtype, device=device)
            of_kinds = of_kinds.unsqueeze(-1) * share
            # No matrix product here: autocast would cast it.
            of_taps = of_taps.unsqueeze(-1) * (share.unsqueeze(1) * row).sum(0)
    built = (*rows, of_kinds, of_taps)
    if not faked:
        _tensors[key] = built
    return built


# Under torch.compile the tensors become constants of the graph, on the right device. Without this mark every step would
# copy them from the host, which is not possible in a CUDA graph. torch.compiler.assume_constant_result sets the same
# mark, but it imports the whole compiler and adds two seconds to `import kalmannorm`.
windows._dynamo_marked_constant = True  # type: ignore[attr-defined]
