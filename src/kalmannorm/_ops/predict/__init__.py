"""Predict: the prior of a learned transition. The reference is `kalmannorm._filter.predict`."""
