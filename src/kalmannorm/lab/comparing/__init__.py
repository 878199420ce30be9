"""Many runs: cells, worker processes, live tables, summaries."""
