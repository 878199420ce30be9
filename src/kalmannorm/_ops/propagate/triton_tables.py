"""Inputs of a bundle's Triton kernels: tapes, uses of entries, the table of layers and work lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kalmannorm._ops.propagate.aten import SMOOTH, affine_alone, affine_places
from kalmannorm._ops.propagate.aten_layers import geometry
from kalmannorm._ops.propagate.bundle import Bundle, Elementwise, Function, Layer, Norm

LANES = 64
"""Lanes of a program that runs a tape."""
TILE = 2048
"""Values of a weight in one tile."""
ROW_WORK = 16384
"""Values of a weight that one program of the backward reads."""
_KINDS = {"add": 1, "subtract": 2, "product": 3, "affine": 4, "piecewise": 5, "smooth": 6}
_NUMBERS, _COLUMNS = 16, 21


class Tape(NamedTuple):
    """Instructions in blocks of LANES lanes: code, a, b, out. `offsets` and `depths` are the start and the depth of
    each block. A block is as deep as its longest lane."""

    instructions: tuple[Tensor, Tensor, Tensor, Tensor]
    offsets: Tensor
    depths: Tensor
    piecewise: bool
    smooth: bool


class Uses(NamedTuple):
    """For each entry, the runs of slots with parts of its gradient: start, step and length, from `first[entry]` on."""

    first: Tensor
    start: Tensor
    step: Tensor
    length: Tensor


class Tile(NamedTuple):
    """How a layer is divided into tiles. Layers with equal tiles are launched together."""

    BK: int
    BC: int
    TP: int
    TAPS_LAST: bool
    ONE: bool
    WIDE: bool


class Small(NamedTuple):
    """A small tensor: its position in the list of tensors. If it is None, it consists of `size` times `missing`."""

    place: int | None
    size: int
    missing: float = 0.0
    given: bool = False  # moments from elsewhere, a new tensor in every forward


class Room:
    """Divides one tensor of float32 values: `take` returns the offset of the next `size` values, in 16 bytes."""

    def __init__(self) -> None:
        self.size = 0

    def take(self, size: int) -> int:
        start = self.size
        self.size += -(-size // 4) * 4
        return start


class Own(NamedTuple):
    """The memory of a backward: where its parts begin, and its size."""

    slots: int
    gathered: int
    sums: int
    small: int
    size: int


WEIGHTS, OWN, OF_ROWS = range(3)
"""The tensors that a backward fills: gradients of weights, its own memory, and gradients of rows (5, channels)."""


class Place(NamedTuple):
    """Where a gradient is: in which of these tensors, and from which value on."""

    which: int
    start: int


class Gradients:
    """Takes the gradients out of the tensors that a backward fills.

    Most are vectors. All vectors of a tensor come from one `split`, because a view by `as_strided` takes three times as
    long.
    """

    def __init__(self, places: Sequence[Place | None], tensors: Sequence[Tensor]) -> None:
        self.views = [
            None if place is None else (place.which, tuple(tensor.shape), strides_in(tensor, place), place.start)
            for place, tensor in zip(places, tensors, strict=True)
        ]
        self.parts: list[tuple[int, int] | None] = [None] * len(tensors)  # of vectors: which tensor, which of its parts
        self.sizes: dict[int, list[int]] = {}
        found = [(*place, number) for number, place in enumerate(places) if place is not None]
        ends: dict[int, int] = {}
        for which, start, number in sorted(found):
            gap = start - ends.get(which, 0)
            if tensors[number].dim() != 1 or which == WEIGHTS or gap < 0:  # below 0: two tensors have the same place
                continue
            sizes = self.sizes.setdefault(which, [])
            sizes += [*([gap] if gap else []), tensors[number].numel()]
            self.parts[number] = which, len(sizes) - 1
            ends[which] = start + sizes[-1]

    def of(self, filled: Sequence[Tensor | None], asked: Sequence[bool]) -> list[Tensor | None]:
        """The gradients that were asked for."""
        split = {
            which: whole.view(-1).split_with_sizes([*sizes, whole.numel() - sum(sizes)])
            for which, sizes in self.sizes.items()
            if (whole := filled[which]) is not None
        }
        found: list[Tensor | None] = []
        for wanted, view, part in zip(asked, self.views, self.parts, strict=True):
            whole = filled[view[0]] if wanted and view is not None else None
            if whole is None or view is None:
                found.append(None)
            else:
                found.append(whole.as_strided(*view[1:]) if part is None else split[part[0]][part[1]])
        return found


class Launches(NamedTuple):
    """Work lists of the layers of a stage, one per kind of tile.

    Forward: (layer, block of outputs). Layers with groups have separate lists. Backward: (layer, group, block of
    inputs, share of outputs). Depthwise layers have separate lists.
    """

    forward: list[tuple[Tile, bool, Tensor]]
    backward: list[tuple[Tile, bool, Tensor]]


@dataclass
class Tables:
    """Everything that depends only on the bundle and the device."""

    tapes: list[list[Tape]]  # of each stage, in order
    uses: Uses
    numbers: Tensor
    index: Tensor
    geometry: Tensor
    priors: Tensor  # the entries of the priors of all norms
    results: Tensor  # the entries of the other results
    small: list[Small]  # all small tensors in the order of `flat`
    owner: Tensor  # for each value of `flat`: the number of its tensor, -1 for given moments
    offset: Tensor  # and its place in this tensor
    gains: Tensor  # (norms, 4): start and number of its logits, start and number of its channels
    logits: Tensor  # for each channel of each norm: the position of its logit
    affine: Tensor  # (2, beliefs): where the gradients of β and γ from the norms are in (5, channels), or -1
    layers: list[Layer]  # of all stages
    rows: list[list[int]]  # their rows of the table, without the columns that depend on weights
    slots: int
    sums: int
    own: Own
    bound: dict[Any, Bound] = field(default_factory=dict)
    together: set[tuple[int, ...]] = field(default_factory=set)  # `starts` of filters that were in one memory


@dataclass
class Bound:
    """Everything that depends on addresses and strides of weights: table of layers, work lists, gradient positions.

    Computed filters have new addresses in every forward. `starts` says how far each is from the first one, in bytes.
    """

    starts: tuple[int, ...]
    table: Tensor
    stages: list[Launches]
    gradients: Gradients
    size: int
    small: Tensor | None  # the addresses of the small tensors, if all are float32
    captured: bool = False
    launches: dict[Any, Any] = field(default_factory=dict)


def power(n: int) -> int:
    return int(triton.next_power_of_2(max(n, 1)))


def tables_of(bundle: Bundle, device: torch.device) -> Tables:
    functions: dict[Function, int] = {}
    tapes = [_tapes(stage.elementwise, bundle.entries, functions, device) for stage in bundle.stages]
    layers = [layer for stage in bundle.stages for layer in stage.layers]
    results = torch.cat(bundle.results)
    rows, listed, seen, offset, sums = [], list[Tensor](), list[Tensor](), 0, 0
    slots = 2 * bundle.entries + results.numel()
    used = [(results, torch.arange(2 * bundle.entries, slots), 0, 1)]
    places: dict[object, int] = {}
    for layer in layers:
        kernel = geometry(layer, torch.float32, torch.device("cpu"))
        if layer.axes not in places:
            places[layer.axes] = offset
            seen += [kernel.of_taps, kernel.of_kinds, kernel.inside.flatten()]
            offset += sum(part.numel() for part in seen[-3:])
        inputs, taps = layer.a.numel(), kernel.of_taps.numel()
        group_inputs, group_outputs = inputs // layer.groups, layer.outputs // layer.groups
        share = min(max(ROW_WORK // (min(power(group_inputs), 32) * taps), 1), group_outputs)
        sizes = [layer.outputs, group_outputs, group_inputs]
        where = [sum(part.numel() for part in listed), layer.start, places[layer.axes], sums, slots]
        rows.append([0, 0, 0, *sizes, 0, 0, 0, 0, taps, kernel.of_kinds.numel(), *where, inputs, share, 0, 0])
        listed.append(layer.a)
        splits = -(-group_outputs // share)
        used.append((layer.a, torch.arange(slots, slots + inputs), inputs, splits))
        slots, sums = slots + splits * inputs, sums + layer.outputs * taps
    for each in (each for stage in bundle.stages for each in stage.elementwise):
        out = torch.arange(each.start, each.stop)
        used.append((each.a, out, 0, 1))
        if each.b is not None:
            used.append((each.b, bundle.entries + out, 0, 1))
    return Tables(
        tapes,
        _uses(used, bundle.entries, device),
        torch.tensor([_numbers(function) for function in functions] or [[0.0] * _NUMBERS]).double().to(device),
        _integers(torch.cat([*listed, torch.zeros(1)]), device),
        torch.cat([*seen, torch.zeros(1)]).to(device),
        results[: bundle.channels].to(device),
        results[bundle.channels :].to(device),
        _small(bundle),
        *_places(_small(bundle), device),
        _gains(bundle.norms, device),
        _integers(bundle.logit_places, device),
        _integers(affine_places(bundle), device),
        layers,
        rows,
        slots,
        sums,
        _own(slots, bundle.entries, sums, sum(each.size for each in _small(bundle))),
    )


def _own(slots: int, entries: int, sums: int, small: int) -> Own:
    room = Room()
    return Own(room.take(2 * slots), room.take(2 * entries), room.take(sums), room.take(small), room.size)


def starts_of(tables: Tables, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> tuple[list[int | None], int]:
    """Where the gradient of each layer's weight begins among all, None if it is not wanted, and the size of all."""
    starts, size = list[int | None](), 0
    for layer in tables.layers:
        starts.append(size if wanted[layer.weight] else None)
        size += -(-tensors[layer.weight].numel() // 64) * 64 if wanted[layer.weight] else 0
    return starts, size


def places_of(bundle: Bundle, tables: Tables, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> list[Place | None]:
    """Where the gradient of each tensor is after a backward. None: it has none."""
    found: list[Place | None] = [None] * len(tensors)
    for place, row, start, _ in affine_alone(bundle):
        found[place] = Place(OF_ROWS, row * bundle.channels + start)
    at = tables.own.small
    for each in tables.small[: 2 * (len(bundle.beliefs) + len(bundle.given)) + len(bundle.norms)]:
        if each.place is not None:
            found[each.place] = Place(OWN, at)
        at += each.size
    for layer, begin in zip(tables.layers, starts_of(tables, tensors, wanted)[0], strict=True):
        if begin is not None:
            found[layer.weight] = Place(WEIGHTS, begin)
        if layer.bias is not None:
            found[layer.bias] = Place(OWN, tables.own.gathered + layer.start)
    return found


def _small(bundle: Bundle) -> list[Small]:
    """β and given means, γ and given variances, logits of gains, then γ and β of the norms."""
    listed = [Small(each.bias, each.size, 0.0) for each in bundle.beliefs]
    listed += [Small(each.mean, each.size, given=True) for each in bundle.given]
    listed += [Small(each.weight, each.size, 1.0) for each in bundle.beliefs]
    listed += [Small(each.var, each.size, given=True) for each in bundle.given]
    listed += [Small(norm.logit, norm.logits, math.inf) for norm in bundle.norms]
    listed += [Small(norm.weight, norm.channels, 1.0) for norm in bundle.norms]
    return listed + [Small(norm.bias, norm.channels, 0.0) for norm in bundle.norms]


def _places(small: Sequence[Small], device: torch.device) -> tuple[Tensor, Tensor]:
    owners = [torch.full((each.size,), -1 if each.given else number) for number, each in enumerate(small)]
    offsets = [torch.arange(each.size) for each in small]
    none = torch.zeros(0, dtype=torch.long)
    return _integers(torch.cat([none, *owners]), device), _integers(torch.cat([none, *offsets]), device)


def _gains(norms: Sequence[Norm], device: torch.device) -> Tensor:
    table, logit, channel = [], 0, 0
    for norm in norms:
        table.append([logit, norm.logits, channel, norm.channels])
        logit, channel = logit + norm.logits, channel + norm.channels
    return _integers(torch.tensor(table), device)


def _integers(values: Tensor, device: torch.device) -> Tensor:
    return values.to(torch.int32).to(device)


def _numbers(function: Function) -> list[float]:
    numbers = list(function.numbers)
    if function.kind == "piecewise":
        # A function with one knot gets a second knot between two equal pieces, which adds nothing.
        knots = [*function.knots, function.knots[0] + 1.0][:2]
        pieces = [*function.pieces, function.pieces[-1]][:3]
        numbers = knots + [c for piece in pieces for c in piece]
    elif function.kind == "smooth":
        numbers = [float(list(SMOOTH).index(function.name))]
    return numbers + [0.0] * (_NUMBERS - len(numbers))


def _uses(used: Sequence[tuple[Tensor, Tensor, int, int]], entries: int, device: torch.device) -> Uses:
    """`Uses` from a list of (entries, first slot of each entry, step, length)."""
    entry = torch.cat([part[0] for part in used])
    order = torch.argsort(entry, stable=True)
    first = torch.zeros(entries + 1, dtype=torch.long)
    first[1:] = torch.bincount(entry, minlength=entries).cumsum(0)
    start = torch.cat([part[1] for part in used])[order]
    step = torch.cat([torch.full_like(part[0], part[2]) for part in used])[order]
    length = torch.cat([torch.full_like(part[0], part[3]) for part in used])[order]
    return Uses(*(_integers(part, device) for part in (first, start, step, length)))


def _tapes(
    work: Sequence[Elementwise], entries: int, functions: dict[Function, int], device: torch.device
) -> list[Tape]:
    """Each entry is computed in the lane of its operands. If they are in two lanes, a new tape begins."""
    tapes: list[list[Tensor]] = [[]]
    lane, lanes = torch.full((entries,), -1), 0
    for each in work:
        operands = [each.a] if each.b is None else [each.a, each.b]
        of = torch.stack([lane[part] for part in operands])
        if bool(((of[0] >= 0) & (of[-1] >= 0) & (of[0] != of[-1])).any()):
            tapes.append([])
            lane.fill_(-1)
            of.fill_(-1)
            lanes = 0
        own = of.max(0).values
        fresh = own < 0
        own[fresh] = torch.arange(lanes, lanes + int(fresh.sum()))
        lanes += int(fresh.sum())
        out = torch.arange(each.start, each.stop)
        lane[out] = own
        code = _KINDS[each.function.kind] + 8 * functions.setdefault(each.function, len(functions))
        b = torch.zeros_like(each.a) if each.b is None else each.b
        tapes[-1].append(torch.stack([own, torch.full_like(own, code), each.a, b, out]))
    return [_tape(torch.cat(parts, 1), device) for parts in tapes if parts]


def _tape(rows: Tensor, device: torch.device) -> Tape:
    """A tape from rows (lane, code, a, b, out), in the order of execution."""
    rows = rows[:, torch.argsort(rows[0], stable=True)]
    counts = torch.bincount(rows[0])
    turn = torch.arange(rows.shape[1]) - (counts.cumsum(0) - counts)[rows[0]]
    longest_first = torch.argsort(counts, descending=True, stable=True)
    place = torch.empty_like(longest_first)
    place[longest_first] = torch.arange(counts.numel())
    depths = counts[longest_first][::LANES]
    offsets = (depths.cumsum(0) - depths) * LANES
    where = place[rows[0]]
    offset = offsets[where // LANES] + turn * LANES + where % LANES
    table = torch.zeros(4, int(depths.sum()) * LANES, dtype=torch.long)
    table[:, offset] = rows[1:]
    code, a, b, out = (_integers(part, device) for part in table)
    kinds = set((rows[1] % 8).tolist())
    return Tape((code, a, b, out), _integers(offsets, device), _integers(depths, device), 5 in kinds, 6 in kinds)


def bind(
    bundle: Bundle,
    tables: Tables,
    tensors: Sequence[Tensor],
    wanted: Sequence[bool],
    starts_of_filters: tuple[int, ...],
    small: Tensor | None,
) -> Bound:
    """The tables for these weights and small tensors. `wanted` says which tensors need a gradient."""
    rows, tiles = [], list[Tile]()
    moving = dict(zip(bundle.filters, starts_of_filters, strict=True))
    starts, size = starts_of(tables, tensors, wanted)
    for layer, row, begin in zip(tables.layers, tables.rows, starts, strict=True):
        weight = tensors[layer.weight]
        bias = 0 if layer.bias is None else tensors[layer.bias].data_ptr()
        first, second, tap = _strides(weight)
        group_outputs, group_inputs, taps = row[4], row[5], row[10]
        steps = [group_outputs * first, first, second, tap]
        if layer.transposed:
            steps = [group_inputs * first, second, first, tap]
        address = moving.get(layer.weight, weight.data_ptr())
        flags = int(begin is not None), int(layer.weight in moving)
        rows.append([address, bias, begin or 0, *row[3:6], *steps, *row[10:19], *flags])
        tiles.append(_tile(group_inputs, taps, steps, address))
    device = tables.numbers.device
    table = torch.tensor(rows or [[0] * _COLUMNS], dtype=torch.int64).to(device)
    stages, start = [], 0
    for stage in bundle.stages:
        numbers = range(start, start + len(stage.layers))
        start += len(stage.layers)
        stages.append(_launches(tables, tiles, numbers, device))
    places = places_of(bundle, tables, tensors, wanted)
    return Bound(starts_of_filters, table, stages, Gradients(places, tensors), size, small)


def strides_in(tensor: Tensor, place: Place) -> tuple[int, ...]:
    """The strides of a tensor's gradient. Only the gradients of weights have the layouts of their tensors."""
    if place.which == WEIGHTS:
        return tensor.stride()
    return tuple(math.prod(tensor.shape[axis + 1 :]) for axis in range(tensor.dim()))


def _strides(weight: Tensor) -> tuple[int, int, int]:
    """Strides of a weight: from row to row, from column to column, from tap to tap."""
    columns, taps = weight.shape[1], weight[0, 0].numel()
    return columns * taps, *((taps, 1) if weight.is_contiguous() else (1, columns))


def lies_together(weight: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    other = formats.get(weight.dim())
    return weight.is_contiguous() or (other is not None and weight.is_contiguous(memory_format=other))


def _tile(inputs: int, taps: int, steps: Sequence[int], pointer: int) -> Tile:
    TP = power(taps)
    BC = min(power(inputs), max(TILE // (4 * TP), 8), 128)
    BC = BC if inputs > 8 else 1 if inputs == 1 else 8
    taps_last = taps > 1 and steps[3] < steps[2]
    one = steps[3 if taps_last else 2] == 1
    others = *steps[:2], *((steps[3],) if taps > 1 else ())
    wide = one and not taps_last and inputs % 4 == pointer % 16 == 0 and all(step % 4 == 0 for step in others)
    return Tile(min(max(TILE // (BC * TP), 1), 64), BC, TP, taps_last, one, wide)


def _launches(tables: Tables, tiles: list[Tile], numbers: range, device: torch.device) -> Launches:
    forward: dict[tuple[Tile, bool], list[tuple[int, int]]] = {}
    backward: dict[tuple[Tile, bool], list[tuple[int, int, int, int]]] = {}
    for i in numbers:
        outputs, group_outputs, group_inputs = tables.rows[i][3:6]
        inputs, share = tables.rows[i][17:19]
        tile = tiles[i]
        forward.setdefault((tile, outputs > group_outputs), []).extend(
            (i, block) for block in range(-(-outputs // tile.BK))
        )
        depthwise = group_outputs == group_inputs == 1
        BC = min(TILE // tile.TP, 128) if depthwise else min(power(group_inputs), 32)
        BK = 1 if depthwise else max(min(TILE // (BC * tile.TP), power(share)), 1)
        groups = 1 if depthwise else inputs // group_inputs
        blocks = -(-(inputs if depthwise else group_inputs) // BC)
        key = tile._replace(BK=BK, BC=BC), depthwise
        splits = 1 if depthwise else -(-group_outputs // share)
        backward.setdefault(key, []).extend(
            (i, group, block, split) for group in range(groups) for block in range(blocks) for split in range(splits)
        )
    return Launches(
        [(*key, _integers(torch.tensor(work), device)) for key, work in forward.items()],
        [(*key, _integers(torch.tensor(work), device)) for key, work in backward.items()],
    )
