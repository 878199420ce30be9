"""Training of one run: loop, step, evaluation, ranks and restarts."""
