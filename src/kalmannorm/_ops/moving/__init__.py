"""Moving Average Batch Norm: `_norms/moving_average.py` has the formulas."""
