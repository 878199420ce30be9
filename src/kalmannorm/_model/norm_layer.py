"""Norms for model constructors that build their own: `resnet50(norm_layer=kalmannorm.norm_layer(...))`.

A constructor calls its `norm_layer` with the number of channels only. No norm knows then which norms will feed it. So a
norm of this module is built with a gain, and waits. `rewire(model, example_input)` finds the sources of all norms. A
norm that waited then is the same as a converted one: it has the same class, and it has a gain only if it has a prior.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, Literal

import torch
from torch import nn

from kalmannorm._model.kept_classes import kept_class
from kalmannorm._norms.distributed import ProcessGroupChoice
from kalmannorm._norms.grouped import Inference
from kalmannorm._norms.kalman import BatchKalmanNorm, BatchKalmanNorm1d, BatchKalmanNorm2d, BatchKalmanNorm3d


class KalmanNorm(BatchKalmanNorm):
    """A norm that takes BatchNorm's arguments and waits for `kalmannorm.rewire`. Use `KalmanNorm1d`, `2d` or `3d`.

    Until then it normalizes with the batch alone, as BatchNorm does on groups, and warns once. The other arguments are
    those of `BatchKalmanNorm`.
    """

    wired_class: type[BatchKalmanNorm]
    plain_class: type[nn.Module]

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        statistics_batch_size: int | None = None,
        gain: float = 0.5,
        per_channel_gain: bool = False,
        inference: Inference = "population",
        total_variance: bool = True,
        observation_momentum: float = 0.02,
        process_group: ProcessGroupChoice = None,
    ) -> None:
        super().__init__(
            num_features,
            num_features,
            transition="weights",
            statistics_batch_size=statistics_batch_size,
            gain=gain,
            per_channel_gain=per_channel_gain,
            inference=inference,
            total_variance=total_variance,
            eps=eps,
            momentum=momentum,
            observation_momentum=observation_momentum,
            affine=affine,
            track_running_stats=track_running_stats,
            process_group=process_group,
            device=device,
            dtype=dtype,
        )
        self.converted_from = self.plain_class  # what `to_batchnorm` makes of it

    def settle(self, has_prior: bool) -> None:
        """Become a norm as `convert` makes it. Without a prior there is nothing to weight, so the gain is dropped."""
        if not has_prior:
            self.prior_features, self.gain_logit = None, None
        self.__class__ = kept_class(self.wired_class, self.plain_class)

    def _warn_without_previous(self) -> None:
        if not self._missed_previous and not torch.compiler.is_compiling():
            self._missed_previous = True
            warnings.warn(
                f"kalmannorm: a {type(self).__name__}({self.num_features}) is not wired: it normalizes with the batch "
                "alone. Call kalmannorm.rewire(model, example_input) after the model is built.",
                UserWarning,
                stacklevel=2,
            )


class KalmanNorm1d(KalmanNorm, nn.BatchNorm1d):
    __doc__ = KalmanNorm.__doc__
    input_dims = (2, 3)
    wired_class, plain_class = BatchKalmanNorm1d, nn.BatchNorm1d


class KalmanNorm2d(KalmanNorm, nn.BatchNorm2d):
    __doc__ = KalmanNorm.__doc__
    input_dims = (4,)
    wired_class, plain_class = BatchKalmanNorm2d, nn.BatchNorm2d


class KalmanNorm3d(KalmanNorm, nn.BatchNorm3d):
    __doc__ = KalmanNorm.__doc__
    input_dims = (5,)
    wired_class, plain_class = BatchKalmanNorm3d, nn.BatchNorm3d


CLASSES = {1: KalmanNorm1d, 2: KalmanNorm2d, 3: KalmanNorm3d}


def norm_layer(
    statistics_batch_size: int | None = None, *, dims: Literal[1, 2, 3] = 2, **options: Any
) -> functools.partial[KalmanNorm]:
    """What a model constructor takes as `norm_layer=`: builds a Kalman norm from a number of channels.

        model = torchvision.models.resnet50(norm_layer=kalmannorm.norm_layer(2))
        kalmannorm.rewire(model, torch.randn(2, 3, 224, 224))

    Call `rewire` once, after the model is built and before it is wrapped in DDP or `torch.compile`. Parameters exist
    from the beginning, so the optimizer may be built before or after it. BatchNorm checkpoints load before and after.
    For timm import `norm_layer` from `kalmannorm.integrations.timm`: timm pairs some norms with activations.

    Args:
        statistics_batch_size: m, the number of examples in a group. None takes the whole batch as one group.
        dims: the number of spatial dimensions of the features: 2 for images, 3 for volumes and videos.
        **options: `gain`, `per_channel_gain`, `inference`, `total_variance`, `momentum`, `observation_momentum`,
            `process_group`, `eps` and `affine`, as in `BatchKalmanNorm2d`.
    """
    if dims not in CLASSES:
        raise ValueError(f"dims must be 1, 2 or 3, got {dims!r}")
    kind = CLASSES[dims]
    kind(1, statistics_batch_size=statistics_batch_size, **options)  # checks the options before a model is built
    return functools.partial(kind, statistics_batch_size=statistics_batch_size, **options)
