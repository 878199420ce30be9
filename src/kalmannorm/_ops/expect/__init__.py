"""Expect: what a single example is combined with in `example` inference."""
