"""Arguments of the op, and how its results are compared."""

from __future__ import annotations

import torch

SHAPES = {
    "N6-C3-4x5": (6, 3, 4, 5),
    "N7-C2": (7, 2),  # no positions; ragged for every m but 1 and 7
    "N5-C4-L3": (5, 4, 3),
    "N4-C2-2x3x2": (4, 2, 2, 3, 2),
    "N3-C1-3x3": (3, 1, 3, 3),  # C = 1 is contiguous in both layouts
    "N2-C5-1x1": (2, 5, 1, 1),
    "N1-C3-7x5": (1, 3, 7, 5),
}


TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def channels_last(x: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()]) if x.dim() in formats else x


def arguments(shape, m, dtype=torch.float64, *, rows="groups", prior=True, device="cpu"):
    """Leaf inputs (x, prior mean, prior var, gain, weight, bias) with statistics in their own dtype."""
    C, groups = shape[1], -(-shape[0] // m)
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    G = groups if rows == "groups" else 1
    x = (torch.randn(shape, device=device) * 2 + 1).to(dtype)
    values = [torch.randn(G, C), torch.rand(G, C) + 0.5, torch.tensor(0.3), torch.randn(C), torch.randn(C)]
    rest = [v.to(device, statistics) for v in values]
    if not prior:
        rest[:3] = [None, None, None]
    return [None if t is None else t.requires_grad_() for t in (x, *rest)]


def relative_error(actual, expected):
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def assert_same(actual, expected, tolerance):
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.dtype == e.dtype
        assert a.shape == e.shape
        assert relative_error(a, e) < tolerance, f"result {index}"


def run(function, inputs, m, grads):
    outputs = function(*inputs, m, 1e-5)
    leaves = [t for t in inputs if t is not None]
    return outputs, torch.autograd.grad(outputs, leaves, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)])
