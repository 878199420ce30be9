"""Bundles on any device, in PyTorch operations: values and gradients in closed form, and values in plain operations.

One matrix holds the means and variances of all entries, (2, entries). Equal functions at the same level of different
layers run as one operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from kalmannorm._filter import gain_of, gain_slope
from kalmannorm._ops.propagate import aten_layers, native_layers
from kalmannorm._ops.propagate.bundle import (
    BIAS,
    GAIN,
    PRIOR_MEAN,
    PRIOR_VAR,
    RELU,
    ROWS,
    WEIGHT,
    Bundle,
    Elementwise,
    Function,
    Layer,
)
from kalmannorm.moments import Moments, add, closed, product, subtract
from kalmannorm.moments.activations import DENSITY, piecewise, through
from kalmannorm.moments.linear import group_weight, through_layer
from kalmannorm.moments.windows import windows

SMOOTH: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
}
"""Functions that are integrated by quadrature."""


def _with_slope(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    # Autograd is not used: in a checkpointed model the hooks on saved tensors would see these tensors.
    values = SMOOTH[name](x)
    if name == "tanh":
        return values, 1 - values.square()
    if name == "gelu":
        return values, torch.special.ndtr(x) + x * torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    share = values if name == "sigmoid" else torch.sigmoid(x)
    slope = share * (1 - share)
    return values, slope if name == "sigmoid" else torch.addcmul(share, x, slope)


Where = slice | Tensor
"""Positions of entries: a slice, or an index on the device."""
Tensors = Sequence[Tensor]
Saved = tuple[Tensor | None, ...]
_NONE: Saved = ()


class Made(NamedTuple):
    """The results of a forward: the rows of all norms (5, channels), and means and variances of the other results.

    `saved` and `state` are for the backward: tensors, and anything else.
    """

    rows: Tensor
    others: list[tuple[Tensor, Tensor]]
    saved: list[Tensor]
    state: Any


class _Work(NamedTuple):
    a: Where
    b: Where | None
    out: slice


class _Ready(NamedTuple):
    """The positions of all entries of a bundle, on a device."""

    elementwise: list[list[tuple[Elementwise, _Work]]]
    layers: list[list[tuple[Layer, _Work]]]
    results: list[Where]
    priors: Tensor  # the entries of the priors of all norms
    logits: Tensor  # for each channel of each norm: the position of its logit
    affine: Tensor  # (2, beliefs): where the gradients of β and γ from the norms are in (5, channels), or behind it
    device: torch.device
    geometries: dict[Any, aten_layers.Geometry]
    room: native_layers.Room

    def geometry(self, layer: Layer, dtype: torch.dtype) -> aten_layers.Geometry:
        if (layer.axes, dtype) not in self.geometries:
            with _disable_current_modes():
                self.geometries[layer.axes, dtype] = aten_layers.geometry(layer, dtype, self.device)
        return self.geometries[layer.axes, dtype]


def _ready(bundle: Bundle, device: torch.device) -> _Ready:
    if ("aten", device) not in bundle.tables:
        # The kept tensors are also used in training, and after a mode that makes fake tensors or traces.
        with torch.inference_mode(False), _disable_current_modes(), torch.device("cpu"):
            bundle.tables["aten", device] = _Ready(
                [[(each, _work(each, each.stop, device)) for each in stage.elementwise] for stage in bundle.stages],
                [
                    [(each, _work(each, each.start + each.outputs, device)) for each in stage.layers]
                    for stage in bundle.stages
                ],
                [positions_of(result, device) for result in bundle.results],
                torch.cat([*bundle.results[: len(bundle.norms)], torch.zeros(0, dtype=torch.long)]).to(device),
                bundle.logit_places.to(device),
                affine_places(bundle).to(device),
                device,
                {},
                {},
            )
    ready: _Ready = bundle.tables["aten", device]
    return ready


def affine_places(bundle: Bundle) -> Tensor:
    """For β and γ of each belief, the position of their gradient from a norm in (5, channels). -1: no norm has them."""
    known, start = dict[int | None, Tensor](), 0
    for norm in bundle.norms:
        for row, place in ((WEIGHT, norm.weight), (BIAS, norm.bias)):
            known[place] = row * bundle.channels + torch.arange(start, start + norm.channels)
        start += norm.channels
    known.pop(None, None)

    def places(of: list[tuple[int | None, int]]) -> Tensor:
        found = [known.get(place, torch.full((size,), -1)) for place, size in of]
        return torch.cat([torch.zeros(0, dtype=torch.long), *found])

    biases = [(belief.bias, belief.size) for belief in bundle.beliefs]
    return torch.stack([places(biases), places([(belief.weight, belief.size) for belief in bundle.beliefs])])


def affine_alone(bundle: Bundle) -> list[tuple[int, int, int, int]]:
    """γ and β of norms that are no beliefs of the bundle: position of the tensor, row, and first and last channel."""
    if "alone" not in bundle.tables:
        believed = {place for belief in bundle.beliefs for place in (belief.bias, belief.weight)}
        alone, start = list[tuple[int, int, int, int]](), 0
        for norm in bundle.norms:
            for row, place in ((WEIGHT, norm.weight), (BIAS, norm.bias)):
                if place is not None and place not in believed:
                    alone.append((place, row, start, start + norm.channels))
            start += norm.channels
        bundle.tables["alone"] = alone
    known: list[tuple[int, int, int, int]] = bundle.tables["alone"]
    return known


def _affine_gradients(bundle: Bundle, tensors: Tensors, grad_rows: Tensor, found: list[Tensor | None]) -> None:
    for place, row, start, stop in affine_alone(bundle):
        found[place] = grad_rows[row, start:stop].to(tensors[place].dtype)


def _work(each: Elementwise | Layer, stop: int, device: torch.device) -> _Work:
    b = each.b if isinstance(each, Elementwise) else None
    return _Work(positions_of(each.a, device), None if b is None else positions_of(b, device), slice(each.start, stop))


def positions_of(index: Tensor, device: torch.device) -> Where:
    start, count = int(index[0]), index.numel()
    together = torch.equal(index, torch.arange(start, start + count))
    return slice(start, start + count) if together else index.to(device)


def taken(entries: Tensor, where: Where) -> Tensor:
    return entries[:, where] if isinstance(where, slice) else entries.index_select(1, where)


def _added(entries: Tensor, where: Where, grads: Tensor) -> None:
    if isinstance(where, slice):
        entries[:, where] += grads
    else:  # unlike index_add_, deterministic on a GPU
        for row, grad in zip(entries, grads, strict=True):
            row.index_put_((where,), grad, accumulate=True)


def leaf_rows(bundle: Bundle, tensors: Tensors, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """β of all beliefs, concatenated, and γ of all beliefs."""

    def row(places: list[tuple[int | None, int]], missing: float) -> Tensor:
        parts = [
            torch.full((size,), missing, dtype=dtype, device=device) if place is None else tensors[place].to(dtype)
            for place, size in places
        ]
        return torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=device)

    return (
        row([(belief.bias, belief.size) for belief in bundle.beliefs], 0.0),
        row([(belief.weight, belief.size) for belief in bundle.beliefs], 1.0),
    )


def _leaves(bundle: Bundle, tensors: Tensors, dtype: torch.dtype, device: torch.device) -> Tensor:
    bias, weight = leaf_rows(bundle, tensors, dtype, device)
    rows = (
        [bias, *(tensors[each.mean][0] for each in bundle.given)],
        [
            weight.square(),
            *(tensors[each.var][0] for each in bundle.given),
        ],
    )
    return torch.stack([torch.cat(row) for row in rows])


def prepare(bundle: Bundle, tensors: Tensors, wanted: Sequence[bool]) -> None:
    """Nothing is prepared for certain tensors: see `triton_bundle`."""


def forward(
    bundle: Bundle, tensors: Tensors, dtype: torch.dtype, device: torch.device, gradients: bool, known: Any = None
) -> Made:
    ready, saved = _ready(bundle, device), list[Saved]()
    entries = torch.empty((2, bundle.entries), dtype=dtype, device=device)
    entries[:, : bundle.leaves] = _leaves(bundle, tensors, dtype, device)
    for elementwise, layers in zip(ready.elementwise, ready.layers, strict=True):
        for each, work in elementwise:
            saved.append(_apply(each.function, entries, work, gradients))
        for layer, work in layers:
            weight, seen = tensors[layer.weight].to(dtype), ready.geometry(layer, dtype)
            out = entries[:, work.out]
            away = aten_layers.forward(layer, taken(entries, work.a), weight, seen, out)
            if layer.bias is not None:
                out[0].add_(tensors[layer.bias])
            saved.append((away,))
    rows = _stacked(bundle, tensors, taken(entries, ready.priors), gains(bundle, tensors, ready.logits).to(dtype))
    # Copies, because views would keep all entries alive.
    others = [taken(entries, where).clone() for where in ready.results[len(bundle.norms) :]]
    kept = [entries, *(tensor for each in saved for tensor in each if tensor is not None)]
    present = [[tensor is not None for tensor in each] for each in saved]
    return Made(rows, [(part[:1], part[1:]) for part in others], kept, present)


def _stacked(bundle: Bundle, tensors: Tensors, priors: Tensor, gains: Tensor) -> Tensor:
    affine = [
        priors.new_full((norm.channels,), missing) if place is None else tensors[place].to(priors.dtype)
        for missing, places in ((1.0, [n.weight for n in bundle.norms]), (0.0, [n.bias for n in bundle.norms]))
        for norm, place in zip(bundle.norms, places, strict=True)
    ]
    return torch.cat([*affine, priors.reshape(-1), gains]).view(ROWS, -1)


def gains(bundle: Bundle, tensors: Tensors, places: Tensor) -> Tensor:
    """The gain of each channel of each norm. `places`: the position of its logit, see `Bundle.logit_places`."""
    if not bundle.norms:
        return torch.empty(0, device=places.device)
    logits = _logit_values(bundle, tensors)
    return torch.where(logits == math.inf, 1, gain_of(logits)).index_select(0, places)


def _logit_values(bundle: Bundle, tensors: Tensors) -> Tensor:
    """The logits of all norms. That of a norm without a prior is infinite: its gain is 1."""
    missing = tensors[0].new_full((1,), math.inf) if any(norm.logit is None for norm in bundle.norms) else None
    found = [missing if norm.logit is None else tensors[norm.logit].reshape(-1) for norm in bundle.norms]
    return torch.cat(found)  # type: ignore[arg-type]


def _grouped(layer: Layer, tensors: Tensors, dtype: torch.dtype) -> Tensor:
    weight = tensors[layer.weight].to(dtype)
    return group_weight(layer.a.numel(), weight, layer.groups, layer.transposed) if layer.axes else weight.unsqueeze(0)


def _apply(function: Function, entries: Tensor, work: _Work, gradients: bool) -> Saved:
    out, a = entries[:, work.out], taken(entries, work.a)
    if work.b is not None:
        b = taken(entries, work.b)
        if function.kind == "add":
            out[:] = a + b
        elif function.kind == "subtract":
            out[0], out[1] = a[0] - b[0], a[1] + b[1]
        else:
            out[0], out[1], _ = product(Moments(a[:1], a[1:]), Moments(b[:1], b[1:]))
        return _NONE
    if function.kind == "affine":
        scale, shift, spread = function.numbers
        out[0], out[1] = a[0] * scale + shift, a[1] * spread
        return _NONE
    if function.kind == "smooth":
        if not gradients:
            found = through(Moments(a[:1], a[1:]), SMOOTH[function.name])
            out[0], out[1] = found.mean[0], found.var[0]
            return _NONE
        value, result, kept = closed.quadrature(a[:1], a[1:], partial(_with_slope, function.name), DENSITY)
        out[0], out[1] = value[0], result[0]
        return kept
    mean, var = a.to(closed.working_dtype(a))
    if function == RELU:
        value, result, kept = closed.relu(mean, var)
    else:
        value, result, kept = closed.piecewise(mean, var, closed.Piecewise(function.knots, function.pieces))
    out[0], out[1] = value, result
    return kept if gradients else _NONE


def backward(
    bundle: Bundle,
    tensors: Tensors,
    saved: Sequence[Tensor],
    state: Any,
    grad_rows: Tensor | None,
    grad_results: Sequence[tuple[Tensor | None, Tensor | None]],
    asked: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients with respect to the tensors where `asked` is true.

    They follow from the gradients with respect to the rows of the norms, (5, channels), and to the other results.
    """
    entries, rest = saved[0], iter(saved[1:])
    ready = _ready(bundle, entries.device)
    kept = [tuple(next(rest) if there else None for there in each) for each in state]
    grads = torch.zeros_like(entries)
    if grad_rows is not None:
        _added(grads, ready.priors, grad_rows[PRIOR_MEAN : PRIOR_VAR + 1])
    add_results(grads, ready.results[len(bundle.norms) :], grad_results)
    found: list[Tensor | None] = [None] * len(tensors)
    for elementwise, layers in zip(reversed(ready.elementwise), reversed(ready.layers), strict=True):
        for layer, work in reversed(layers):
            seen = ready.geometry(layer, entries.dtype)
            _layer_gradient(layer, work, entries, grads, tensors, kept.pop()[0], seen, asked, ready.room, found)
        for each, work in reversed(elementwise):
            _function_gradient(each.function, work, entries, grads, kept.pop())
    from_norms = None
    if grad_rows is not None:
        _affine_gradients(bundle, tensors, grad_rows, found)
        _gain_gradients(bundle, tensors, grad_rows[GAIN], ready, found)
        from_norms = torch.cat([grad_rows.reshape(-1), grad_rows.new_zeros(1)])[ready.affine]
    _leaf_gradients(bundle, tensors, grads, from_norms, found)
    return [grad if wanted else None for grad, wanted in zip(found, asked, strict=True)]


def add_results(
    grads: Tensor, results: Sequence[Where], arrived: Sequence[tuple[Tensor | None, Tensor | None]]
) -> None:
    """Add the gradients of the results that are not rows of norms."""
    for where, pair in zip(results, arrived, strict=True):
        if pair[0] is not None or pair[1] is not None:
            rows = [torch.zeros_like(grads[0, : _size(where)]) if grad is None else grad.reshape(-1) for grad in pair]
            _added(grads, where, torch.stack(rows))


def _size(where: Where) -> int:
    return where.stop - where.start if isinstance(where, slice) else where.numel()


def _layer_gradient(
    layer: Layer,
    work: _Work,
    entries: Tensor,
    grads: Tensor,
    tensors: Tensors,
    away: Tensor | None,
    seen: aten_layers.Geometry,
    asked: Sequence[bool],
    room: native_layers.Room,
    found: list[Tensor | None],
) -> None:
    weight, given, grad = tensors[layer.weight], taken(entries, work.a), grads[:, work.out]
    d_given, d_weight = aten_layers.backward(
        layer, grad, given, weight.to(entries.dtype), away, seen, asked[layer.weight], room
    )
    _added(grads, work.a, d_given)
    if d_weight is not None:
        found[layer.weight] = d_weight.to(weight.dtype)
    if layer.bias is not None:
        found[layer.bias] = grad[0].to(tensors[layer.bias].dtype)


def _function_gradient(function: Function, work: _Work, entries: Tensor, grads: Tensor, saved: Saved) -> None:
    grad = grads[:, work.out].clone()
    if work.b is not None:
        if function.kind == "product":
            a, b = taken(entries, work.a), taken(entries, work.b)
            _added(grads, work.a, _product_gradient(grad, a, b))
            _added(grads, work.b, _product_gradient(grad, b, a))
            return
        _added(grads, work.a, grad)
        _added(grads, work.b, torch.stack([-grad[0], grad[1]]) if function.kind == "subtract" else grad)
        return
    if function.kind == "affine":
        scale, _, spread = function.numbers
        _added(grads, work.a, torch.stack([grad[0] * scale, grad[1] * spread]))
        return
    kept: Any = saved
    gradient = closed.relu_gradient if function == RELU else closed.jacobian_gradient
    d_mean, d_var = gradient(kept, *grad.to(kept[0].dtype))
    _added(grads, work.a, torch.stack([d_mean.reshape(-1), d_var.reshape(-1)]).to(grads.dtype))


def _product_gradient(grad: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([grad[0] * b[0] + 2 * grad[1] * b[1] * a[0], grad[1] * (b[1] + b[0].square())])


def _leaf_gradients(
    bundle: Bundle, tensors: Tensors, grads: Tensor, from_norms: Tensor | None, found: list[Tensor | None]
) -> None:
    _, weights = leaf_rows(bundle, tensors, grads.dtype, grads.device)
    by_weight = grads[1, : weights.numel()] * weights * 2
    by_bias = grads[0, : weights.numel()]
    if from_norms is not None:
        by_bias, by_weight = by_bias + from_norms[0], by_weight + from_norms[1]
    start = 0
    for belief in bundle.beliefs:
        stop = start + belief.size
        for place, row in ((belief.bias, by_bias), (belief.weight, by_weight)):
            if place is not None:
                found[place] = row[start:stop].to(tensors[place].dtype)
        start = stop
    for given in bundle.given:
        found[given.mean], found[given.var] = grads[:, start : start + given.size].unsqueeze(1)
        start += given.size


def _gain_gradients(
    bundle: Bundle, tensors: Tensors, grad_gains: Tensor, ready: _Ready, found: list[Tensor | None]
) -> None:
    logits = _logit_values(bundle, tensors)
    # Unlike index_add_, index_put_ is deterministic on a GPU.
    sums = grad_gains.new_zeros(logits.numel()).index_put_((ready.logits,), grad_gains, accumulate=True)
    slopes = gain_slope(logits) * sums
    for norm, part in zip(bundle.norms, torch.split(slopes, [norm.logits for norm in bundle.norms]), strict=True):
        if norm.logit is not None:
            found[norm.logit] = part.view(tensors[norm.logit].shape)


def spelt_out(bundle: Bundle, tensors: Tensors, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """The rows of the norms, then means and variances of the other results, differentiable to any order."""
    entries = _leaves(bundle, tensors, dtype, device)
    ready = _ready(bundle, device)
    for elementwise, layers in zip(ready.elementwise, ready.layers, strict=True):
        made: list[tuple[Elementwise | Layer, _Work]] = [*elementwise, *layers]
        for each, work in made:
            given = [taken(entries, where) for where in (work.a, work.b) if where is not None]
            m = _one(each, [Moments(part[:1], part[1:]) for part in given], tensors, dtype)
            entries = torch.cat([entries, torch.cat([m.mean, m.var])], 1)
    rows = _stacked(bundle, tensors, taken(entries, ready.priors), gains(bundle, tensors, ready.logits).to(dtype))
    found = [taken(entries, where).unsqueeze(1) for where in ready.results[len(bundle.norms) :]]
    return [rows, *(pair[0] for pair in found), *(pair[1] for pair in found)]


def _one(each: Elementwise | Layer, given: list[Moments], tensors: Tensors, dtype: torch.dtype) -> Moments:
    if isinstance(each, Layer):
        around = windows(each.axes, dtype, given[0].mean.device)
        m = through_layer(given[0], _grouped(each, tensors, dtype), around)
        return m if each.bias is None else Moments(m.mean + tensors[each.bias], m.var)
    function = each.function
    if len(given) == 2:
        both = add if function.kind == "add" else subtract if function.kind == "subtract" else product
        return both(*given)
    if function.kind == "affine":
        scale, shift, spread = function.numbers
        return Moments(given[0].mean * scale + shift, given[0].var * spread)
    if function.kind == "smooth":
        return through(given[0], SMOOTH[function.name])
    return piecewise(given[0], function.knots, function.pieces)
