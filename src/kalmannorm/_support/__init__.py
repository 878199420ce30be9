"""What every room may use: argument checks, pickles, activation checkpoints, rewritten forwards."""
