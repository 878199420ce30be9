"""Stands in for CUDA graphs on any device: a replay runs the same work again, and writes to the same memory."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from kalmannorm._model.graphed.recorder import HostRandom
from kalmannorm._model.graphed.signature import Autocast


class Memory:
    """A pool. `valid`: whose forward was the last work in it, and not yet its backward."""

    valid: object = None


def _settings(passes):
    """What Python reads in a forward, and a graph does not."""
    simple = (bool, int, float, str, tuple, type(None))
    return [
        (name, {key: value for key, value in vars(module).items() if isinstance(value, simple)})
        for name, module in passes.model.named_modules()
    ]


class Rerecording:
    def __init__(self, work, memory):
        self.work, self.memory = work, memory
        self.owner, self.forward = work.__self__, work.__name__ == "forward"
        self.gradients, self.autocast = torch.is_grad_enabled(), Autocast.of("cpu")
        self.settings = _settings(self.owner)
        self.results = [each.clone() for each in self._run()]

    def _run(self):
        self.memory.valid = self.owner if self.forward else None
        with torch.set_grad_enabled(self.gradients), self.autocast.again():
            return [each.detach() for each in self.work()]

    def replay(self):
        assert _settings(self.owner) == self.settings, "a graph would still have the old settings"
        if not self.forward and self.memory.valid is not self.owner:  # others have overwritten its activations
            for result in self.results:
                result.fill_(float("nan"))
            return
        for result, new in zip(self.results, self._run(), strict=True):
            result.copy_(new)


class Rerun:
    def serves(self, device):
        return True

    def pool(self):
        return Memory()

    def aside(self, device):
        return nullcontext()

    def without_waiting(self):
        return nullcontext()

    def record(self, work, pool):
        return Rerecording(work, pool)

    def stream(self):
        return None

    def join(self, stream):
        raise AssertionError("a CPU has no streams")

    def random_state(self, device):
        return torch.get_rng_state()

    def set_random_state(self, state, device):
        torch.set_rng_state(state)

    def host_random(self):
        return HostRandom(torch_too=False)
