"""What the norms of a trained model see: prior, observation and posterior, and how far they differ from inference."""
