"""The paper's experiments, each by a name: `catalogue` says what they are, `reproducing` runs one. See
docs/experiments.md."""
