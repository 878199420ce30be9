"""Normalize: observe each group, combine the observation with the prior, normalize. All norms use this op."""
