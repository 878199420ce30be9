"""`UNet(..., norm=("kalman", {"statistics_batch_size": 1}))`: importing this module registers the norm in MONAI.

MONAI's nets then build `KalmanNorm1d`, `2d` or `3d` by the number of their spatial dimensions. Call
`kalmannorm.rewire(net, example_input)` once after the net is built.
"""

from __future__ import annotations

from monai.networks.layers.factories import Norm

from kalmannorm._model.norm_layer import CLASSES, KalmanNorm

NAME = "kalman"


def kalman_factory(dim: int) -> type[KalmanNorm]:
    """The Kalman norm for a number of spatial dimensions."""
    return CLASSES[dim]


if NAME.upper() not in Norm.names:
    Norm.add_factory_callable(NAME, kalman_factory)
