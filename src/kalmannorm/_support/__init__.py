"""Helpers for every room above: argument checks, pickles, activation checkpoints, rewritten forwards."""
