"""The autograd node of a settled norm that has no prior, or whose prior has faded.

It reads nothing of other norms: its inputs are x, its own γ and β, and the probe of the closing phase. So no bundle has
to run before it, and the gradients of γ and β come from here. The gradient is that of no function, as in
`settled_rows.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kalmannorm._ops.normalize import registered_settled
from kalmannorm._ops.normalize.aten_settled_rows import op_inputs
from kalmannorm._ops.normalize.registered import watched
from kalmannorm._ops.normalize.row_kernels import Expected, Memory, Read, SettledAloneKernels

PROBE = 3
"""The number of the probe among the inputs of the node."""
WIDTH = 4
"""Gradients begin at multiples of so many values, 16 bytes in float32."""


class OwnGradients:
    """Memory for the gradients of γ and β of many norms in one backward, and gradients of their idle gains.

    A gain is idle if its prior has faded. Its gradient is zero: DDP waits for a gradient of each parameter. `gains`
    gets their shapes when their norms run: FSDP may have gathered a gain only then.
    """

    def __init__(self, channels: Sequence[int]) -> None:
        padded = [-(-count // WIDTH) * WIDTH for count in channels]
        self.sizes, self.gains = [size for size in padded for _ in range(2)], dict[int, torch.Size]()
        self.made: Made | None = None

    def of(self, index: int, like: Tensor, ctx: Any) -> tuple[Any, Any, Any, bool]:
        """Gradients of γ, β and the gain of one norm, and whether this backward adds up gradients at the probes.

        `ctx` is that of its node. The first node of a backward decides for all. A backward inside another one has
        memory of its own.
        """
        made, backward = self.made, torch._C._current_graph_task_id()
        if made is None or made.backward != backward:
            whole, adds = like.new_empty(sum(self.sizes)), adds_up(ctx.next_functions[PROBE][0])
            made = self.made = Made(backward, [*whole.split_with_sizes(self.sizes)], self._zeros(like), adds)
        parts = made.parts
        found = parts[2 * index], parts[2 * index + 1], made.gains.pop(index, None), made.adds
        # Each is given away once: autograd keeps a gradient without a copy only if nobody else has it.
        parts[2 * index] = parts[2 * index + 1] = None
        return found

    def _zeros(self, like: Tensor) -> dict[int, Tensor]:
        if not self.gains:
            return {}
        sizes = [shape.numel() for shape in self.gains.values()]
        parts = like.new_zeros(sum(sizes)).split_with_sizes(sizes)
        pairs = zip(self.gains.items(), parts, strict=True)
        return {index: part if len(shape) == 1 else part.view(shape) for (index, shape), part in pairs}

    def forget(self) -> None:
        self.made = None


class Made(NamedTuple):
    """What one backward has: gradients of γ and β in turn, those of gains, and whether it adds up at the probes."""

    backward: int
    parts: list[Any]
    gains: dict[int, Tensor]
    adds: bool


def adds_up(node: Any) -> bool:
    """Whether this backward adds up gradients at a leaf. `node` is the leaf's node.

    `backward(inputs=...)` with other inputs does not, and `torch.autograd.grad` returns the gradients instead.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad, for this leaf
        return False


class SettleAlone(torch.autograd.Function):
    """y from x, γ, β, the probe, an idle gain and a residual. The moments are written into memory that norms share."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        probe: Tensor,
        gain: Tensor | None,
        residual: Tensor | None,
        run: Any,
    ) -> Tensor:
        kernels, memory, start, read, expected, gradients, index = run
        y = kernels.settle(x, read, residual, memory, start)
        ctx.run = kernels, memory.scratch, start, expected, gradients, index, probe
        if kernels.keeps_output:
            ctx.save_for_backward(x, weight, bias, memory.moments, y)
        else:
            ctx.save_for_backward(x, weight, bias, memory.moments)
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        return (_refusing if torch.is_grad_enabled() else _differentiated)(ctx, grad_y)


def _differentiated(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    kernels, scratch, start, expected, gradients, index, probe = ctx.run
    x, weight, bias, moments, *rest = ctx.saved_tensors
    saved = x, rest[0] if rest else None, weight, bias, expected
    d_weight, d_bias, d_gain, adds = gradients.of(index, moments, ctx)
    if kernels.channels % WIDTH:
        d_weight, d_bias = d_weight[: kernels.channels], d_bias[: kernels.channels]
    if grad_y.__class__ is not Tensor or watched(x) or not (_readable(weight, moments) and _readable(bias, moments)):
        dx, d_weight, d_bias, collected, d_residual = _through_the_op(kernels, grad_y, saved, moments, start)
    else:
        collected, sums = None, probe.grad if adds else None
        if sums is None or not sums.is_contiguous():
            collected = sums = moments.new_zeros((kernels.channels, 3))
        memory = Memory(moments, scratch)
        dx, d_residual = kernels.differentiate(grad_y, saved, (d_weight, d_bias, sums), memory, start)
    if start == 0:  # the first of these norms, so the last of the backward
        scratch.memory = None
        gradients.forget()
    return dx, d_weight, d_bias, collected, d_gain, d_residual, None


def _readable(parameter: Tensor, moments: Tensor) -> bool:
    """Whether kernels can read it. It is the parameter as it is now, which may have got other memory (`p.data = …`)."""
    return parameter.dtype is moments.dtype and parameter.is_contiguous() and parameter.data_ptr() != 0


_refusing: Callable[..., tuple[Tensor | None, ...]] = once_differentiable(_differentiated)
"""With `create_graph=True` it raises an error when its results are differentiated. It takes longer."""


def _through_the_op(
    kernels: SettledAloneKernels, grad_y: Tensor, saved: Any, moments: Tensor, start: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients by the registered op, for those who watch it."""
    x, y, weight, bias, expected = saved
    saved = x, y, weight.to(moments.dtype), bias.to(moments.dtype), expected
    given = op_inputs(kernels, grad_y, saved, moments, start)
    dx, d_weight, d_bias, collected, *rest = registered_settled.backward(given)
    return dx, d_weight, d_bias, collected, rest[0] if rest else grad_y if kernels.residual else None


_apply: Callable[..., Tensor] = super(torch.autograd.Function, SettleAlone).apply
"""`SettleAlone.apply` without its checks for `torch.func`. The caller has made them."""


def settle_alone(
    x: Tensor,
    read: Read,
    probe: Tensor,
    gain: Tensor | None,
    residual: Tensor | None,
    kernels: SettledAloneKernels,
    memory: Memory,
    start: int,
    expected: Expected,
    gradients: OwnGradients,
    index: int,
) -> Tensor:
    """y. The averages are those of this forward. `index`: the place of the norm among those that share `gradients`."""
    if gain is not None:
        gradients.gains[index] = gain.shape
    run = kernels, memory, start, read, expected, gradients, index
    return _apply(x, read.weight, read.bias, probe, gain, residual, run)
