"""The short way through a training step: what is the same in every step is decided once.

In the usual training step nobody watches, all norms train by themselves, and their priors come from bundles. Then a
norm runs its prepared kernels on the rows that its bundle computed. Its moments go into memory that all norms of the
bundle share, and the running statistics of all of them are updated from there when the forward ends. In every other
case `normalize` returns None, and the norm takes the long way, which computes the same.

In a segment of an activation checkpoint the recomputation repeats what the forward did, with the same rows, kernels and
memory (`Repeated`).

A decision expires when a setting of any norm changes (`Changes`). Shapes, layouts, dtypes and the kind of gradient are
part of the key of what is prepared. The addresses of buffers and parameters are compared in every forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kalmannorm._groups import lone_last, statistics_dtype
from kalmannorm._ops.dispatch import row_kernels_for, settled_row_kernels_for
from kalmannorm._ops.normalize.registered import memory_format_of
from kalmannorm._ops.normalize.row_kernels import Expected, Memory, RowGradients, RowKernels, Scratch
from kalmannorm._ops.normalize.rows import normalize
from kalmannorm._ops.normalize.settled_rows import normalize_settled
from kalmannorm._ops.plain import PLAIN
from kalmannorm._running import first_step
from kalmannorm._running.bundling import Call, Part
from kalmannorm._running.closing_sums import Collecting, States, settled_states
from kalmannorm._running.layouts import Layout
from kalmannorm._running.prior_bundles import PriorBundles, Results, groups_in
from kalmannorm._running.tracking_together import Update, track_together
from kalmannorm._support.activation_checkpoints import OUTSIDE, unseen
from kalmannorm._support.changes import Changes
from kalmannorm._support.checks import check_enough_values
from kalmannorm._support.sharded_modules import in_inner_units
from kalmannorm._wiring.program import Context
from kalmannorm._wiring.weak_modules import WeakModule
from kalmannorm.moments import closed

UNKNOWN: Any = object()
"""Nobody has looked for kernels yet. None: there are none."""
KEPT = 256
"""Shapes of x for which a norm keeps prepared kernels. After more, all are dropped."""


def watched() -> bool:
    """Whether a tracer, a dispatch mode, `torch.func` or forward mode must see every norm."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def stream_of(device: int) -> int:
    """The current stream of a GPU as a number. -1 if another GPU is the current one: kernels could not be launched.

    `device` is from `Tensor.get_device`. It is -1 on a CPU, which has no streams.
    """
    if device < 0:
        return 0
    return torch._C._cuda_getCurrentRawStream(device) if torch._C._cuda_getDevice() == device else -1


class Place:
    """One call of a norm on the short way. `kernels` are prepared for the shapes that came, None if there are none."""

    def __init__(self, call: Call, index: int) -> None:
        self.call, self.index = call, index
        self.changes = -1  # the value of `Changes.count` for which `usable` holds
        self.usable = self.tracks = self.settled = False
        self.all_kernels: dict[Any, dict[Any, RowKernels | None]] = {}  # for each statistics batch and eps
        self.kernels: dict[Any, RowKernels | None] = {}  # for those of now
        self.fitting: Any = None  # tensors that kernels can read, beside x and the rows, and their addresses

    def check(self, norm: Any, moments: Tensor, may_settle: bool) -> None:
        """Find out whether the norm, with its settings of now, can take the short way, and track these moments.

        `may_settle`: a norm at the end of its closing phase can take it too.
        """
        self.tracks, self.changes = norm.track_running_stats, Changes.count
        self.settled = may_settle and norm.runs_settled()
        takes = norm.takes_short_way(self.call.predicts, self.settled)
        takes = takes and self.call.faded == (norm.gain_logit is not None and norm.runs_faded())
        usual = takes and norm._ranks.choice is None and norm.has_usual_steps()
        self.usable = usual and (not self.tracks or norm.tracks_by_itself(moments))
        settings = norm.statistics_batch_size, norm.eps, norm.prior_features, self.settled
        self.kernels = self.all_kernels.setdefault(settings, {})


class ShortPart:
    """A part of the model's bundles, with everything that its forwards on the short way share.

    `prior`: the norms store their priors in the memory of the moments.
    """

    def __init__(self, part: Part, prior: bool) -> None:
        self.prior = prior
        self.places = {call.identity: Place(call, index) for index, call in enumerate(part.calls)}
        self.norms = [call.norm for call in part.calls]
        self.channels = [norm.channels for norm in part.bundle.norms]
        self.pitch = part.bundle.channels
        self.layouts: dict[tuple[int, ...], Layout] = {}  # by the numbers of groups, and whether norms are settled
        self.tables: dict[Any, Any] = {}
        self.constants: dict[Any, Tensor] = {}

    @classmethod
    def of(cls, part: Part, prior: bool) -> ShortPart:
        if part.short is None:
            part.short = cls(part, prior)
        short: ShortPart = part.short
        return short

    def constant(self, value: float, size: int, like: Tensor) -> Tensor:
        """Instead of a missing γ or β. It is kept, unless a CUDA graph is captured, whose memory it would have."""
        key = value, size, like.device, like.dtype
        found = self.constants.get(key)
        if found is None:
            with torch.inference_mode(False):
                found = torch.full((size,), value, device=like.device, dtype=like.dtype)
            if not (like.is_cuda and torch.cuda.is_current_stream_capturing()):
                self.constants[key] = found
        return found

    def layout(self, groups: Sequence[int], settled: bool) -> Layout:
        key = *groups, settled
        if key not in self.layouts:
            if len(self.layouts) >= KEPT:
                self.layouts.clear()
            self.layouts[key] = Layout(groups, self.channels, self.prior, settled)
        return self.layouts[key]


class Block:
    """The rows and the moments of one bundle in one forward.

    `settled`: the norms at the end of a closing phase. With gradients, `collecting` is for what they collect.
    """

    def __init__(
        self,
        part: ShortPart,
        dtype: torch.dtype,
        groups: Sequence[int],
        x: Tensor,
        rows: Sequence[Tensor] = (),
        settled: States | None = None,
        collecting: Collecting | None = None,
        gradients: RowGradients | None = None,
    ) -> None:
        self.part, self.rows, self.examples = part, rows, x.shape[0]
        self.settled, self.collecting = settled or {}, collecting
        self.layout = part.layout(groups, bool(settled))
        self.device, self.index = x.device, x.get_device()
        self.gradients, self.stream = torch.is_grad_enabled(), stream_of(self.index)
        self.moments = torch.empty(self.layout.total, device=x.device, dtype=dtype)
        self.memory = Memory(self.moments, Scratch(gradients))
        if gradients is not None:
            gradients.places = self.layout.places
        self.ran = set[int]()
        self.untracked: dict[int, int] = {}  # by index of the norm: values per channel of its x
        self.expected: tuple[Any, Tensor] | None = None  # a `ClosingMemory`, and its averages in units of the loss

    def averages(self, index: int) -> Expected:
        """The averages of gradients of a settled norm. Those of all norms are scaled together."""
        state = self.settled[index]
        place = state.place
        if place is None or state.averages is not place.averages:
            return Expected(state.averages * state.scale)
        memory = place.memory
        if self.expected is None or self.expected[0] is not memory:
            self.expected = memory, memory.averages * state.scale
        return Expected(self.expected[1], place.row)


def collects(state: Any, block: Block) -> bool:
    """Whether kernels can read the averages of a settled norm, and add to what it collects.

    Callers may load a state of another dtype, with `assign=True`.
    """
    averages: Tensor = state.averages
    probe: Tensor = state.probe
    if averages.dtype is not block.moments.dtype or probe.dtype is not averages.dtype:
        return False
    return averages.get_device() == block.index == probe.get_device() and averages.is_contiguous()


def _key_of(x: Tensor, residual: Tensor | None, relu: bool) -> tuple[Any, ...]:
    """What kernels are prepared for."""
    key: tuple[Any, ...] = x.shape, x.stride(), x.dtype, relu, x.device, PLAIN.active
    if residual is None:
        return key
    return *key, residual.__class__, residual.shape, residual.stride(), residual.dtype, residual.device


class Repeated(NamedTuple):
    """A norm that ran on the short way inside an activation checkpoint, as its recomputation runs it again.

    It writes the same moments into the same memory.
    """

    key: tuple[Any, ...]
    again: Callable[[Tensor, Tensor | None, Any], Tensor]  # from x, the residual and the region

    def run(self, norm: Any, x: Tensor, residual: Tensor | None, relu: bool, region: Any) -> Tensor | None:
        """The result of the norm. None if its input has another form than in the forward.

        The kernels would then read beyond its memory. On the long way, torch tells that the recomputation differs.
        """
        if _key_of(x, residual, relu) != self.key:
            return None
        return self.again(x, residual, region if norm.rebuilds else None)


class ShortForward:
    """One forward of a model, or of a part of it, on the short way. `memo` has the results of its bundles."""

    def __init__(self, bundles: PriorBundles, memo: dict[Any, Any], model: WeakModule | None = None) -> None:
        self.bundles, self.memo, self.model = bundles, memo, model
        self.blocks: dict[int, Block | None] = {}

    def normalize(
        self,
        call: int,
        target: int | None,
        norm: Any,
        x: Tensor,
        residual: Tensor | None,
        relu: bool,
        segment: Any = OUTSIDE,
        repeated: dict[int, Repeated | None] | None = None,
    ) -> Tensor | None:
        """The result of a norm, or None: it must take the long way. The caller knows all hooks on saved tensors.

        Inside an activation checkpoint `segment` stands for it (see `Segment.region`), and `repeated` gets what the
        recomputation needs.
        """
        if x.__class__ is not Tensor or watched():
            return None
        number = self.bundles.of_call.get(call, -1)
        if number not in self.blocks:
            block = self._block(call, target, norm, x)  # may build the bundles
            number = self.bundles.of_call.get(call, -1)
            self.blocks[number] = block
        block = self.blocks[number]
        if block is None or block.gradients is not torch.is_grad_enabled():
            return None
        device = x.get_device()
        if block.examples != x.shape[0] or block.index != device or block.stream != stream_of(device):
            return None
        place = block.part.places[call]
        index = place.index
        if place.changes != Changes.count:
            place.check(norm, block.moments, not self.bundles.learned)
        if index in block.ran or not place.usable:
            return None
        if residual is not None and residual.__class__ is not Tensor:
            return None
        key = _key_of(x, residual, relu)
        kernels: Any = place.kernels.get(key, UNKNOWN)
        if kernels is UNKNOWN:
            if len(place.kernels) >= KEPT:
                place.kernels.clear()
            kernels = place.kernels[key] = self._prepare(norm, x, residual, relu, block)
        if kernels is None or kernels.groups != block.layout.groups[index]:  # m may change inside a forward
            return None
        y = self._run(place, target, block, kernels, norm, x, residual, segment)
        if y is None:
            return None
        block.ran.add(index)
        if place.tracks:
            block.untracked[index] = kernels.values
        if repeated is not None:
            repeated[call] = Repeated(key, self._again(place, block, kernels))
        if norm.then:
            y = norm._finish(y, residual is not None or relu)
        return y

    def _run(
        self,
        place: Place,
        target: int | None,
        block: Block,
        kernels: Any,
        norm: Any,
        x: Tensor,
        residual: Tensor | None,
        segment: Any,
    ) -> Tensor | None:
        """The result of prepared kernels. None if the norm must take the long way."""
        index, region = place.index, segment if norm.rebuilds else None
        rows = block.rows[index]
        if place.settled:
            collecting, buffers, dtype, device = block.collecting, norm._buffers, rows.dtype, rows.get_device()
            if index not in block.settled or (block.gradients and collecting is None):
                return None
            mean, var = running = buffers["running_mean"], buffers["running_var"]
            # Callers may exchange buffers without a notice, and kernels read them from their addresses on.
            if mean.dtype is not dtype or var.dtype is not dtype or mean.get_device() != device:
                return None
            if var.get_device() != device or not mean.is_contiguous() or not var.is_contiguous():
                return None
            if norm.rebuilds or segment is not OUTSIDE or not collects(block.settled[index], block):
                return None
            if collecting is not None:
                collecting.ran.add(index)
            start = block.layout.starts[index]
            return normalize_settled(x, rows, residual, kernels, block.memory, start, running, block.averages(index))
        return normalize(x, rows, residual, kernels, block.memory, block.layout.starts[index], region)

    def _again(self, place: Place, block: Block, kernels: Any) -> Callable[[Tensor, Tensor | None, Any], Tensor]:
        """The last `_run`, for a recomputation."""
        rows, start, memory = block.rows[place.index], block.layout.starts[place.index], block.memory
        return lambda x, residual, region: normalize(x, rows, residual, kernels, memory, start, region)

    def _prepare(self, norm: Any, x: Tensor, residual: Tensor | None, relu: bool, block: Block) -> RowKernels | None:
        kernels_for = settled_row_kernels_for if norm.runs_settled() else row_kernels_for
        return prepare(norm, x, residual, relu, block, kernels_for)

    def _block(self, call: int, target: int | None, norm: Any, x: Tensor) -> Block | None:
        """Compute the bundle of a call, and memory for the moments of its norms."""
        if row_kernels_for(x, 0) is None or not closed.applicable():
            return None
        results = self.memo.setdefault((x.device.index, torch.is_grad_enabled()), Results())
        if not isinstance(results, Results):
            return None
        dtype = statistics_dtype(x)
        context = Context(x.device, dtype, {}, x.shape[0])
        with unseen():
            if norm.runs_settled() not in self.bundles.kernels_built:
                first_step.build(self.bundles, None if self.model is None else self.model.module(), call, x, context)
            self.bundles.fill(call, target, context, results)
        number = self.bundles.of_call.get(call)
        if number is None or call not in results.rows:
            return None
        part = self.bundles.parts[number]
        rows, groups = [results.rows[each.identity] for each in part.calls], groups_in(part, context)
        # A norm that took the long way may have made the rows, for another number of examples.
        if rows[0].dtype != dtype or [each.shape[1] for each in rows] != groups or stream_of(x.get_device()) < 0:
            return None
        if self._sharded(part):
            return None
        given = ShortPart.of(part, self.bundles.learned), dtype, groups, x, rows
        return Block(*given, settled_states(part), results.collecting.get(number), results.gradients.get(number))

    def _sharded(self, part: Part) -> bool:
        """Whether FSDP shards norms of this part in several units. Looked for again if there are other parameters."""
        if part.sharded is None or part.sharded[0] is not part.fitting:
            model = None if self.model is None else self.model.module()
            part.sharded = part.fitting, in_inner_units(model, (call.norm.module() for call in part.calls))
        return part.sharded[1]

    def waits(self, call: int) -> bool:
        """Whether an update of this call's norm is still to be made."""
        block = self.blocks.get(self.bundles.of_call.get(call, -1))
        return block is not None and block.part.places[call].index in block.untracked

    def track(self) -> None:
        """Update the running statistics of the norms that ran."""
        for block in self.blocks.values():
            if block is not None and block.untracked:
                _track(block)


def prepare(
    norm: Any,
    x: Tensor,
    residual: Tensor | None,
    relu: bool,
    block: Block,
    kernels_for: Callable[[Tensor, int], type | None],
    **options: Any,
) -> RowKernels | None:
    """The kernels of a norm for x of this shape. None if it must take the long way."""
    if x.dim() not in norm.input_dims or x.shape[1] != norm.num_features or x.numel() == 0:
        return None
    if not x.is_contiguous(memory_format=memory_format_of(x)) or statistics_dtype(x) != block.moments.dtype:
        return None
    if residual is not None:
        same = residual.__class__ is Tensor and (residual.dtype, residual.device) == (x.dtype, x.device)
        if not same or (residual.shape, residual.stride()) != (x.shape, x.stride()):
            return None
    size = norm.statistics_batch_size or 0
    kind = kernels_for(x, size)
    if kind is None:
        return None
    settled = norm.runs_settled()
    if norm.gain_logit is None or (settled and norm.runs_faded()):
        if not settled:
            check_enough_values(x, norm.statistics_batch_size, norm)
        if lone_last(x, size):
            return None
    options |= {"residual": residual is not None, "relu": relu, "pitch": block.part.pitch}
    kernels: RowKernels = kind(x, size, norm.eps, **options)
    return kernels


def _track(block: Block) -> None:
    untracked, block.untracked = block.untracked, {}
    part, layout = block.part, block.layout

    def updates() -> list[Update]:
        return [
            Update(
                part.norms[index], layout.starts[index], layout.groups[index], part.channels[index], values,
                block.examples,
            )
            for index, values in untracked.items()
        ]  # fmt: skip

    key = layout, block.examples, tuple(untracked.items())
    track_together(block.moments, [part.norms[index] for index in untracked], key, updates, part.tables)
