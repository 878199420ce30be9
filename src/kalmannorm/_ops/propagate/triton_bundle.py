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

from kalmannorm._filter import GAIN_MARGIN
from kalmannorm._ops.grid import blocks_of
from kalmannorm._ops.propagate import triton_elementwise as moments
from kalmannorm._ops.propagate import triton_layers as layers
from kalmannorm._ops.propagate import triton_leaves as leaves_of
from kalmannorm._ops.propagate.aten import Made, Tensors
from kalmannorm._ops.propagate.bundle import GAIN, PRIOR_MEAN, PRIOR_VAR, ROWS, Bundle
from kalmannorm._ops.propagate.triton_tables import (
    LANES,
    Bound,
    Place,
    Room,
    Small,
    Tables,
    Tape,
    bind,
    lies_together,
    places_of,
    starts_of,
    strides_in,
    tables_of,
)
from kalmannorm._ops.triton_launching import ALIGNED, At, LaunchList, ready
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


class _Filters(NamedTuple):
    """The computed filters of a forward: the memory from the first one on, and how many bytes from there each begins.

    They are computed together into one memory. So they have new addresses in every forward, but the same `starts`.
    """

    memory: list[Tensor]  # none if there are no filters
    starts: tuple[int, ...]


def _filters(bundle: Bundle, tables: Tables, tensors: Tensors) -> _Filters:
    if not bundle.filters:
        return _Filters([], ())
    found = [tensors[place] for place in bundle.filters]
    addresses = [*map(Tensor.data_ptr, found)]
    first = addresses[0]
    starts = tuple([address - first for address in addresses])
    if first % ALIGNED == 0 and (starts in tables.together or _in_one_memory(found)):
        tables.together.add(starts)
        return _Filters([found[0].detach().as_strided((1,), (1,))], starts)
    memory, starts = _gathered(found)  # computed one by one, or for a part of the model
    tables.together.add(starts)
    return _Filters([memory], starts)


def _in_one_memory(tensors: Sequence[Tensor]) -> bool:
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


def _gathered(tensors: Sequence[Tensor]) -> tuple[Tensor, tuple[int, ...]]:
    """Copies of these tensors in one memory, and how many bytes from its begin each begins."""
    step = ALIGNED // tensors[0].element_size()
    starts, size = list[int](), 0
    for tensor in tensors:
        starts.append(size)
        size += -(-tensor.numel() // step) * step
    memory = torch.empty(size, dtype=tensors[0].dtype, device=tensors[0].device)
    there = [tensor.detach() for tensor in tensors]
    places = [memory.as_strided(each.shape, each.stride(), start) for each, start in zip(there, starts, strict=True)]
    torch._foreach_copy_(places, there)
    return memory, tuple(start * memory.element_size() for start in starts)


def prepare(bundle: Bundle, tensors: Tensors, wanted: Sequence[bool]) -> Bound:
    """The tables for these tensors. They are written again if an address or a stride is new.

    `wanted` says which tensors need a gradient.
    """
    starts = _filters(bundle, _tables(bundle, tensors[0].device), tensors).starts
    return _bound(bundle, tensors, wanted, starts)


def _bound(bundle: Bundle, tensors: Tensors, wanted: Sequence[bool], starts: tuple[int, ...]) -> Bound:
    tables = _tables(bundle, tensors[0].device)
    moving = set(bundle.filters)
    weights = [tensors[layer.weight] for layer in tables.layers]
    staying = [tensors[layer.weight] for layer in tables.layers if layer.weight not in moving]
    biases = [tensors[layer.bias] for layer in tables.layers if layer.bias is not None]
    small = [_zeros(bundle, tables) if each.given else _of(bundle, tables, tensors, each) for each in tables.small]
    addresses = [*map(Tensor.data_ptr, small)] if {tensor.dtype for tensor in small} <= {torch.float32} else []
    key = (
        *map(Tensor.data_ptr, staying), *map(Tensor.stride, weights), *map(Tensor.data_ptr, biases), *wanted,
        *addresses, *starts,
    )  # fmt: skip
    bound = tables.bound.get(key)
    if bound is None:
        with torch.inference_mode(False):
            listed = torch.tensor(addresses, dtype=torch.int64).to(tables.numbers.device) if addresses else None
            bound = bind(bundle, tables, tensors, wanted, starts, listed)
        for other in [other for other, old in tables.bound.items() if not old.captured][: 1 - KEPT]:
            tables.bound.pop(other, None)
        tables.bound[key] = bound
    return bound


def _of(bundle: Bundle, tables: Tables, tensors: Tensors, each: Small) -> Tensor:
    if each.place is not None:
        return tensors[each.place]
    return _constant(bundle, each.missing, each.size, tables.numbers.device)


def _zeros(bundle: Bundle, tables: Tables) -> Tensor:
    return _constant(bundle, 0.0, 1, tables.numbers.device)


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


class _Forward(NamedTuple):
    """The launches of a forward, and the places of its results in the memory that they fill."""

    launches: LaunchList
    size: int
    sums: int
    flat: int
    slopes: list[int]
    rows: Tensor  # places of the rows of all norms, (5, channels)
    results: Tensor  # places of the other results: means, then variances


def forward(
    bundle: Bundle, tensors: Tensors, dtype: torch.dtype, device: torch.device, gradients: bool, known: Any = None
) -> Made:
    """`known` is the `state` of an earlier forward with the same tensors, or what `prepare` returned for them."""
    tables = _tables(bundle, device)
    filters = _filters(bundle, tables, tensors)
    bound: Bound | None = known
    if bound is None or bound.starts != filters.starts:
        bound = _bound(bundle, tensors, [tensor.requires_grad for tensor in tensors], filters.starts)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        bound.captured = True  # the CUDA graph reads this table as long as it lives
        bundle.tables.setdefault("captured", {})[id(bound)] = bound
    how = _forward(bundle, tables, bound, _type(tables, tensors), gradients)
    memory = torch.empty(how.size, device=device, dtype=torch.float32)
    start = how.flat
    for each in tables.small if bundle.given or bound.small is None else ():
        if each.given or bound.small is None:
            memory[start : start + each.size] = _of(bundle, tables, tensors, each).view(-1)
        start += each.size
    how.launches.run(memory, *filters.memory)
    rows = memory.index_select(0, how.rows).view(ROWS, -1)
    others = bundle.results[len(bundle.norms) :]
    if not others:
        return Made(rows, [], [memory, *filters.memory], bound)
    sizes = [result.numel() for result in others]
    parts = memory.index_select(0, how.results).unsqueeze(0).split_with_sizes(sizes + sizes, 1)
    pairs = list(zip(parts[: len(others)], parts[len(others) :], strict=True))
    return Made(rows, pairs, [memory, *filters.memory], bound)


def _forward(bundle: Bundle, tables: Tables, bound: Bound, type_of: Any, gradients: bool) -> _Forward:
    key = "forward", gradients, type_of
    if key not in bound.launches:
        launches, room, device = LaunchList(), Room(), tables.numbers.device
        E, leaves, channels = bundle.entries, bundle.leaves, bundle.channels
        entries, gains, sums = At(0, room.take(2 * E)), At(0, room.take(channels)), At(0, room.take(tables.sums))
        values = tables.owner.numel()
        flat = At(0, room.take(values))
        filters = At(1) if bundle.filters else At(0)
        if bound.small is not None:
            launches.add(
                ready(leaves_of.collect_kernel, (blocks_of(values, BLOCK),), device, BLOCK=BLOCK),
                flat, bound.small, tables.owner, tables.offset, values,
            )  # fmt: skip
        launches.add(
            ready(leaves_of.leaves_kernel, (blocks_of(max(leaves, channels), BLOCK),), device, BLOCK=BLOCK),
            flat, entries, gains, tables.logits, E, leaves, bundle.believed, channels, GAIN_MARGIN,
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
                    entries, sums, filters, bound.table, work, tables.index, tables.geometry, E,
                )  # fmt: skip
        with torch.inference_mode(False):
            affine = flat.offset + values - 2 * channels + torch.arange(2 * channels, device=device)
            gain = gains.offset + torch.arange(channels, device=device)
            rows = torch.cat([affine, tables.priors, E + tables.priors, gain])
            results = torch.cat([tables.results, E + tables.results])
        bound.launches[key] = _Forward(launches, room.size, sums.offset, flat.offset, slopes, rows, results)
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


def backward(
    bundle: Bundle,
    tensors: Tensors,
    saved: Sequence[Tensor],
    state: Any,
    grad_rows: Tensor | None,
    grad_results: Sequence[tuple[Tensor | None, Tensor | None]],
    asked: Sequence[bool],
) -> list[Tensor | None]:
    bound: Bound = state
    filled = fill_gradients(bundle, tensors, saved, state, grad_rows, grad_results)
    pairs = zip(bound.gradients.of(filled, asked), tensors, strict=True)
    return [grad if grad is None or grad.dtype is tensor.dtype else grad.to(tensor.dtype) for grad, tensor in pairs]


def fill_gradients(
    bundle: Bundle,
    tensors: Tensors,
    saved: Sequence[Tensor],
    state: Any,
    grad_rows: Tensor | None,
    grad_results: Sequence[tuple[Tensor | None, Tensor | None]],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The tensors that have the gradients: see `Place`."""
    (memory, *filters), bound = saved, state
    device, E = memory.device, bundle.entries
    tables = _tables(bundle, device)
    launches = _backward(bundle, tables, bound, _type(tables, tensors), grad_rows is not None)
    own = torch.empty(tables.own.size, device=device, dtype=torch.float32)
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
    launches.run(memory, own, weights, own if grad_rows is None else grad_rows, *filters)
    return weights, own, grad_rows


def launches_of_step(bundle: Bundle, tensors: Tensors) -> list[tuple[LaunchList, list[torch.dtype]]]:
    """The launches of a forward with gradients and of its backward, and the dtypes of the memory that each gets."""
    tables = _tables(bundle, tensors[0].device)
    bound = prepare(bundle, tensors, [tensor.requires_grad for tensor in tensors])
    type_of, dtype = _type(tables, tensors), _dtype(tables, tensors)
    filters = [dtype] if bundle.filters else []
    backward = [torch.float32, torch.float32, dtype, torch.float32, *filters]
    return [
        (_forward(bundle, tables, bound, type_of, True).launches, [torch.float32, *filters]),
        (_backward(bundle, tables, bound, type_of, True), backward),
    ]


def sizes_of_gradients(
    bundle: Bundle, tensors: Tensors, wanted: Sequence[bool], device: torch.device
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of the tensors that `fill_gradients` returns."""
    tables = _tables(bundle, device)
    size = starts_of(tables, tensors, wanted)[1]
    own, rows = ((tables.own.size,), torch.float32), ((ROWS, bundle.channels), torch.float32)
    return [((size,), _dtype(tables, tensors)), own, rows]


def gradients_in(
    filled: Sequence[Tensor], bundle: Bundle, tensors: Tensors, wanted: Sequence[bool], device: torch.device
) -> list[Tensor | None]:
    """The gradient of each tensor, from the tensors that `fill_gradients` returned."""
    places = places_of(bundle, _tables(bundle, device), tensors, wanted)
    return [
        None if place is None else _gradient(filled, place, tensor)
        for place, tensor in zip(places, tensors, strict=True)
    ]


def _gradient(filled: Sequence[Tensor], place: Place, tensor: Tensor) -> Tensor:
    return filled[place.which].as_strided(tensor.shape, strides_in(tensor, place), place.start).to(tensor.dtype)


def _backward(bundle: Bundle, tables: Tables, bound: Bound, type_of: Any, rows: bool) -> LaunchList:
    """Its memory: that of the forward, its own, gradients of weights, gradients of rows, and filters if there are."""
    key = "backward", rows, type_of
    if key not in bound.launches:
        launches, device = LaunchList(), tables.numbers.device
        E, S, leaves = bundle.entries, tables.slots, bundle.leaves
        kept = _forward(bundle, tables, bound, type_of, True)
        entries, sums, flat, slopes = At(0), At(0, kept.sums), At(0, kept.flat), list(kept.slopes)
        slots, gathered, grad_sums, small = (At(1, start) for start in tables.own[:4])
        weights, grad_rows, filters = At(2), At(3), At(4) if bundle.filters else At(0)
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
                    entries, gathered, grad_sums, weights, slots, S, filters, bound.table, work, tables.index,
                    tables.geometry, E,
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
                flat, small, At(3, GAIN * bundle.channels), tables.gains, 2 * leaves, GAIN_MARGIN,
            )  # fmt: skip
        bound.launches[key] = launches
    made: LaunchList = bound.launches[key]
    return made


def _dtype(tables: Tables, tensors: Tensors) -> torch.dtype:
    return tensors[tables.layers[0].weight].dtype if tables.layers else torch.float32
