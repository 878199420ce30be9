"""Normalize: observe each group, combine the observation with the prior, apply. The op of every norm."""
