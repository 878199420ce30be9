"""How long the lanes of a tile sum. It is apart from `tiling.py`, because kernels are built without torch."""

FRESH = 64
"""Most values of a lane that are summed relative to its first value."""
