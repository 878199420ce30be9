"""Finds the kernels of a model's training step before its first norm runs, and has them built together.

The example of the conversion tells the shape of every norm's input. The input of the first norm tells how the present
batch differs from the example: the number of examples, the image size, the dtype and the layout. So nothing of the
model has to run. Where this prediction is wrong, a kernel is built at its first launch as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn

from kalmannorm._ops.dispatch import (
    filters_for,
    learned_kernels_for,
    on_device_of,
    row_kernels_for,
    settled_alone_kernels_for,
    settled_row_kernels_for,
)
from kalmannorm._ops.filters.definition import Computation
from kalmannorm._ops.propagate.rows import spread
from kalmannorm._running.bundling import Call, Part
from kalmannorm._running.closing_sums import settled_states
from kalmannorm._running.layouts import Layout
from kalmannorm._running.prior_bundles import PriorBundles, groups_in, runner
from kalmannorm._support.fused_modules import REPORT
from kalmannorm._wiring.program import Context

if TYPE_CHECKING:  # importing it needs Triton
    from kalmannorm._ops.triton_building import Wanted

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def build(bundles: PriorBundles, model: nn.Module | None, call: int, x: Tensor, context: Context) -> None:
    """Build the kernels of a training step of the model. `x` is the input of the norm with this call.

    This is done once, and once more for settled norms, which have other kernels.
    """
    if not x.is_cuda or not torch.is_grad_enabled() or torch.cuda.is_current_stream_capturing():
        return
    bundles.update(context)
    norm: Any = next((each.norm.module() for each in bundles.calls if each.identity == call), None)
    if norm is None or not norm.training:
        return
    bundles.kernels_built.add(norm.runs_settled())
    try:
        from kalmannorm._ops import triton_building

        with on_device_of(x):
            triton_building.build(launches_of_step(bundles, model, call, x, context))
    except Exception:  # any error: a norm that runs raises it again
        return


def launches_of_step(
    bundles: PriorBundles, model: nn.Module | None, call: int, x: Tensor, context: Context
) -> list[Wanted]:
    """The launches of a forward and of its backward, as far as they can be predicted."""
    shapes = shapes_of_inputs(bundles.calls, call, x)
    fused = fused_norms(model)
    found = list[Any]()
    for part in [] if bundles.alone else bundles.parts:
        found += _of_bundle(part, context)
    for part in bundles.parts:
        found += _of_norms(part, shapes, fused, x, context, bundles)
    if model is not None:
        found += _of_filters(model, x.device)
    return found


def shapes_of_inputs(calls: Sequence[Call], call: int, x: Tensor) -> dict[int, tuple[int, ...]]:
    """The shapes of the inputs of all calls, from those of the example and from the input of one call."""
    example = next((each.shape for each in calls if each.identity == call), ())
    if len(example) != x.dim() or 0 in example:
        return {}
    found = {}
    for each in calls:
        pairs = zip(each.shape, example, x.shape, strict=False)
        sizes = [max(round(own * now / then), 1) for own, then, now in pairs]
        if len(each.shape) != len(example):  # another rank, as after a pooling: only the number of examples follows
            sizes[2:] = each.shape[2:]
        if len(each.shape) > 1:
            found[each.identity] = (sizes[0], each.shape[1], *sizes[2:])
    return found


def fused_norms(model: nn.Module | None) -> dict[int, tuple[bool, bool]]:
    """By identity of the norm: whether a residual and whether a ReLU is in its pass."""
    report = None if model is None else vars(model).get(REPORT)
    if model is None or report is None:
        return {}
    return {id(model.get_submodule(name)): ("sum" in kind, "ReLU" in kind) for name, kind in report.fused.items()}


def _of_filters(model: nn.Module, device: torch.device) -> Iterator[Wanted]:
    """The launches for computed filters. Mostly the forward has made its own before the first norm."""
    from kalmannorm._ops.triton_building import Wanted

    learning: dict[Any, bool] = {}
    for module in model.modules():
        computation, weight = getattr(type(module), "computation", None), module._parameters.get("weight")
        if computation in get_args(Computation) and weight is not None and weight.device == device:
            key = weight.dtype, computation
            if key in learning or filters_for(weight) is not None:
                learning[key] = learning.get(key, False) or weight.requires_grad
    for (dtype, computation), gradients in learning.items():
        from kalmannorm._ops.filters import triton_together

        for launch, given in triton_together.launches_of_step(dtype, computation, device, gradients=gradients):
            yield Wanted.of(launch, given)


def _of_bundle(part: Part, context: Context) -> Iterator[Wanted]:
    from kalmannorm._ops.propagate import triton_bundle
    from kalmannorm._ops.triton_building import Wanted

    tensors = list[Tensor]()
    for shape, owner, name, *_ in part.sources:
        if owner is None:  # computed by an earlier bundle
            tensors.append(torch.zeros(shape, device=context.device, dtype=context.dtype, requires_grad=True))
        else:
            tensors.append(owner.tensor(name))
    if runner(part.bundle, context, tensors) is not triton_bundle:
        return
    for launches, memory in triton_bundle.launches_of_step(part.bundle, tensors):
        for launch, given in launches.listed:
            yield Wanted.of(launch, given, memory)


class _Unallocated:
    """What `TritonRows` asks of x. It is on the device of the launches and has no memory."""

    def __init__(self, x: Tensor, device: torch.device) -> None:
        self.shape, self.dtype, self.device = x.shape, x.dtype, device
        self.stride, self.is_contiguous, self.numel = x.stride, x.is_contiguous, x.numel


def _of_norms(
    part: Part,
    shapes: dict[int, tuple[int, ...]],
    fused: dict[int, tuple[bool, bool]],
    x: Tensor,
    context: Context,
    bundles: PriorBundles,
) -> Iterator[Wanted]:
    from kalmannorm._ops.triton_building import Wanted

    groups, bundle, learned = groups_in(part, context), part.bundle, bundles.learned
    rows = spread(bundle, torch.empty((5, bundle.channels), device="meta"), groups)
    layout = Layout(groups, bundle.widths, learned, bool(settled_states(part)))
    moments = torch.empty(layout.total, device="meta")
    last = x.dim() in FORMATS and not x.is_contiguous()
    tracked: dict[Any, list[tuple[int, int]]] = {}
    for index, call in enumerate(part.calls):
        norm: Any = call.norm.module()
        shape = shapes.get(call.identity)
        if norm is None or shape is None or shape[0] != x.shape[0]:
            continue
        layout_of_x = FORMATS.get(len(shape), torch.contiguous_format) if last else torch.contiguous_format
        like = torch.empty(shape, dtype=x.dtype, device="meta", memory_format=layout_of_x)
        residual, relu = fused.get(id(norm), (False, False))
        options: dict[str, Any] = {}
        if learned:
            options["inputs"] = 0 if norm.transition is None else norm.prior_features
        kernels_for: Any = learned_kernels_for if learned else row_kernels_for
        if norm.runs_settled():
            if learned:
                continue
            kernels_for = settled_alone_kernels_for if bundles.alone else settled_row_kernels_for
        kind: Any = kernels_for(x, norm.statistics_batch_size or 0, **options)
        if kind is None:
            continue
        kernels = kind(
            _Unallocated(like, x.device), norm.statistics_batch_size or 0, norm.eps,
            residual=residual, relu=relu, pitch=bundle.channels, **options,
        )  # fmt: skip
        for launches, arguments in kernels.launches_of_step(like, rows[index], moments, layout.starts[index]):
            for launch, given in zip(launches, arguments, strict=True):
                yield Wanted.of(launch, given)
        if norm.track_running_stats:
            key = norm._averages(), norm.momentum is None, norm._buffers["observed_mean"] is not None
            tracked.setdefault(key, []).append((groups[index], bundle.widths[index]))
    for key, sizes in tracked.items():
        from kalmannorm._ops.track import triton_many

        yield Wanted.of(*triton_many.launch_of(x.device, triton_many.options_of(sizes, *key)))
