"""The op in PyTorch operations for a norm with a learned transition, with the interface of `triton_learned.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from kalmannorm._ops.normalize import aten
from kalmannorm._ops.normalize.arguments import Inputs, Results
from kalmannorm._ops.normalize.aten_rows import AtenRows
from kalmannorm._ops.normalize.row_kernels import Memory, Predicted, Transition
from kalmannorm._ops.predict import aten_predict


class AtenLearned(AtenRows):
    """One norm on x of one shape, on a CPU. `inputs` is P, or 0 for a norm without a prior."""

    def __init__(
        self, x: Tensor, size: int, eps: float, *, residual: bool, relu: bool, pitch: int, inputs: int
    ) -> None:
        super().__init__(x, size, eps, residual=residual, relu=relu, pitch=pitch)
        self.previous_shape, self.most_noises = (2, self.groups, inputs), self.channels

    def _part(self, moments: Tensor, start: int, first: int, count: int) -> Tensor:
        """Some of the six times (G, C) of this norm."""
        G, C = self.groups, self.channels
        return moments.as_strided((count, G, C), (G * C, C, 1), start + first * G * C)

    def filter(
        self, x: Tensor, rows: Tensor, residual: Tensor | None, given: Transition | None, memory: Memory, start: int
    ) -> tuple[Tensor, Tensor]:
        weight, bias, mean, var, gain = rows.unbind(0)
        # `.data`: other norms have saved the tensor for their backward, and nobody changes their part of it.
        own = memory.moments.data
        if given is not None:
            prior = self._part(own, start, 4, 2)
            aten_predict.forward(given, prior)
            mean, var = prior.unbind(0)
        inputs = Inputs(x, mean, var, gain, weight, bias, self.size, self.eps, residual, self.keeps_output)
        y, *moments = aten.forward(inputs)
        assert y is not None
        torch.stack(moments, out=self._part(own, start, 0, 4))  # type: ignore[arg-type]
        return y, self._part(memory.moments, start, 0, 2)

    def differentiate(
        self,
        grad_y: Tensor,
        grad_posterior: Tensor,
        x: Tensor,
        y: Tensor | None,
        rows: Tensor,
        given: Transition | None,
        memory: Memory,
        start: int,
        to_matrix: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Predicted]:
        if grad_y.stride() != self.strides:
            grad_y = torch.empty_like(x).copy_(grad_y)
        if y is not None:
            grad_y = torch.ops.aten.threshold_backward(grad_y, y, 0)
        weight, _, mean, var, gain = rows.unbind(0)
        if given is not None:
            mean, var = self._part(memory.moments, start, 4, 2).unbind(0)
        inputs = Inputs(x, mean, var, gain, weight, None, self.size, self.eps, None, False)
        to_mean, to_var = grad_posterior.unbind(0)
        grads, kept = Results(grad_y, to_mean, to_var, None, None), Results(None, *self.moments(memory.moments, start))
        dx, d_mean, d_var, d_gain, d_weight, d_bias = aten.backward(grads, inputs, kept, self.groups)
        d_rows = torch.stack([d_weight, d_bias, d_mean, d_var, d_gain])
        predicted = aten_predict.backward(d_mean, d_var, given, to_matrix)
        return dx, d_rows, grad_y if self.residual else None, predicted
