"""The paper's experiments, by name: `catalogue` defines them, `reproducing` runs one. See docs/experiments.md."""
