"""A user's mistake names the argument, what was given and what would work."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from kalmannorm import (
    BatchKalmanNorm1d,
    BatchKalmanNorm2d,
    GhostBatchNorm2d,
    Moments,
    batch_kalman_norm,
    freeze_statistics,
    set_inference,
)


def moments(G, C):
    return Moments(torch.zeros(G, C), torch.ones(G, C))


X = torch.randn(4, 3, 2, 2)
ONE = torch.randn(2, 3, 1, 1)

CALLS = {
    "integer": (lambda: batch_kalman_norm(X.long(), None, None, None, None), TypeError, r"x .*int64.*x\.float\(\)"),
    "empty": (lambda: batch_kalman_norm(X[:0], None, None, None, None), ValueError, r"empty batch.*\(0, 3, 2, 2\)"),
    "no positions": (lambda: batch_kalman_norm(X[..., :0], None, None, None, None), ValueError, "empty"),
    "vector": (lambda: batch_kalman_norm(X[0, 0, 0], None, None, None, None), ValueError, r"x must be \(N, C, \*\)"),
    "weight": (
        lambda: batch_kalman_norm(X, None, None, torch.ones(5), None),
        ValueError,
        r"weight must be \(3,\).*\(5,\)",
    ),
    "bias": (lambda: batch_kalman_norm(X, None, None, None, torch.ones(2)), ValueError, r"bias must be \(3,\).*\(2,\)"),
    "prior width": (
        lambda: batch_kalman_norm(X, moments(1, 5), 0.5, None, None),
        ValueError,
        r"prior\.mean must be \(1, 3\).*got \(1, 5\)",
    ),
    "prior rows": (
        lambda: batch_kalman_norm(X, moments(3, 3), 0.5, None, None, statistics_batch_size=2),
        ValueError,
        r"prior\.mean must be \(2, 3\) or \(1, 3\).*got \(3, 3\)",
    ),
    "no gain": (lambda: batch_kalman_norm(X, moments(1, 3), None, None, None), ValueError, "gain must be given"),
    "gain 0": (lambda: batch_kalman_norm(X, moments(1, 3), 0, None, None), ValueError, r"gain .*\(0, 1\), got 0"),
    "gain 1": (lambda: batch_kalman_norm(X, moments(1, 3), 1.0, None, None), ValueError, r"gain .*\(0, 1\), got 1"),
    "gain nan": (lambda: batch_kalman_norm(X, moments(1, 3), float("nan"), None, None), ValueError, "gain .*got nan"),
    "gain shape": (
        lambda: batch_kalman_norm(X, moments(1, 3), torch.ones(2), None, None),
        ValueError,
        r"gain must be \(\), \(1,\) or \(3,\), got shape \(2,\)",
    ),
    "m 0": (
        lambda: batch_kalman_norm(X, None, None, None, None, statistics_batch_size=0),
        ValueError,
        "statistics_batch_size must be at least 1, got 0",
    ),
    "m float": (
        lambda: batch_kalman_norm(X, None, None, None, None, statistics_batch_size=2.0),
        TypeError,
        "statistics_batch_size must be an int, got 2.0",
    ),
    "covariance": (
        lambda: batch_kalman_norm(X, None, None, None, None, covariance="dense"),
        ValueError,
        "covariance must be 'diagonal' or 'full', got 'dense'",
    ),
    "one value": (
        lambda: batch_kalman_norm(ONE, None, None, None, None, statistics_batch_size=1),
        ValueError,
        "^with statistics_batch_size=1.*one value per channel.*Use 2 or more.*or give a prior",
    ),
    "one value, layer": (
        lambda: GhostBatchNorm2d(3)(ONE[:1]),
        ValueError,
        r"^a GhostBatchNorm2d\(3\): x of shape \(1, 3, 1, 1\) has one value per channel.* Use at least two examples\.$",
    ),
    "one value, one example": (
        lambda: BatchKalmanNorm1d(3, statistics_batch_size=2)(torch.randn(1, 3)),
        ValueError,
        "one value per channel.* Use at least two examples",
    ),
    "one value, full": (
        lambda: BatchKalmanNorm2d(3, statistics_batch_size=1, covariance="full", inference="batch").eval()(ONE),
        ValueError,
        "one value per channel",
    ),
    "one value, example": (
        lambda: BatchKalmanNorm2d(3, statistics_batch_size=1, inference="example").eval()(ONE),
        ValueError,
        "one value per channel",
    ),
    "previous rows": (
        lambda: BatchKalmanNorm2d(3, 3)(X, Moments(torch.zeros(2, 3), torch.ones(3, 3))),
        ValueError,
        r"must have the same shape, got \(2, 3\) and \(3, 3\)",
    ),
    "rank of x": (lambda: BatchKalmanNorm2d(3)(torch.randn(4, 3)), ValueError, r"x must be 4D.*\(4, 3\)"),
    "channels": (lambda: BatchKalmanNorm2d(5)(X), ValueError, "num_features = 5 channels, got 3"),
    "previous width": (
        lambda: BatchKalmanNorm2d(3, 8)(X, moments(1, 6)),
        ValueError,
        r"previous\.mean must be .*8.*got \(1, 6\)",
    ),
    "previous unexpected": (lambda: BatchKalmanNorm2d(3)(X, moments(1, 6)), ValueError, "prior_features=6"),
    "previous type": (
        lambda: BatchKalmanNorm2d(3, 3)(X, X),
        TypeError,
        r"previous must be kalmannorm.Moments, got a Tensor; pass norm\.posterior",
    ),
    "layer gain": (
        lambda: BatchKalmanNorm2d(3, 3, gain=1.0),
        ValueError,
        r"gain must lie inside \(0, 1\), got 1.0",
    ),
    "layer m": (lambda: BatchKalmanNorm2d(3, statistics_batch_size=-1), ValueError, "statistics_batch_size.*got -1"),
    "num_features": (lambda: BatchKalmanNorm2d(0), ValueError, "num_features must be at least 1, got 0"),
    "prior_features": (
        lambda: BatchKalmanNorm2d(3, 0),
        ValueError,
        "prior_features must be at least 1, got 0",
    ),
    "transition": (
        lambda: BatchKalmanNorm2d(3, 3, transition="linear"),
        ValueError,
        "transition must be one of.*'linear'",
    ),
    "identity width": (
        lambda: BatchKalmanNorm2d(3, 4, transition="identity"),
        ValueError,
        "prior_features must equal num_features = 3.*got 4",
    ),
    "rank": (lambda: BatchKalmanNorm2d(3, 3, rank=0), ValueError, "rank must be at least 1, got 0"),
    "noise": (lambda: BatchKalmanNorm2d(3, 3, noise=1.0), TypeError, "noise must be a torch.nn.Parameter.*got float"),
    "noise shape": (
        lambda: BatchKalmanNorm2d(3, 3, noise=nn.Parameter(torch.ones(2))),
        ValueError,
        r"noise must be one number or \(3,\), got shape \(2,\)",
    ),
    "full per channel": (
        lambda: BatchKalmanNorm2d(3, 3, covariance="full", per_channel_gain=True),
        ValueError,
        "per_channel_gain must be False",
    ),
    "example without m": (
        lambda: BatchKalmanNorm2d(3, inference="example"),
        ValueError,
        r"statistics_batch_size=None.*set_inference\(model, 'example', statistics_batch_size=m\)",
    ),
    "m of population": (
        lambda: set_inference(nn.Sequential(BatchKalmanNorm2d(3)), "population", statistics_batch_size=2),
        ValueError,
        "layer '0': statistics_batch_size must be None for inference='population', got 2",
    ),
    "m of example, 0": (
        lambda: set_inference(nn.Sequential(BatchKalmanNorm2d(3)), "example", statistics_batch_size=0),
        ValueError,
        "statistics_batch_size must be at least 1, got 0",
    ),
    "m of example, float": (
        lambda: BatchKalmanNorm2d(3).set_inference("example", statistics_batch_size=2.0),
        TypeError,
        "statistics_batch_size must be an int, got 2.0",
    ),
    "m of example, key": (
        lambda: set_inference(nn.Sequential(BatchKalmanNorm2d(3)), "example", statistics_batch_size={"1": 2}),
        ValueError,
        "keys without a norm in Sequential: '1'",
    ),
    "example with full": (
        lambda: BatchKalmanNorm2d(3, statistics_batch_size=2, covariance="full", inference="example"),
        ValueError,
        "covariance='full'",
    ),
    "example untracked": (
        lambda: BatchKalmanNorm2d(3, statistics_batch_size=2, track_running_stats=False, inference="example"),
        ValueError,
        "track_running_stats=False",
    ),
    "mode": (lambda: BatchKalmanNorm2d(3, inference="pop"), ValueError, "must be one of 'population', .*got 'pop'"),
    "prior type": (
        lambda: batch_kalman_norm(X, (torch.zeros(1, 3), torch.ones(1, 3)), 0.5, None, None),
        TypeError,
        "prior must be kalmannorm.Moments, got a tuple",
    ),
    "numpy x": (lambda: BatchKalmanNorm2d(3)(X.numpy()), TypeError, "x must be a torch.Tensor, got a ndarray"),
    "bool width": (lambda: BatchKalmanNorm2d(3, True), TypeError, "prior_features must be an int, got True"),
    "rank without A": (
        lambda: BatchKalmanNorm2d(3, 3, transition="weights", rank=2),
        ValueError,
        "rank belongs to transition='learned'",
    ),
    "noise without r": (
        lambda: BatchKalmanNorm2d(3, 3, transition="identity", noise=nn.Parameter(torch.ones(()))),
        ValueError,
        "noise belongs to transition='learned'",
    ),
    "momentum text": (lambda: BatchKalmanNorm2d(3, momentum="0.1"), TypeError, "momentum must be a number, got '0.1'"),
    "observation": (
        lambda: BatchKalmanNorm2d(3, observation_momentum=None),
        TypeError,
        "observation_momentum must be a number, got None",
    ),
    "eps": (lambda: BatchKalmanNorm2d(3, eps=-1.0), ValueError, "eps must lie in .*got -1.0"),
    "momentum": (lambda: BatchKalmanNorm2d(3, momentum=1.5), ValueError, r"momentum must lie in \[0, 1\], got 1.5"),
    "no norms to set": (
        lambda: set_inference(nn.Linear(2, 2), "batch"),
        ValueError,
        "Linear contains no norm of kalmannorm",
    ),
    "no norms to freeze": (lambda: freeze_statistics(nn.BatchNorm2d(3)), ValueError, "contains no norm"),
}


@pytest.mark.parametrize(("call", "kind", "message"), CALLS.values(), ids=CALLS.keys())
def test_message(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_a_tensor_gain_is_not_inspected():
    y, _ = batch_kalman_norm(X, moments(1, 3), torch.tensor(1.0), None, None)
    assert torch.isfinite(y).all()


def test_numbers_of_numpy_are_numbers():
    layer = BatchKalmanNorm2d(
        np.int64(3), np.int32(3), statistics_batch_size=np.int64(2), gain=np.float32(0.5), momentum=np.float64(0.1)
    )
    assert layer(X, moments(2, 3)).shape == X.shape
    batch_kalman_norm(X, moments(2, 3), np.float32(0.5), None, None, statistics_batch_size=np.int64(2))


def test_a_forgotten_previous_is_said_once():
    layer = BatchKalmanNorm2d(3, 8)
    with pytest.warns(UserWarning, match="prior_features=8.* was called without `previous`"):
        layer(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(X)
        BatchKalmanNorm2d(3)(X)
        BatchKalmanNorm2d(3, 8).eval()(X)  # population statistics need none


def test_a_failed_forward_leaves_the_statistics():
    layer = BatchKalmanNorm2d(3, statistics_batch_size=1)
    with pytest.raises(ValueError, match="one value"):
        layer(ONE)
    assert layer.num_batches_tracked == 0
