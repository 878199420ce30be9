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
from torch import Tensor

from kalmannorm._ops.grid import power
from kalmannorm._ops.track.request import Kind, TrackingRequest, unchanged
from kalmannorm._ops.track.triton_kernels import KINDS, track_many_kernel
from kalmannorm._ops.track.triton_one import track
from kalmannorm._ops.triton_launching import Ready, ready

__all__ = ["Together", "track", "track_many"]

KEPT = 64
"""Number of tables that are kept, the most recently written. Tables that a CUDA graph reads are always kept."""
TILE = 2048
"""Values of rows in one tile of a program."""


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
    options = options_of(shapes, requests[0].kind, requests[0].momentum is None, requests[0].observed is not None)
    BC: int = options["BC"]
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
        options,
    )


def launch_of(device: torch.device, options: dict[str, Any]) -> tuple[Ready, tuple[Tensor, ...]]:
    """A launch with these options, and tensors without memory that stand for its arguments."""
    dtypes = torch.float32, torch.int64, torch.int64, torch.float32, torch.int32
    return ready(track_many_kernel, (1,), device, **options), tuple(
        torch.empty(1, dtype=dtype, device="meta") for dtype in dtypes
    )


def options_of(shapes: Sequence[Sequence[int]], kind: Kind, cumulative: bool, observes: bool) -> dict[str, Any]:
    """The options of a launch for norms with (G, C) of these sizes."""
    most_groups, most_channels = max(G for G, _ in shapes), max(C for _, C in shapes)
    BG = min(power(most_groups), 64)
    return {
        "BG": BG,
        "BC": min(max(TILE // BG, 16), 256, power(most_channels)),
        "WIDE": min(power(most_channels), 1024),
        "ONE_TILE": most_groups <= BG,
        "KIND": KINDS[kind].value,
        "CUMULATIVE": cumulative,
        "OBSERVES": observes,
        "num_warps": 4,
    }


def _rates(request: TrackingRequest) -> int:
    """Both momenta as float32, stored in the bits of one int64 of the table."""
    rates = 0.0 if request.momentum is None else request.momentum, request.observation_momentum
    return int(torch.tensor(rates, dtype=torch.float32, device="cpu").view(torch.int64))


def _uploaded(integers: Tensor, device: torch.device) -> Tensor:
    """Copy to the device in stream order. New batch sizes need new tables, and this must not wait for the device."""
    return integers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else integers
