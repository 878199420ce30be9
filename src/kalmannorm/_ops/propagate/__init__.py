"""Propagate: compute moments after many layers together, for the priors of many norms."""
