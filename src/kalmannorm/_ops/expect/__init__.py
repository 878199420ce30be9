"""Expect: the moments that a single example is combined with in `example` inference."""
