"""Track: update running statistics from what a forward saw."""
