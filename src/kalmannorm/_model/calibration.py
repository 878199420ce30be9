"""Calibrated priors: the prior of a trained network meets the running statistics that the network was trained with.

The prior of `transition="weights"` assumes independent inputs. Trained weights make use of dependent ones, so the prior
variance is often 2 to 4 times too small. For a network that was trained with batch norm the right level is known: its
running statistics. So each prior gets two constants per channel,

    mean_p' = scale mean_p + shift      var_p' = scale² var_p

which make it equal to the running statistics of now. Later the prior moves with the weights, in proportion.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kalmannorm._norms.kalman import BatchKalmanNorm
from kalmannorm._wiring.program import Context
from kalmannorm.moments import Moments

FORGOTTEN = 0.05
"""Statistics count as trained if their initial values, 0 and 1, have at most this weight in them."""


def calibrate_priors(model: nn.Module) -> None:
    """Calibrate the priors of a converted model to its running statistics, with two constants per channel.

    `convert` does this for norms with trained statistics. Call it if the BatchNorm checkpoint was loaded after the
    conversion, and before training. The constants are buffers, `prior_scale` and `prior_shift`, in the state dict.
    `population` inference stays the same. The model has to be converted with `transition="weights"`.
    """
    norms = [module for module in model.modules() if isinstance(module, BatchKalmanNorm) and _predicts(module)]
    if not norms:
        raise ValueError(
            f"calibrate_priors: {type(model).__name__} contains no norm with a prior from weights; convert it with "
            "kalmannorm.convert(model, example_input, transition='weights')"
        )
    calibrate(norms)


def _predicts(norm: BatchKalmanNorm) -> bool:
    """Whether a prior from weights reaches this norm, and it has running statistics."""
    weights = norm.wire is not None and norm.transition_kind == "weights"
    return weights and norm.gain_logit is not None and norm.running_mean is not None


def has_trained_statistics(norm: Any) -> bool:
    """Whether a batch norm has the statistics of a training. Old checkpoints do not count their batches."""
    if norm.running_mean is None or norm.running_var is None or norm.running_mean.is_meta:
        return False
    batches = 0 if norm.num_batches_tracked is None else int(norm.num_batches_tracked)
    if batches == 0:
        return bool(norm.running_mean.any()) or not bool((norm.running_var == 1).all())
    return norm.momentum is None or (1 - norm.momentum) ** batches <= FORGOTTEN


@torch.no_grad()
def calibrate(norms: list[BatchKalmanNorm]) -> None:
    """Calibrate those of these norms that have a prior from weights."""
    for norm in filter(_predicts, norms):
        norm.add_calibration()
        norm.prior_scale.fill_(1)
        norm.prior_shift.zero_()
        assert norm.running_mean is not None
        context = Context(norm.running_mean.device, norm.running_mean.dtype, {})
        targets = {path.target for paths in norm.wire.paths for path in paths if path.target is not None}
        priors = [norm.wire.relay.program.evaluate(target, context, {}) for target in sorted(targets)]
        means, variances = torch.cat([prior.mean for prior in priors]), torch.cat([prior.var for prior in priors])
        # A norm that runs several times has one set of running statistics for all of its calls.
        norm.calibrate(Moments(means, variances).pooled())
