"""Transitions: how the posterior of the layer before becomes this layer's prior.

`learned` is the paper's: mean_p = A mean, var_p = (A∘A) var + r. A is learned, and the whole model shares one noise r.
`identity` and `weights` use `previous` as the prior itself. For `weights`, `previous` is a belief that was propagated
through the layers between the two norms (see `kalmannorm.moments`). These two learn nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from kalmannorm import _filter as kalman
from kalmannorm._ops.dispatch import on_device_of, predicting_for, transformed
from kalmannorm._support.pickles import check_complete
from kalmannorm.moments import Moments, closed
from kalmannorm.moments.core import full_precision

TRANSITIONS = ("learned", "identity", "weights")
_STEPS = {"forward", "dense", "shared_noise", "predict_with_gain"}


class LearnedTransition(nn.Module):
    """A (C, P), dense or of low rank, initially zero, and the noise r, initially 1.

    So the initial prior is N(0, r) for every posterior of the layer before. This is about the output of a
    He-initialised layer on normalized features. A then learns from the means.

    The parameter `noise` holds r. |noise| is used, so no optimizer step can make the variance negative. If the argument
    `noise` is another transition, this one reads its parameter and registers none. Then r is in a state dict once.
    """

    def __init__(
        self,
        num_features: int,
        prior_features: int,
        *,
        rank: int | None = None,
        noise: nn.Parameter | LearnedTransition | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        options = {"device": device, "dtype": dtype}
        self.prior_features = prior_features
        self.rank = rank
        if rank is None:
            self.matrix = nn.Parameter(torch.empty(num_features, prior_features, **options))  # type: ignore[arg-type]
        else:
            self.left = nn.Parameter(torch.empty(num_features, rank, **options))  # type: ignore[arg-type]
            self.right = nn.Parameter(torch.empty(rank, prior_features, **options))  # type: ignore[arg-type]
        self._reset_matrix()
        self._lender = [noise] if isinstance(noise, LearnedTransition) else []  # in a list, so it is no child
        if noise is None:
            self.noise = nn.Parameter(torch.ones(1, **options))  # type: ignore[arg-type]
        elif isinstance(noise, nn.Parameter):
            self.noise = noise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        check_complete(self, ("prior_features", "rank", "_lender"))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        give_dimension(state_dict, prefix + "noise")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _reset_matrix(self) -> None:
        if self.rank is None:
            nn.init.zeros_(self.matrix)
        else:
            # One factor must be non-zero. Otherwise neither would ever receive a gradient.
            nn.init.zeros_(self.left)
            nn.init.xavier_uniform_(self.right)

    def reset_parameters(self) -> None:
        """A = 0 and r = 1. If other layers share the noise, it is reset for them too."""
        self._reset_matrix()
        nn.init.ones_(self.shared_noise())

    def shared_noise(self) -> nn.Parameter:
        """The parameter r of this transition, or of the one that lends it."""
        return self._lender[0].shared_noise() if self._lender else self.noise

    def tensors(self) -> tuple[Tensor, Tensor] | None:
        """A and r, for code that computes the prior without a call of this module.

        None if a call must be seen, because of hooks, of a parametrization or of methods that are not this class's.
        """
        own: dict[str, Any] = self.__dict__  # attributes of a module are slow to read
        if type(self) is not LearnedTransition or not _STEPS.isdisjoint(own):
            return None
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
            return None
        owner = self
        while owner._lender:
            owner = owner._lender[0]
        noise = owner._parameters.get("noise")
        if self.rank is None:
            matrix: Tensor | None = self._parameters.get("matrix")
        else:
            with full_precision(self.left.device):
                matrix = self.dense()
        return None if matrix is None or noise is None else (matrix, noise)

    def dense(self) -> Tensor:
        """A as a matrix, (C, P)."""
        return self.matrix if self.rank is None else self.left @ self.right

    def predict_with_gain(self, previous: Moments, logit: Tensor) -> tuple[Moments, Tensor] | None:
        """Prior and gain in one launch. None if the device or the tensors do not allow it."""
        if self.rank is not None or transformed():
            return None
        tensors = previous.mean, previous.var, self.matrix, self.shared_noise(), logit
        run = predicting_for(*tensors)
        if run is None:
            return None
        mean, var, gain = _predicted(run, *tensors)
        return Moments(mean, var), gain

    def forward(self, previous: Moments, full: bool = False) -> Moments:
        with full_precision(previous.mean.device):
            matrix = self.dense()
        noise = self.shared_noise().abs().to(matrix.device)
        return kalman.predict(previous.to(matrix.dtype), matrix, noise, full=full)

    def extra_repr(self) -> str:
        return f"prior_features={self.prior_features}" + ("" if self.rank is None else f", rank={self.rank}")


def give_dimension(state_dict: dict[str, Any], key: str) -> None:
    """Up to version 100 of the norms, a gain or a noise was a number without dimensions."""
    value = state_dict.get(key)
    if isinstance(value, Tensor) and value.dim() == 0:
        state_dict[key] = value.reshape(1)


def _one_by_one(mean: Tensor, var: Tensor, matrix: Tensor, noise: Tensor, logit: Tensor) -> tuple[Tensor, ...]:
    prior = kalman.predict(Moments(mean, var), matrix, noise.abs())
    return prior.mean, prior.var, kalman.gain_of(logit).expand(matrix.shape[0])


class _Predicted(torch.autograd.Function):
    """`_one_by_one` with the kernels of `run`. The gain is a row (C,), so no launch is needed to sum its gradient."""

    @staticmethod
    def forward(ctx: Any, run: ModuleType, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.run = run
        ctx.save_for_backward(*tensors)
        with on_device_of(tensors[0]):
            results: tuple[Tensor, ...] = run.forward(*(tensor.contiguous() for tensor in tensors))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, *closed.again(_one_by_one, tensors, grads)
        if grads[0] is None and grads[1] is None:
            logit = tensors[4]
            slope = None if grads[2] is None else (grads[2] * kalman.gain_slope(logit)).sum_to_size(logit.shape)
            return None, None, None, None, None, slope
        rows = (tensors[0].shape[0], tensors[2].shape[0])
        arrived = [tensors[0].new_zeros(rows) if grad is None else grad.contiguous() for grad in grads[:2]]
        gain = None if grads[2] is None else grads[2].contiguous()
        with on_device_of(tensors[0]):
            given = (tensor.contiguous() for tensor in tensors)
            return None, *ctx.run.backward(*arrived, gain, *given, ctx.needs_input_grad[3])


_predicted: Callable[..., tuple[Tensor, Tensor, Tensor]] = super(torch.autograd.Function, _Predicted).apply
"""`_Predicted.apply` without its checks for `torch.func`, which the caller has made."""
