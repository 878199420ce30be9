"""`fuse`: norm and ReLU, and norm, sum and ReLU, run in one pass in a converted model."""

from kalmannorm._model.fusion.fusing import Fusion, fuse

__all__ = ["Fusion", "fuse"]
