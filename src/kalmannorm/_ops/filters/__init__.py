"""Computes the filters of convolutions from their weights."""
