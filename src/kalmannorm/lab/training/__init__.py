"""One run: the loop, its step, its evaluation, its ranks and its restarts."""
