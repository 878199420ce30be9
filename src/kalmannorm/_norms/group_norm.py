"""GroupNorm and InstanceNorm as replacements of a batch norm, with the children that it applied to its result."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F


class GroupNorm(nn.GroupNorm):
    """`torch.nn.GroupNorm`. `then` lists the children that are applied to the result, in order."""

    then: tuple[str, ...] = ()

    def forward(self, input: Tensor) -> Tensor:
        return _finish(self, super().forward(input))


class InstanceNorm(nn.Module):
    """Normalizes every channel of every example separately. Inputs have rank 3 or more. No running statistics."""

    then: tuple[str, ...] = ()

    def __init__(self, num_features: int, *, eps: float = 1e-5, affine: bool = True, **like: Any) -> None:
        super().__init__()
        self.num_features, self.eps, self.affine = num_features, eps, affine
        example = nn.GroupNorm(num_features, num_features, eps, affine, **like)
        self.weight, self.bias = example.weight, example.bias

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() < 3:
            raise ValueError(f"InstanceNorm needs positions to average over: x must be (N, C, *), got {input.dim()}D")
        return _finish(self, F.instance_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps))

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, affine={self.affine}"


def _finish(module: Any, y: Tensor) -> Tensor:
    for name in module.then:
        y = getattr(module, name)(y)
    return y
