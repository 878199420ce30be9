"""Update the running statistics of many norms in few launches. Their rows are concatenated, and one kernel finds each
norm through a table of sizes and addresses.

Buffers keep their addresses between steps, so a table is written once and kept. While a CUDA graph is captured, nothing
may be uploaded. Norms without a table are then updated one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalmannorm._ops.grid import power
from kalmannorm._ops.track.request import TrackingRequest, unchanged
from kalmannorm._ops.track.triton_one import KINDS, track, track_block
from kalmannorm._ops.triton_launching import ready
from kalmannorm._ops.triton_shared import await_previous

__all__ = ["Together", "track", "track_many"]

KEPT = 64
"""Number of tables that are kept, the most recently written. Tables that a CUDA graph reads are always kept."""
TILE = 2048
"""Values of rows in one tile of a program."""

# Columns of the table.
COLUMNS = tl.constexpr(16)
EXAMPLES = tl.constexpr(0)
GROUPS = tl.constexpr(1)
CHANNELS = tl.constexpr(2)
SIZE = tl.constexpr(3)  # examples per group
VALUES = tl.constexpr(4)
BLOCKS = tl.constexpr(5)  # programs that share the norm
ROWS = tl.constexpr(6)  # start of its rows: means, variances, observed means, observed variances
SCRATCH = tl.constexpr(7)  # start of its new averages, until its last program stores them
COUNTS = tl.constexpr(8)  # addresses of values, batches and skipped batches
AVERAGES = tl.constexpr(11)  # addresses of running mean, running variance, observed mean, observed variance
OBSERVED = tl.constexpr(13)
RATES = tl.constexpr(15)  # two float32: momentum and observation momentum


@triton.jit
def integer(pointer):
    return tl.load(pointer).to(tl.int32)


@triton.jit
def address(pointer, TYPE: tl.constexpr):
    return tl.load(pointer).to(tl.pointer_type(TYPE))


@triton.jit
def track_many_kernel(
    rows_ptr, table_ptr, work_ptr, scratch_ptr, arrived_ptr,
    BG: tl.constexpr, BC: tl.constexpr, WIDE: tl.constexpr, ONE_TILE: tl.constexpr,
    KIND: tl.constexpr, CUMULATIVE: tl.constexpr, OBSERVES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    work = work_ptr + 2 * tl.program_id(0)
    number, block = tl.load(work), integer(work + 1)
    row = table_ptr + number * COLUMNS
    N, G, C, m = integer(row + EXAMPLES), integer(row + GROUPS), integer(row + CHANNELS), integer(row + SIZE)
    values = tl.load(row + VALUES)
    mean_ptr = rows_ptr + tl.load(row + ROWS)
    step = G.to(tl.int64) * C
    rates = (row + RATES).to(tl.pointer_type(tl.float32))
    counts, averages, observed = row + COUNTS, row + AVERAGES, row + OBSERVED
    track_block(
        block, integer(row + BLOCKS),
        mean_ptr, mean_ptr + step, mean_ptr + 2 * step, mean_ptr + 3 * step,
        address(averages, tl.float32), address(averages + 1, tl.float32),
        address(observed, tl.float32), address(observed + 1, tl.float32),
        address(counts, tl.int64), address(counts + 1, tl.int64), address(counts + 2, tl.int64),
        scratch_ptr + tl.load(row + SCRATCH), arrived_ptr + number,
        # eps is 0: only averages of standard deviations need it, and no norm with a wire uses them.
        N, G, C, m, values, tl.load(rates), tl.load(rates + 1), 0.0,
        BG, BC, WIDE, ONE_TILE, False, KIND, CUMULATIVE, OBSERVES,
    )  # fmt: skip


@dataclass
class Table:
    """The inputs of the kernel other than the rows, and its launch options."""

    table: Tensor
    work: Tensor  # for each program: its norm, and its block of channels
    arrived: Tensor  # zeros between launches
    scratch: int
    options: dict[str, Any]
    captured: bool = False


def track_many(requests: Sequence[TrackingRequest], tables: dict[Any, Table]) -> None:
    """Update the buffers of all these norms. No norm may occur twice. `tables` are kept between calls."""
    alike: dict[Any, list[TrackingRequest]] = {}
    for request in requests:
        alike.setdefault((request.kind, request.momentum is None, request.observed is not None), []).append(request)
    for each in alike.values():
        table = _table(each, tables) if len(each) > 1 else None
        if table is None:
            for request in each:
                track(request)
            continue
        rows = torch.cat([rows.reshape(-1) for request in each for rows in request.rows()])
        scratch = torch.empty(table.scratch, device=rows.device, dtype=torch.float32)
        table.arrived.zero_()  # already zero, unless two streams updated the same model at once
        ready(track_many_kernel, (table.work.shape[0],), rows.device, **table.options)(
            rows, table.table, table.work, scratch, table.arrived
        )
        torch.autograd.graph.increment_version([buffer for request in each for buffer in request.buffers()])


def _table(requests: Sequence[TrackingRequest], tables: dict[Any, Table]) -> Table | None:
    """The table of these requests, written if it does not exist yet. None if it cannot be written now."""
    first = requests[0].posterior.mean
    capturing = first.is_cuda and torch.cuda.is_current_stream_capturing()
    key = first.device, requests[0].kind, *(_numbers(request) for request in requests)
    table = tables.get(key)
    if table is None and capturing:
        return None
    if table is None:
        with torch.inference_mode(False):  # the kept table is also used in training
            table = _written(requests, first.device)
        unused = [other for other, old in list(tables.items()) if not old.captured]
        for other in unused[: max(len(unused) + 1 - KEPT, 0)]:
            tables.pop(other, None)
        tables[key] = table
    table.captured |= capturing
    return table


def _numbers(request: TrackingRequest) -> tuple[Any, ...]:
    """All numbers of a norm in the table."""
    rates = request.momentum, request.observation_momentum
    sizes = request.examples, *request.posterior.mean.shape, request.size, request.values
    return *rates, *sizes, *(buffer.data_ptr() for buffer in request.buffers())


class Together:
    """Updates of norms whose moments are in one tensor, each norm's from its start on. Addresses are checked."""

    def __init__(self, requests: Sequence[TrackingRequest], starts: Sequence[int]) -> None:
        self.buffers = [buffer for request in requests for buffer in request.buffers()]
        self.slots = [buffer for each in requests for buffer in each.slots()]
        self.addresses = [buffer.data_ptr() for buffer in self.buffers]
        alike: dict[Any, tuple[list[TrackingRequest], list[int]]] = {}
        for request, start in zip(requests, starts, strict=True):
            key = request.kind, request.momentum is None, request.observed is not None
            alike.setdefault(key, ([], []))
            alike[key][0].append(request)
            alike[key][1].append(start)
        device = requests[0].posterior.mean.device
        with torch.inference_mode(False):  # the kept tables are also used in training
            self.tables = [_written(each, device, begin) for each, begin in alike.values()]
        self.launches = [
            ready(track_many_kernel, (table.work.shape[0],), device, **table.options) for table in self.tables
        ]

    @classmethod
    def of(cls, requests: Sequence[TrackingRequest], starts: Sequence[int]) -> Together | None:
        """None while a CUDA graph is captured: nothing can be uploaded then."""
        first = requests[0].posterior.mean
        return None if first.is_cuda and torch.cuda.is_current_stream_capturing() else cls(requests, starts)

    def applies(self, owners: Sequence[dict[str, Any]]) -> bool:
        """Whether the norms with these buffers still have the same ones, and at the same addresses."""
        return unchanged(owners, self.slots) and list(map(Tensor.data_ptr, self.buffers)) == self.addresses

    def captured(self) -> bool:
        return any(table.captured for table in self.tables)

    def track(self, moments: Tensor) -> list[int]:
        """Update all buffers. Nobody waits for the device, so it is not known which norms were skipped."""
        capturing = moments.is_cuda and torch.cuda.is_current_stream_capturing()
        for table, launch in zip(self.tables, self.launches, strict=True):
            scratch = torch.empty(table.scratch, device=moments.device, dtype=torch.float32)
            table.arrived.zero_()  # already zero, unless two streams updated the same model at once
            launch(moments, table.table, table.work, scratch, table.arrived)
            table.captured |= capturing
        torch.autograd.graph.increment_version(self.buffers)
        return []


def _written(requests: Sequence[TrackingRequest], device: torch.device, starts: Sequence[int] | None = None) -> Table:
    """`starts`: where each norm's rows begin. None: they follow one another."""
    shapes = [request.posterior.mean.shape for request in requests]
    most_groups, most_channels = max(G for G, _ in shapes), max(C for _, C in shapes)
    BG = min(power(most_groups), 64)
    BC = min(max(TILE // BG, 16), 256, power(most_channels))
    lines, work, begin, scratch = [], list[tuple[int, int]](), 0, 0
    for number, (request, (G, C)) in enumerate(zip(requests, shapes, strict=True)):
        blocks = -(-C // BC)
        begin = begin if starts is None else starts[number]
        sizes = [request.examples, G, C, min(request.size, request.examples), request.values, blocks, begin, scratch]
        averages = [*request.running, *(request.observed or request.running)]
        lines.append([*sizes, *(buffer.data_ptr() for buffer in (*request.counts, *averages)), _rates(request)])
        work += [(number, block) for block in range(blocks)]
        begin, scratch = begin + len(request.rows()) * G * C, scratch + len(request.rows()) * C
    parts = [
        torch.tensor(lines, dtype=torch.int64, device="cpu").flatten(),
        torch.tensor(work, dtype=torch.int64, device="cpu").flatten(),
        torch.zeros(len(requests), dtype=torch.int64, device="cpu"),
    ]
    table, programs, arrived = torch.split(_uploaded(torch.cat(parts), device), [len(part) for part in parts])
    return Table(
        table,
        programs.view(-1, 2),
        arrived.view(torch.int32),
        scratch,
        {
            "BG": BG,
            "BC": BC,
            "WIDE": min(power(most_channels), 1024),
            "ONE_TILE": most_groups <= BG,
            "KIND": KINDS[requests[0].kind].value,
            "CUMULATIVE": requests[0].momentum is None,
            "OBSERVES": requests[0].observed is not None,
            "num_warps": 4,
        },
    )


def _rates(request: TrackingRequest) -> int:
    """Both momenta as float32, stored in the bits of one int64 of the table."""
    rates = 0.0 if request.momentum is None else request.momentum, request.observation_momentum
    return int(torch.tensor(rates, dtype=torch.float32, device="cpu").view(torch.int64))


def _uploaded(integers: Tensor, device: torch.device) -> Tensor:
    """Copy to the device in stream order. New batch sizes need new tables, and this must not wait for the device."""
    return integers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else integers
