"""Track: update running statistics with the statistics of a forward."""
