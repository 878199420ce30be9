"""Bundles with Triton kernels, with the arguments and results of `aten.py`; float32, on CUDA devices.

The number of launches does not depend on the number of layers. Forward: a concatenation, the leaves, a tape and one
launch per kind of tile for each stage, and the rows. Backward: the incoming gradients, two launches per kind of tile
and a tape for each stage, and the leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from kalmannorm._filter import GAIN_MARGIN
from kalmannorm._ops.grid import blocks_of
from kalmannorm._ops.propagate import triton_elementwise as moments
from kalmannorm._ops.propagate import triton_layers as layers
from kalmannorm._ops.propagate import triton_leaves as leaves_of
from kalmannorm._ops.propagate.aten import Tensors, Values, affine_gradients
from kalmannorm._ops.propagate.bundle import GAIN, PRIOR_MEAN, PRIOR_VAR, ROWS, Bundle
from kalmannorm._ops.propagate.triton_tables import LANES, Bound, Tables, Tape, bind, lies_together, tables_of
from kalmannorm._ops.triton_launching import At, LaunchList, ready
from kalmannorm.moments.activations import DENSITY
from kalmannorm.moments.closed import nodes_and_weights

BLOCK = 128
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
KEPT = 4
"""Number of tables that are kept, one per set of weights, the most recently written."""


def applies(bundle: Bundle, tensors: Tensors) -> bool:
    """Whether the kernels can read these tensors."""
    of_layers = [layer for stage in bundle.stages for layer in stage.layers]
    read = [tensors[layer.weight] for layer in of_layers]
    read += [tensors[layer.bias] for layer in of_layers if layer.bias is not None]
    same = all(tensor.dtype == read[0].dtype and lies_together(tensor) for tensor in read)
    return same and all(tensor.dtype in TYPES for tensor in tensors)


def _tables(bundle: Bundle, device: torch.device) -> Tables:
    if ("triton", device) not in bundle.tables:
        with torch.inference_mode(False):  # the kept tensors are also used in training
            bundle.tables["triton", device] = tables_of(bundle, device)
    tables: Tables = bundle.tables["triton", device]
    return tables


def _bound(bundle: Bundle, tables: Tables, tensors: Tensors, wanted: Sequence[bool]) -> Bound:
    """The table of layers. It is written again if the address or the strides of a weight are new."""
    weights = [tensors[layer.weight] for layer in tables.layers]
    biases = [tensors[layer.bias] for layer in tables.layers if layer.bias is not None]
    wants = [wanted[layer.weight] for layer in tables.layers]
    key = *map(Tensor.data_ptr, weights), *map(Tensor.stride, weights), *map(Tensor.data_ptr, biases), *wants
    bound = tables.bound.get(key)
    if bound is None:
        with torch.inference_mode(False):
            bound = bind(bundle, tables, tensors, wanted)
        for other in [other for other, old in tables.bound.items() if not old.captured][: 1 - KEPT]:
            tables.bound.pop(other, None)
        tables.bound[key] = bound
    if bound.table.is_cuda and torch.cuda.is_current_stream_capturing():
        bound.captured = True  # the CUDA graph reads this table as long as it lives
    return bound


def _constant(bundle: Bundle, value: float, size: int, device: torch.device) -> Tensor:
    """Zeros or ones. They are created once and kept, because a captured graph reads them."""
    key = value, size, device
    if key not in bundle.tables:
        with torch.inference_mode(False):
            bundle.tables[key] = torch.full((size,), value, device=device)
    constant: Tensor = bundle.tables[key]
    return constant


def _weights(bundle: Bundle, device: torch.device) -> Tensor:
    if ("nodes", device) not in bundle.tables:
        with torch.inference_mode(False):
            bundle.tables["nodes", device] = nodes_and_weights(DENSITY, torch.zeros(()))[1].flatten().to(device)
    weights: Tensor = bundle.tables["nodes", device]
    return weights


def _small(bundle: Bundle) -> list[tuple[int | None, int, float]]:
    """All small tensors in the order of `flat`: β and given means, γ and given variances, logits of gains.

    Each is a position in the list of tensors. If it is None, the last two numbers are a size and a constant.
    """
    if "small" not in bundle.tables:
        listed = [(each.bias, each.size, 0.0) for each in bundle.beliefs]
        listed += [(each.mean, each.size, 0.0) for each in bundle.given]
        listed += [(each.weight, each.size, 1.0) for each in bundle.beliefs]
        listed += [(each.var, each.size, 0.0) for each in bundle.given]
        bundle.tables["small"] = listed + [(norm.logit, norm.logits, 0.0) for norm in bundle.norms]
    small: list[tuple[int | None, int, float]] = bundle.tables["small"]
    return small


def _read(bundle: Bundle, tensors: Tensors, places: list[tuple[int | None, int, float]], device: torch.device) -> Any:
    return [
        _constant(bundle, missing, size, device) if place is None else tensors[place] for place, size, missing in places
    ]


class _Room:
    """Divides one tensor of float32 values: `take` returns the offset of the next `size` values, in 16 bytes."""

    def __init__(self) -> None:
        self.size = 0

    def take(self, size: int) -> int:
        start = self.size
        self.size += -(-size // 4) * 4
        return start


class _Forward(NamedTuple):
    """The launches of a forward. Their memory: one tensor for all that they compute, and the small tensors."""

    launches: LaunchList
    size: int
    gains: int
    sums: int
    slopes: list[int]


class _Backward(NamedTuple):
    """The launches of a backward. Their memory: that of the forward, its own, gradients of weights and of rows."""

    launches: LaunchList
    size: int
    gathered: int
    small: int


def forward(bundle: Bundle, tensors: Tensors, dtype: torch.dtype, device: torch.device, gradients: bool) -> Values:
    tables = _tables(bundle, device)
    bound = _bound(bundle, tables, tensors, [tensor.requires_grad for tensor in tensors])
    how = _forward(bundle, tables, bound, _type(tables, tensors), gradients)
    flat: Tensor = _flatten_dense_tensors(_read(bundle, tensors, _small(bundle), device))  # type: ignore[no-untyped-call]
    memory = torch.empty(how.size, device=device, dtype=torch.float32)
    how.launches.run(memory, flat)
    entries = memory[: 2 * bundle.entries].view(2, -1)
    return Values(entries, memory[how.gains : how.gains + bundle.channels], [(memory, flat)])


def _forward(bundle: Bundle, tables: Tables, bound: Bound, type_of: Any, gradients: bool) -> _Forward:
    key = "forward", gradients, type_of
    if key not in bound.launches:
        launches, room, device = LaunchList(), _Room(), tables.numbers.device
        E, leaves, channels = bundle.entries, bundle.leaves, bundle.channels
        entries, gains, sums = At(0, room.take(2 * E)), At(0, room.take(channels)), At(0, room.take(tables.sums))
        launches.add(
            ready(leaves_of.leaves_kernel, (blocks_of(max(leaves, channels), BLOCK),), device, BLOCK=BLOCK),
            At(1), entries, gains, tables.logits, E, leaves, bundle.believed, channels, GAIN_MARGIN,
        )  # fmt: skip
        slopes = list[int]()
        for tapes, stage in zip(tables.tapes, bound.stages, strict=True):
            for tape in tapes:
                T = tape.instructions[0].numel()
                if gradients:
                    slopes.append(room.take(4 * T))
                launches.add(
                    ready(moments.tape_kernel, (tape.depths.numel(),), device, SLOPES=gradients, **_options(tape)),
                    entries, E, At(0, slopes[-1]) if gradients else None, T, *tape.instructions, tape.offsets,
                    tape.depths, tables.numbers, _weights(bundle, device),
                )  # fmt: skip
            for tile, grouped, work in stage.forward:
                options = tile._asdict() | {"TYPE": type_of, "GROUPED": grouped}
                launches.add(
                    ready(layers.layers_kernel, (work.shape[0],), device, **options),
                    entries, sums, bound.table, work, tables.index, tables.geometry, E,
                )  # fmt: skip
        bound.launches[key] = _Forward(launches, room.size, gains.offset, sums.offset, slopes)
    made: _Forward = bound.launches[key]
    return made


def _options(tape: Tape) -> dict[str, Any]:
    return {
        "LANES": LANES,
        "HAS_PIECEWISE": tape.piecewise,
        "HAS_SMOOTH": tape.smooth,
        "NODES": 16 * DENSITY + 1,
        "DENSITY": DENSITY,
        "num_warps": 2,
    }


def _type(tables: Tables, tensors: Tensors) -> Any:
    return TYPES[tensors[tables.layers[0].weight].dtype] if tables.layers else tl.float32


def rows(bundle: Bundle, tensors: Tensors, values: Values) -> Tensor:
    """The rows of all norms, (5, channels)."""
    device = values.entries.device
    if "affine" not in bundle.tables:
        weights = [(norm.weight, norm.channels, 1.0) for norm in bundle.norms]
        bundle.tables["affine"] = weights + [(norm.bias, norm.channels, 0.0) for norm in bundle.norms]
    priors = values.entries.index_select(1, _tables(bundle, device).priors)
    affine = _read(bundle, tensors, bundle.tables["affine"], device)
    return torch.cat([*affine, priors.view(-1), values.gains]).view(ROWS, -1)


def results(bundle: Bundle, values: Values) -> list[tuple[Tensor, Tensor]]:
    """Means and variances of the other results, each (1, C)."""
    sizes = [result.numel() for result in bundle.results[len(bundle.norms) :]]
    if not sizes:
        return []
    tables = _tables(bundle, values.entries.device)
    means, variances = values.entries.index_select(1, tables.results).split(1)  # type: ignore[no-untyped-call]
    return list(zip(means.split(sizes, 1), variances.split(sizes, 1), strict=True))


def backward(
    bundle: Bundle,
    tensors: Tensors,
    values: Values,
    grad_rows: Tensor | None,
    grad_results: Sequence[tuple[Tensor | None, Tensor | None]],
    asked: Sequence[bool],
) -> list[Tensor | None]:
    ((memory, flat),) = values.saved
    assert memory is not None and flat is not None
    device, E = memory.device, bundle.entries
    tables = _tables(bundle, device)
    bound = _bound(bundle, tables, tensors, [tensor.requires_grad for tensor in tensors])
    how = _backward(bundle, tables, bound, _type(tables, tensors), grad_rows is not None)
    own = torch.empty(how.size, device=device, dtype=torch.float32)
    channels, others, S = bundle.channels, bundle.results[len(bundle.norms) :], tables.slots
    arrived = own.as_strided((2, channels), (S, 1), 2 * E)
    if grad_rows is None:
        arrived.zero_()
    else:
        arrived.copy_(grad_rows[PRIOR_MEAN : PRIOR_VAR + 1])
    for row in range(2 if others else 0):
        parts = [
            _constant(bundle, 0.0, result.numel(), device).unsqueeze(0) if (grad := pair[row]) is None else grad
            for result, pair in zip(others, grad_results, strict=True)
        ]
        behind = row * S + 2 * E + channels
        torch.cat(parts, 1, out=own[behind : behind + tables.results.numel()].unsqueeze(0))
    weights = torch.empty(bound.size, device=device, dtype=_dtype(tables, tensors))
    how.launches.run(memory, flat, own, weights, own if grad_rows is None else grad_rows)
    found: list[Tensor | None] = [None] * len(tensors)
    if grad_rows is not None:
        affine_gradients(bundle, tensors, grad_rows, found)
    places = _small(bundle)
    small = own[how.small : how.small + flat.numel()]
    parts = _unflatten_dense_tensors(small, _read(bundle, tensors, places, device))  # type: ignore[no-untyped-call]
    for (place, _, _), part in zip(places, parts, strict=True):
        if place is not None:
            found[place] = part if tensors[place].dtype == torch.float32 else part.to(tensors[place].dtype)
    for layer, start in zip(tables.layers, bound.starts, strict=True):
        weight = tensors[layer.weight]
        if start is not None:
            found[layer.weight] = weights.as_strided(weight.shape, weight.stride(), start)
        if layer.bias is not None:
            start = how.gathered + layer.start
            found[layer.bias] = own[start : start + layer.outputs].to(tensors[layer.bias].dtype)
    return [grad if wanted else None for grad, wanted in zip(found, asked, strict=True)]


def _backward(bundle: Bundle, tables: Tables, bound: Bound, type_of: Any, rows: bool) -> _Backward:
    key = "backward", rows, type_of
    if key not in bound.launches:
        launches, room, device = LaunchList(), _Room(), tables.numbers.device
        E, S, leaves = bundle.entries, tables.slots, bundle.leaves
        kept = _forward(bundle, tables, bound, type_of, True)
        entries, sums, slopes, flat, weights, grad_rows = (
            At(0),
            At(0, kept.sums),
            list(kept.slopes),
            At(1),
            At(3),
            At(4),
        )
        slots, gathered = At(2, room.take(2 * S)), At(2, room.take(2 * E))
        grad_sums = At(2, room.take(tables.sums))
        small = At(2, room.take(sum(size for _, size, _ in _small(bundle))))
        uses = (slots, S, *tables.uses)
        for tapes, stage in zip(reversed(tables.tapes), reversed(bound.stages), strict=True):
            for tile, _, work in stage.forward:
                launches.add(
                    ready(layers.rows_backward_kernel, (work.shape[0],), device, BK=tile.BK, TP=tile.TP),
                    gathered, sums, grad_sums, bound.table, work, tables.geometry, E, *uses,
                )  # fmt: skip
            for tile, depthwise, work in stage.backward:
                options = tile._asdict() | {"TYPE": type_of, "DEPTHWISE": depthwise}
                launches.add(
                    ready(layers.layers_backward_kernel, (work.shape[0],), device, **options),
                    entries, gathered, grad_sums, weights, slots, S, bound.table, work, tables.index, tables.geometry,
                    E,
                )  # fmt: skip
            for tape in reversed(tapes):
                launches.add(
                    ready(moments.tape_backward_kernel, (tape.depths.numel(),), device, LANES=LANES, num_warps=2),
                    entries, E, At(0, slopes.pop()), tape.instructions[0].numel(), *uses, *tape.instructions,
                    tape.offsets, tape.depths,
                )  # fmt: skip
        launches.add(
            ready(leaves_of.leaves_backward_kernel, (blocks_of(leaves, BLOCK),), device, ROWS=rows, BLOCK=BLOCK),
            flat, small, grad_rows if rows else None, tables.affine, *uses, leaves, bundle.believed,
        )  # fmt: skip
        if rows:
            launches.add(
                ready(leaves_of.gains_backward_kernel, (len(bundle.norms),), device, BLOCK=4 * BLOCK),
                flat, small, At(4, GAIN * bundle.channels), tables.gains, 2 * leaves, GAIN_MARGIN,
            )  # fmt: skip
        bound.launches[key] = _Backward(launches, room.size, gathered.offset, small.offset)
    made: _Backward = bound.launches[key]
    return made


def _dtype(tables: Tables, tensors: Tensors) -> torch.dtype:
    return tensors[tables.layers[0].weight].dtype if tables.layers else torch.float32
