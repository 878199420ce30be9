"""Update the running statistics of many norms together, in PyTorch operations: a few for all norms, not for each.

Rows of all norms are concatenated along the channels. `owner` says which norm each channel belongs to. The equations
are those of `averages.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kalmannorm._groups import group_sizes
from kalmannorm._ops.track.averages import Groups, hastened, updated, values_seen
from kalmannorm._ops.track.request import TrackingRequest, unchanged
from kalmannorm.moments import Moments


class Together:
    """As `triton_many.Together`."""

    def __init__(self, requests: Sequence[TrackingRequest], starts: Sequence[int]) -> None:
        self.slots = [buffer for each in requests for buffer in each.slots()]
        alike: dict[Any, list[int]] = {}
        for number, each in enumerate(requests):
            rates = each.kind, each.momentum, each.observation_momentum, each.observed is None
            alike.setdefault((*rates, each.examples, each.size, each.posterior.mean.shape[0]), []).append(number)
        self.parts = [_Alike(numbers, requests, starts) for numbers in alike.values()]

    @classmethod
    def of(cls, requests: Sequence[TrackingRequest], starts: Sequence[int]) -> Together | None:
        return cls(requests, starts)

    def applies(self, owners: Sequence[dict[str, Any]]) -> bool:
        """Whether the norms with these buffers still have the same ones."""
        return unchanged(owners, self.slots)

    def captured(self) -> bool:
        return False

    def track(self, moments: Tensor) -> list[int]:
        """Update all buffers. Returns the numbers of the norms that were skipped."""
        return [number for part in self.parts for number in part.track(moments)]


class _Alike:
    """Norms that differ only in their channels and in the values per channel."""

    def __init__(self, numbers: list[int], requests: Sequence[TrackingRequest], starts: Sequence[int]) -> None:
        self.numbers, chosen = numbers, [requests[number] for number in numbers]
        first, like = chosen[0], chosen[0].running[0]  # requests are not kept: they hold the moments of a forward
        self.total_variance, self.momentum = first.kind == "total", first.momentum
        self.observation_momentum, self.groups = first.observation_momentum, first.posterior.mean.shape[0]
        self.sizes = [each.running[0].numel() for each in chosen]
        self.means, self.vars = ([each.running[part] for each in chosen] for part in range(2))
        observed = [each.observed for each in chosen if each.observed is not None]
        self.observed_means, self.observed_vars = ([each[part] for each in observed] for part in range(2))
        self.tracked, self.batches, self.skipped = ([each.counts[part] for each in chosen] for part in range(3))
        # The kept tensors are also used in training, and there may be another default device.
        with torch.inference_mode(False), torch.device(like.device):
            self.values = torch.tensor([each.values for each in chosen])
            self.shares = group_sizes(first.examples, first.size, like) / first.examples
            self.owner = torch.repeat_interleave(torch.arange(len(chosen)), torch.tensor(self.sizes))
            places = [
                starts[number] + torch.arange(4 * self.groups * size).view(4, self.groups, size)
                for number, size in zip(numbers, self.sizes, strict=True)
            ]
            self.places = torch.cat(places, 2).flatten()

    def track(self, moments: Tensor) -> list[int]:
        total_variance = self.total_variance
        mean, var, seen_mean, seen_var = moments.index_select(0, self.places).view(4, self.groups, -1).unbind(0)
        tracked = torch.stack(self.tracked)
        total = values_seen(tracked, torch.stack(self.batches), self.values) + self.values
        share = self.values / total.to(mean.dtype)
        alpha = share[self.owner] if self.momentum is None else self.momentum
        population = Groups(Moments(mean, var), self.shares).pooled(total_variance=total_variance)
        old = [torch.cat(self.means), torch.cat(self.vars)]
        new = [*updated(old[0], old[1], population, alpha, total_variance=total_variance)[:2]]
        buffers = [self.means, self.vars]
        if self.observed_means:
            rate = share if self.momentum is None else hastened(share, self.observation_momentum)
            observation = Groups(Moments(seen_mean, seen_var), self.shares).pooled(total_variance=True)
            seen = [torch.cat(self.observed_means), torch.cat(self.observed_vars)]
            new += updated(seen[0], seen[1], observation, rate[self.owner], total_variance=True)[:2]
            old += seen
            buffers += [self.observed_means, self.observed_vars]
        after, before = torch.stack(new), torch.stack(old)
        # Check the new averages, not the batch: a finite but huge batch overflows only in the averages.
        broken = ~torch.isfinite(after).all(0)
        skip = self.owner.new_zeros(len(self.sizes)).index_add_(0, self.owner, broken.long()) > 0
        found = skip.nonzero().flatten().tolist()
        if found:
            after = torch.where(skip[self.owner], before, after)
            total = torch.where(skip, tracked, total)
        for each, row in zip(buffers, after, strict=True):
            torch._foreach_copy_(each, row.split_with_sizes(self.sizes))
        torch._foreach_copy_(self.tracked, total.unbind(0))
        torch._foreach_add_(self.batches, (~skip).long().unbind(0))
        if found:
            torch._foreach_add_(self.skipped, skip.long().unbind(0))
        return [self.numbers[number] for number in found]
