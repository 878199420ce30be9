"""Batch Kalman Normalization for PyTorch: train deep networks when very few examples fit on a device."""

from kalmannorm import functional, moments
from kalmannorm._model.accumulate import accumulate_statistics
from kalmannorm._model.calibration import calibrate_priors
from kalmannorm._model.closing import ClosingPhase
from kalmannorm._model.convert import convert, rewire, to_batchnorm, wiring
from kalmannorm._model.deploy import fold, freeze_priors
from kalmannorm._model.fusion import Fusion, fuse
from kalmannorm._model.graphed import graphed
from kalmannorm._model.norm_classes import register_norm
from kalmannorm._model.norm_layer import norm_layer
from kalmannorm._model.optimization import gains, parameter_groups
from kalmannorm._model.recalibrate import Recalibration, finish_on_population, recalibrate
from kalmannorm._model.settings import check_statistics, freeze_statistics, set_inference
from kalmannorm._model.wiring_report import NormWiring, Wiring
from kalmannorm._norms.baselines import (
    BatchRenorm1d,
    BatchRenorm2d,
    BatchRenorm3d,
    GhostBatchNorm1d,
    GhostBatchNorm2d,
    GhostBatchNorm3d,
)
from kalmannorm._norms.grouped import GroupedNorm
from kalmannorm._norms.kalman import BatchKalmanNorm, BatchKalmanNorm1d, BatchKalmanNorm2d, BatchKalmanNorm3d
from kalmannorm._norms.moving_average import (
    MovingAverageBatchNorm1d,
    MovingAverageBatchNorm2d,
    MovingAverageBatchNorm3d,
)
from kalmannorm._norms.online import OnlineNorm
from kalmannorm.functional import batch_kalman_norm
from kalmannorm.moments import Moments

__version__ = "0.1.0"

__all__ = [
    "BatchKalmanNorm",
    "BatchKalmanNorm1d",
    "BatchKalmanNorm2d",
    "BatchKalmanNorm3d",
    "BatchRenorm1d",
    "BatchRenorm2d",
    "BatchRenorm3d",
    "ClosingPhase",
    "Fusion",
    "GhostBatchNorm1d",
    "GhostBatchNorm2d",
    "GhostBatchNorm3d",
    "GroupedNorm",
    "Moments",
    "MovingAverageBatchNorm1d",
    "MovingAverageBatchNorm2d",
    "MovingAverageBatchNorm3d",
    "NormWiring",
    "OnlineNorm",
    "Recalibration",
    "Wiring",
    "__version__",
    "accumulate_statistics",
    "batch_kalman_norm",
    "calibrate_priors",
    "check_statistics",
    "convert",
    "finish_on_population",
    "fold",
    "freeze_priors",
    "freeze_statistics",
    "functional",
    "fuse",
    "gains",
    "graphed",
    "moments",
    "norm_layer",
    "parameter_groups",
    "recalibrate",
    "register_norm",
    "rewire",
    "set_inference",
    "to_batchnorm",
    "wiring",
]
