"""Frozen batch norms: modules that normalize by fixed statistics, such as `torchvision.ops.FrozenBatchNorm2d`.

Such a module keeps γ, β and the statistics as buffers and computes x·scale + shift. Its running statistics came from
trained weights, so its output is about N(β, γ²) for every input. The product and the sum would hide this. So the
recording runs `F.batch_norm` with the same tensors instead, and the rule for batch norms follows.

torchvision, timm, detectron2, DETR and others each have a class of their own. They are recognised by their buffers and
by their name, so none of these libraries is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

_BUFFERS = {"weight", "bias", "running_mean", "running_var"}
_THEN = ("drop", "act")  # timm's class applies these children to its result


def is_frozen(module: nn.Module) -> bool:
    """Whether the module is a frozen batch norm: its buffers and the name of its class say so."""
    if "FrozenBatchNorm" not in type(module).__name__ or module._parameters or "forward" in vars(module):
        return False
    shapes = {tensor.shape for name in _BUFFERS if (tensor := module._buffers.get(name)) is not None}
    found = module._buffers.keys() >= _BUFFERS and len(shapes) == 1 and len(next(iter(shapes))) == 1
    return found and set(module._modules) <= set(_THEN)


def stub(module: Any) -> Callable[[Tensor], Any]:
    """The forward of a frozen batch norm, as one call of `F.batch_norm`."""

    def forward(x: Tensor) -> Any:
        given = (module.running_mean, module.running_var, module.weight, module.bias)
        mean, var, weight, bias = (t if t.dtype == x.dtype else t.to(x.dtype) for t in given)
        y = F.batch_norm(x, mean, var, weight, bias, False, 0.0, getattr(module, "eps", 1e-5))
        for child in _THEN:
            if child in module._modules:
                y = getattr(module, child)(y)
        return y

    return forward
