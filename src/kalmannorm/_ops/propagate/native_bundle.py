"""Runs a bundle on a CPU in C, one call in each direction: see `native.c`. The functions are those of `aten.py`.

It runs bundles with dense layers, sums, products, scalings and ReLUs, whose tensors all have the dtype of the moments.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalmannorm._ops.native_library import library, usable
from kalmannorm._ops.propagate import aten, aten_layers
from kalmannorm._ops.propagate.aten import Made
from kalmannorm._ops.propagate.bundle import GAIN, RELU, Bundle, Elementwise, Function, Layer
from kalmannorm._ops.propagate.native_layers import CLayer, gradient_like, laid_out

Tensors = Sequence[Tensor]
KINDS = ("add", "subtract", "product", "affine", "relu", "layer")
NOTHING = -1


def _structure(name: str, *fields: str) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": [(field, ctypes.c_long) for field in fields]})


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_long) for name in ("kind", "count", "start", "a0", "b0", "size")),
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("numbers", ctypes.c_double * 3),
        ("layer", CLayer),
        *((name, ctypes.c_long) for name in ("weight", "bias", "away")),
    ]


_Belief = _structure("_Belief", "bias", "weight", "size")
_Given = _structure("_Given", "mean", "var", "size")
_Norm = _structure("_Norm", "weight", "bias", "logit", "logits", "channels")
_Alone = _structure("_Alone", "place", "row", "first", "stop")
_LISTS = ("belief", "given", "step", "norm", "alone", "priors", "affine")


class _Bundle(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_long) for name in ("entries", "beliefs", "givens", "steps", "norms", "alones", "channels")),
        *((name, ctypes.c_void_p) for name in _LISTS),
    ]


class _Program(NamedTuple):
    """A bundle as the kernels read it, for weights of certain layouts. `kept`: memory to which it points."""

    bundle: _Bundle
    aways: int
    small: list[int]  # tensors whose gradients are small
    sizes: list[int]  # of these
    large: list[int]
    results: list[Any]
    room: dict[int, Tensor]
    kept: list[Any]


def applies(bundle: Bundle, dtype: torch.dtype, tensors: Tensors) -> bool:
    """Whether the kernels can run the bundle on these tensors."""
    if not tensors or not _readable(bundle, dtype, tensors):
        return False
    for stage in bundle.stages:
        if any(_kind(each.function) is None for each in stage.elementwise):
            return False
        if any(layer.groups != 1 or layer.transposed for layer in stage.layers):
            return False
    return True


def _readable(bundle: Bundle, dtype: torch.dtype, tensors: Tensors) -> bool:
    weights = {layer.weight for stage in bundle.stages for layer in stage.layers}
    return usable(tensors[0]) and all(
        tensor.dtype == dtype and (laid_out(tensor)[0] is tensor if place in weights else tensor.is_contiguous())
        for place, tensor in enumerate(tensors)
    )


def _kind(function: Function) -> int | None:
    name = "relu" if function == RELU else function.kind
    return KINDS.index(name) if name in KINDS else None


def prepare(bundle: Bundle, tensors: Tensors, wanted: Sequence[bool]) -> None:
    """Nothing is prepared for certain tensors: see `triton_bundle`."""


def _program(bundle: Bundle, tensors: Tensors, dtype: torch.dtype) -> _Program:
    layers = [layer for stage in bundle.stages for layer in stage.layers]
    key = "native", dtype, tuple(tensors[layer.weight].is_contiguous() for layer in layers)
    if key not in bundle.tables:
        # The kept tensors are also used in training, and there may be another default device.
        with torch.inference_mode(False), torch.device("cpu"):
            bundle.tables[key] = _made(bundle, tensors, dtype)
    program: _Program = bundle.tables[key]
    return program


def _place(place: int | None) -> int:
    return NOTHING if place is None else place


def _made(bundle: Bundle, tensors: Tensors, dtype: torch.dtype) -> _Program:
    kept: list[Any] = []

    def operand(index: Tensor) -> tuple[int, int | None]:
        """The first entry, and the address of a list if the entries are not adjacent."""
        where = aten.positions_of(index, torch.device("cpu"))
        if isinstance(where, slice):
            return where.start, None
        kept.append(where)
        return 0, where.data_ptr()

    def listed(kind: Any, rows: Sequence[Any]) -> int:
        array = (kind * max(len(rows), 1))(*rows)
        kept.append(array)
        return ctypes.addressof(array)

    aways, steps = 0, list[_Step]()
    for stage in bundle.stages:
        for each in stage.elementwise:
            steps.append(_elementwise(each, operand))
        for layer in stage.layers:
            step, seen = _layer(layer, tensors[layer.weight], dtype, operand, aways)
            kept.append(seen)
            aways += 0 if step.away == NOTHING else step.layer.outputs * step.layer.kinds
            steps.append(step)
    priors = torch.cat([*bundle.results[: len(bundle.norms)], torch.zeros(0, dtype=torch.long)])
    affine = aten.affine_places(bundle).contiguous()
    kept += [priors, affine]
    alone = aten.affine_alone(bundle)
    beliefs = [_Belief(_place(each.bias), _place(each.weight), each.size) for each in bundle.beliefs]
    norms = [
        _Norm(_place(each.weight), _place(each.bias), _place(each.logit), each.logits, each.channels)
        for each in bundle.norms
    ]
    whole = _Bundle(
        bundle.entries, len(beliefs), len(bundle.given), len(steps), len(norms), len(alone), bundle.channels,
        listed(_Belief, beliefs), listed(_Given, [_Given(*each) for each in bundle.given]), listed(_Step, steps),
        listed(_Norm, norms), listed(_Alone, [_Alone(*each) for each in alone]), priors.data_ptr(), affine.data_ptr(),
    )  # fmt: skip
    large = sorted({layer.weight for stage in bundle.stages for layer in stage.layers})
    small = [place for place in range(len(tensors)) if place not in large]
    results = [aten.positions_of(result, torch.device("cpu")) for result in bundle.results[len(bundle.norms) :]]
    return _Program(whole, aways, small, [tensors[place].numel() for place in small], large, results, {}, kept)


def _elementwise(each: Elementwise, operand: Any) -> _Step:
    kind = _kind(each.function)
    assert kind is not None, "see `applies`"
    step = _Step(kind=kind, count=each.a.numel(), start=each.start)
    step.a0, step.a = operand(each.a)
    if each.b is not None:
        step.b0, step.b = operand(each.b)
    if each.function.kind == "affine":
        step.numbers[:] = each.function.numbers
    return step


def _layer(
    layer: Layer, weight: Tensor, dtype: torch.dtype, operand: Any, aways: int
) -> tuple[_Step, aten_layers.Geometry]:
    seen = aten_layers.geometry(layer, dtype, torch.device("cpu"))
    step = _Step(kind=KINDS.index("layer"), count=layer.outputs, start=layer.start, size=layer.a.numel())
    step.a0, step.a = operand(layer.a)
    step.layer = CLayer.of(weight, laid_out(weight)[1], seen[:3])
    step.weight, step.bias = layer.weight, _place(layer.bias)
    step.away = NOTHING if len(seen.of_kinds) == 1 else aways
    return step, seen


def _addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*[None if t is None else t.data_ptr() for t in tensors])


def _run(name: str, dtype: torch.dtype, program: _Program, *given: Any) -> None:
    found = library(dtype)
    assert found is not None, "see `applies`"
    if getattr(found, name)(ctypes.byref(program.bundle), *given, torch.get_num_threads()) != 0:
        raise MemoryError("kalmannorm: no memory for the priors of a model")


def forward(
    bundle: Bundle, tensors: Tensors, dtype: torch.dtype, device: torch.device, gradients: bool, known: Any = None
) -> Made:
    if not _readable(bundle, dtype, tensors):  # someone changed the layout of a weight
        return aten.forward(bundle, tensors, dtype, device, gradients)
    program = _program(bundle, tensors, dtype)
    sizes = (2, bundle.entries), (program.aways,), (5, bundle.channels)
    entries, aways, rows = (torch.empty(size, dtype=dtype, device=device) for size in sizes)
    _run("bundle_forward", dtype, program, _addresses(tensors), entries.data_ptr(), aways.data_ptr(), rows.data_ptr())
    # By torch, as for a norm without a bundle: the sigmoid of C rounds differently.
    rows[GAIN] = aten.gains(bundle, tensors, bundle.logit_places)
    others = [aten.taken(entries, where).clone() for where in program.results]
    return Made(rows, [(part[:1], part[1:]) for part in others], [entries, aways], program)


def backward(
    bundle: Bundle,
    tensors: Tensors,
    saved: Sequence[Tensor],
    state: Any,
    grad_rows: Tensor | None,
    grad_results: Sequence[tuple[Tensor | None, Tensor | None]],
    asked: Sequence[bool],
) -> list[Tensor | None]:
    if not isinstance(state, _Program):
        return aten.backward(bundle, tensors, saved, state, grad_rows, grad_results, asked)
    entries, aways = saved
    program, grads = state, torch.zeros_like(entries)
    aten.add_results(grads, program.results, grad_results)
    found: list[Tensor | None] = [None] * len(tensors)
    # γ, β and gains in one tensor: they are many. If no row has a gradient, some of them get none.
    parts = entries.new_zeros(sum(program.sizes)).split(program.sizes)  # type: ignore[no-untyped-call]
    for place, part in zip(program.small, parts, strict=True):
        if asked[place]:
            found[place] = part if tensors[place].dim() == 1 else part.view(tensors[place].shape)
    for place in program.large:
        if asked[place]:
            found[place] = gradient_like(tensors[place], program.room, place)
    if grad_rows is not None:
        grad_rows = grad_rows.contiguous()
    _run(
        "bundle_backward", entries.dtype, program, _addresses(tensors), entries.data_ptr(), aways.data_ptr(),
        None if grad_rows is None else grad_rows.data_ptr(), grads.data_ptr(), _addresses(found),
    )  # fmt: skip
    return found
