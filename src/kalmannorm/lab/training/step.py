"""Forward and backward of one gradient batch: in one pass, in micro-batches, over ranks, or as a CUDA graph.

All of them give the same gradients and the same running statistics. Micro-batches and ranks hold whole groups of the
statistics batch, and `kalmannorm.accumulate_statistics` joins their statistics into one update.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kalmannorm._model.accumulate import accumulate_statistics
from kalmannorm._model.settings import norms
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.training.fabric import Fabric

Outcome = tuple[Tensor, Tensor]
"""Mean loss and accuracy (0 to 1) over the examples of this rank, on the device."""


class Step:
    """Call it with the images and labels of this rank. It leaves the gradients in the parameters."""

    def __init__(self, fabric: Fabric, model: nn.Module, recipe: Recipe, execution: Execution) -> None:
        self.fabric, self.model = fabric, model
        self.smoothing = recipe.label_smoothing
        share = recipe.gradient_batch // fabric.world_size
        self.micro_batch = min(execution.micro_batch or share, share)
        self.pieces = -(-share // self.micro_batch)
        self.joins = (self.pieces > 1 or fabric.world_size > 1) and any(True for _ in norms(model))
        self.graph = Graph(self) if execution.cuda_graph else None

    def __call__(self, images: Tensor, labels: Tensor) -> Outcome:
        if self.graph is not None:
            return self.graph(images, labels)
        for parameter in self.model.parameters():
            parameter.grad = None
        return self.run(images, labels)

    def run(self, images: Tensor, labels: Tensor) -> Outcome:
        losses, right = [], []
        with self._joined():
            pieces = list(
                zip(torch.split(images, self.micro_batch), torch.split(labels, self.micro_batch), strict=True)
            )
            for number, (part, target) in enumerate(pieces, 1):
                with self.fabric.no_backward_sync(self.model, enabled=number < len(pieces)):  # type: ignore[arg-type]
                    logits = self.model(part)
                    share = len(part) / len(images)
                    loss = F.cross_entropy(logits, target, label_smoothing=self.smoothing) * share
                    self.fabric.backward(loss)
                losses.append(loss.detach())
                right.append((logits.detach().argmax(1) == target).sum())
        return torch.stack(losses).sum(), torch.stack(right).sum() / len(images)

    def recapture(self) -> None:
        """Discard the CUDA graph. Call it after the model changes, for example when its statistics are frozen."""
        if self.graph is not None:
            self.graph = Graph(self)

    def _joined(self) -> AbstractContextManager[object]:
        if not self.joins:
            return nullcontext()
        return accumulate_statistics(self.model, "world" if self.fabric.world_size > 1 else None)


class Graph:
    """A step as a CUDA graph: one launch instead of thousands of small kernel launches."""

    WARMUP = 3

    def __init__(self, step: Step) -> None:
        self.step = step
        self.captured: torch.cuda.CUDAGraph | None = None
        self.images: Tensor
        self.labels: Tensor
        self.outcome: Outcome

    def __call__(self, images: Tensor, labels: Tensor) -> Outcome:
        if self.captured is None:
            self._capture(images, labels)
        assert self.captured is not None
        self.images.copy_(images)
        self.labels.copy_(labels)
        self.captured.replay()
        return self.outcome

    def _capture(self, images: Tensor, labels: Tensor) -> None:
        for parameter in self.step.model.parameters():
            parameter.grad = None  # left by an earlier graph: unused parameters would keep an old gradient
        self.images, self.labels = images.clone(), labels.clone()
        start = {name: value.clone() for name, value in self.step.model.state_dict().items()}
        drawn = torch.cuda.get_rng_state(images.device)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(self.WARMUP):
                self._run()
        torch.cuda.current_stream().wait_stream(side)
        self.captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.captured):
            self.outcome = self._run()
        self.step.model.load_state_dict(start)  # the warm-up changed the running statistics
        for _, norm in norms(self.step.model):
            norm.forget_gradients()
        torch.cuda.set_rng_state(drawn, images.device)  # and used the random numbers of this step

    def _run(self) -> Outcome:
        for parameter in self.step.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        return self.step.run(self.images, self.labels)
