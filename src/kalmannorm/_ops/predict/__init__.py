"""Predict: the prior of a learned transition. Its naive truth is `kalmannorm._filter.predict`."""
