"""Implementations of the op."""
