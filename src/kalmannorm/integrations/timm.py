"""`timm.create_model(..., norm_layer=norm_layer(2))`.

Some timm models build a norm and its activation as one layer. They ask timm for the partner of their norm that also
applies an activation, as BatchNormAct2d is the partner of BatchNorm2d. Importing this module adds the partner of
`KalmanNorm2d` to timm's tables. The activation stays the model's own.
"""

from __future__ import annotations

from typing import Any

from timm.layers import BatchNormAct2d, create_norm_act

from kalmannorm._model.norm_layer import KalmanNorm2d, norm_layer

__all__ = ["KalmanNormAct2d", "norm_layer"]

_ACTIVATION = ("apply_act", "act_layer", "act_kwargs", "inplace", "drop_layer")


class KalmanNormAct2d(KalmanNorm2d):
    """`KalmanNorm2d` followed by timm's drop layer and activation. It takes the arguments of BatchNormAct2d too."""

    plain_class = BatchNormAct2d

    def __init__(self, num_features: int, *arguments: Any, **options: Any) -> None:
        activation = {name: options.pop(name) for name in _ACTIVATION if name in options}
        super().__init__(num_features, *arguments, **options)
        like = BatchNormAct2d(1, **activation)
        self.drop, self.act = like.drop, like.act
        self.then = ("drop", "act")  # of this object: `rewire` changes its class


create_norm_act._NORM_TO_NORM_ACT_MAP[KalmanNorm2d.__name__.lower()] = KalmanNormAct2d
create_norm_act._NORM_ACT_TYPES.add(KalmanNormAct2d)
create_norm_act._NORM_ACT_REQUIRES_ARG.add(KalmanNormAct2d)
