"""What tests share: nets, runs, comparisons, processes, and the attacks."""
