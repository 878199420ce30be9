"""Launches the kernels that compute the filters of many convolutions: one launch forward, and one backward.

Sizes of layers are in a table, which is written once for each list of shapes. Addresses of weights stay the same from
step to step, and those of gradients mostly do. So lists of addresses are kept, too. While a CUDA graph is captured,
nothing may be uploaded. Tensors with unknown addresses are then copied into one tensor, in few launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from kalmannorm._ops.filters.definition import EPS, Computation
from kalmannorm._ops.filters.triton_filters import filters_backward_kernel, filters_kernel, rows_at_once
from kalmannorm._ops.triton_launching import ALIGNED, Ready, ready

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
KEPT = 64
"""Number of tables and of lists of addresses that are kept, the most recently written."""

Like = tuple[tuple[torch.Size, tuple[int, ...]], ...]
"""For each layer: the shape and the strides of its weight."""


class Layers(NamedTuple):
    """A list of layers as the kernels see it."""

    like: Like
    table: Tensor
    work: Tensor  # for each program: its layer, and its block of rows
    starts: tuple[int, ...]  # of each layer in a tensor that contains all of them
    size: int  # of that tensor
    rows: int


class Uploads:
    """Tensors of integers on a device, by what they contain. Those that a CUDA graph reads are kept for ever."""

    def __init__(self) -> None:
        self.known: dict[Any, tuple[int, Any]] = {}  # with the stream of the copy, in whose order it can be read
        self.captured: dict[Any, Any] = {}

    def find(self, key: Any, device: torch.device, make: Callable[[], Any]) -> Any:
        """None if it is not there and cannot be written now."""
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
        before, made = self.known.get(key, (0, None))
        if capturing:  # nothing that was uploaded before is still on its way
            if made is not None:
                self.captured[key] = made
            return made
        if made is None or before != stream:
            with torch.inference_mode(False):  # it is also used in training
                made = make()
            for old in list(self.known)[: max(len(self.known) + 1 - KEPT, 0)]:
                self.known.pop(old, None)
            self.known[key] = stream, made
        return made


_UPLOADS = Uploads()


def _uploaded(integers: Tensor, device: torch.device) -> Tensor:
    """In stream order. Nobody waits for the device."""
    return integers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else integers


def layers_of(weights: Sequence[Tensor]) -> Layers | None:
    """The table of these weights. None if kernels cannot read them.

    None also while a CUDA graph is captured, if the table was not written before.
    """
    first = weights[0]
    like = tuple([(weight.shape, weight.stride()) for weight in weights])
    step = ALIGNED // first.element_size()
    key = "layers", like, step, first.device
    found = _UPLOADS.find(key, first.device, lambda: _written(like, step, first.device))
    return found if isinstance(found, Layers) else None


def _written(like: Like, step: int, device: torch.device) -> Layers | bool:
    """False if a weight has gaps, or does not keep its output channels apart."""
    starts, lines, blocks, start, rows = list[int](), list[tuple[int, ...]](), list[int](), 0, 0
    for shape, strides in like:
        count, values = shape[0], shape.numel()
        if not 0 < values < 2**31 or not _in_rows(shape, strides):
            return False
        length = values // count
        starts.append(start)
        lines.append((start, rows, count, length))
        blocks.append(-(-count // rows_at_once(length)))
        start += -(-values // step) * step
        rows += count
    numbers = torch.tensor(blocks, device="cpu")
    layer = torch.arange(len(blocks), device="cpu").repeat_interleave(numbers)
    block = torch.arange(len(layer), device="cpu") - (numbers.cumsum(0) - numbers)[layer]
    table = torch.tensor(lines, dtype=torch.int64, device="cpu")
    work = torch.stack([layer, block], 1).to(torch.int32)
    return Layers(like, _uploaded(table, device), _uploaded(work, device), tuple(starts), start, rows)


def _in_rows(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the values of each output channel are adjacent, in any order, and the channels follow one another."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides[1:], shape[1:], strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return shape[0] == 1 or strides[0] == expected


def _divided(memory: Tensor, layers: Layers) -> list[Tensor]:
    """The tensors in memory that contains all of them."""
    return [memory.as_strided(*each, start) for each, start in zip(layers.like, layers.starts, strict=True)]


def _source(
    tensors: Sequence[Tensor | None], layers: Layers, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """One tensor with all values, or a list of addresses. The address of a missing tensor is 0."""
    addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)

    def made() -> Tensor:
        return _uploaded(torch.tensor(addresses, dtype=torch.int64, device="cpu"), device)

    listed = _UPLOADS.find(("addresses", addresses, device), device, made)
    if listed is not None:
        return None, listed
    memory = torch.zeros(layers.size, dtype=dtype, device=device)
    pairs = zip(_divided(memory, layers), tensors, strict=True)
    there = [(place, tensor) for place, tensor in pairs if tensor is not None]
    torch._foreach_copy_([place for place, _ in there], [tensor for _, tensor in there])
    return memory, None


def _options(dtype: torch.dtype, computation: Computation, **gathered: bool) -> dict[str, Any]:
    kind = {"STANDARDIZE": computation != "centred", "SCALE": computation == "scaled"}
    return {"TYPE": TYPES[dtype], **gathered, **kind, "num_warps": 4}


def forward(weights: Sequence[Tensor], layers: Layers, computation: Computation) -> tuple[list[Tensor], Tensor]:
    """The filters, and the mean and the scale of every row (2, rows)."""
    first = weights[0]
    gathered, addresses = _source(weights, layers, first.device, first.dtype)
    memory = torch.empty(layers.size, dtype=first.dtype, device=first.device)
    statistics = torch.empty((2, layers.rows), dtype=torch.float32, device=first.device)
    options = _options(first.dtype, computation, GATHERED=addresses is None)
    ready(filters_kernel, (layers.work.shape[0],), first.device, **options)(
        gathered, addresses, memory, statistics, layers.table, layers.work, layers.rows, EPS
    )
    return _divided(memory, layers), statistics


def backward(
    grads: Sequence[Tensor | None],
    layers: Layers,
    computation: Computation,
    weights: Sequence[Tensor] | None = None,
    statistics: Tensor | None = None,
) -> list[Tensor | None]:
    """Gradients of the weights, from those of the filters. Centred ones need nothing else."""
    first = next(grad for grad in grads if grad is not None)
    device, dtype = first.device, first.dtype
    fitting = [None if grad is None else _fitted(grad, each) for grad, each in zip(grads, layers.like, strict=True)]
    arrived, grad_addresses = _source(fitting, layers, device, dtype)
    gathered, addresses = (None, None) if weights is None else _source(weights, layers, device, dtype)
    memory = torch.empty(layers.size, dtype=dtype, device=device)
    options = _options(dtype, computation, GRADS_GATHERED=grad_addresses is None, GATHERED=addresses is None)
    ready(filters_backward_kernel, (layers.work.shape[0],), device, **options)(
        arrived, grad_addresses, gathered, addresses, memory, memory if statistics is None else statistics,
        layers.table, layers.work, layers.rows,
    )  # fmt: skip
    made = _divided(memory, layers)
    return [None if grad is None else change for grad, change in zip(grads, made, strict=True)]


def launches_of_step(
    dtype: torch.dtype, computation: Computation, device: torch.device, *, gradients: bool
) -> Iterator[tuple[Ready, tuple[Any, ...]]]:
    """The launches of a forward, and of its backward if there are `gradients`, on tensors without memory.

    Their kernels are those of any layers with weights of this dtype, outside of the capture of a CUDA graph.
    """

    def like(dtype: torch.dtype) -> Tensor:
        return torch.empty(1, dtype=dtype, device="meta")

    memory, statistics, addresses, work = map(like, (dtype, torch.float32, torch.int64, torch.int32))
    table, centred = addresses, computation == "centred"
    options = _options(dtype, computation, GATHERED=False)
    yield ready(filters_kernel, (1,), device, **options), (None, addresses, memory, statistics, table, work, 1, EPS)
    if gradients:
        options = _options(dtype, computation, GRADS_GATHERED=False, GATHERED=centred)
        known = (None, None, memory, memory) if centred else (None, addresses, memory, statistics)
        yield ready(filters_backward_kernel, (1,), device, **options), (None, addresses, *known, table, work, 1)


def _fitted(grad: Tensor, like: tuple[torch.Size, tuple[int, ...]]) -> Tensor:
    """With the strides of the weight, so that both have the same order in memory."""
    shape, strides = like
    if grad.stride() == strides:
        return grad
    different = [size for size, own, given in zip(shape, grad.stride(), strides, strict=True) if own != given]
    if max(different) == 1:  # such a dimension may have any stride
        return grad
    return grad.new_empty_strided(shape, strides).copy_(grad)
