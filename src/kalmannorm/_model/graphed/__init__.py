"""`graphed`: a model whose forward and backward are captured as CUDA graphs."""

from kalmannorm._model.graphed.wrapping import graphed

__all__ = ["graphed"]
