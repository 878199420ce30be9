"""Accumulated statistics: several forwards, on one rank or many, update the running statistics as one forward would.

A gradient batch that does not fit into memory is run in micro-batches, or divided among ranks, and its gradients are
summed. By default the statistics would be updated in every forward: k times by α instead of once. Here each forward
stores its pooled row and the number of its values. Rows are merged as the norm pools its groups, and one update follows
at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed, nn

from kalmannorm._model.settings import norms
from kalmannorm._norms.distributed import LayerName, ProcessGroupChoice, RankGroup, Ranks
from kalmannorm._norms.grouped import GroupedNorm
from kalmannorm._ops.track.averages import Groups, Pending, pooled_values
from kalmannorm.moments import Moments

_PLACE = LayerName.of("accumulate_statistics")

# Kept between uses, because compiled code and CUDA graphs write to the same memory again.
_PENDING: WeakKeyDictionary[GroupedNorm, Pending] = WeakKeyDictionary()


@contextmanager
def accumulate_statistics(model: nn.Module, process_group: ProcessGroupChoice = None) -> Iterator[None]:
    """Do not update the statistics of the model's norms inside this context; update them once at its end, from all
    batches.

        with accumulate_statistics(model):
            for x, target in micro_batches:
                loss_of(model(x), target).backward()
        optimizer.step()

    If every micro-batch consists of whole groups, running and observed statistics and their counts equal those of one
    forward on the joined batch. Batch Renorm corrects all micro-batches towards the same statistics, at the same point
    of its schedule.

    Args:
        process_group: whose forwards are counted together. None: those of this process. "world" or a ProcessGroup:
            those of all its ranks, which then have the same statistics. Every rank must reach the end of the context,
            even if it ran no forward, because the ranks exchange one message there. A norm with a `process_group` of
            its own is counted once.

    After an error inside, the statistics are unchanged. With a `process_group` this holds on this rank, and the others
    wait for it, as in any collective. A NaN or Inf in one forward makes all of them one skipped batch. Norms that are
    frozen, in eval mode or did not run stay unchanged. Recomputation in the backward does not count. If a norm runs
    several times in a forward, it is updated once from all its calls. Outside this context it is updated at every call.

    torch's own BatchNorm layers ignore this context and are updated at every forward. A model without norms of this
    library runs as usual.
    """
    group = Ranks(process_group).group()
    found = [(name, norm) for name, norm in norms(model) if norm.track_running_stats and norm.running_mean is not None]
    for name, norm in found:
        if norm._pending is not None:
            raise RuntimeError(
                f"accumulate_statistics: {name or '(the model itself)'!r} is already accumulating; one use cannot be "
                "inside another"
            )
    with ExitStack() as stack:
        pending = [_start(norm, stack) for _, norm in found]
        yield
    if pending:
        _update_statistics([norm for _, norm in found], pending, group)


def _start(norm: GroupedNorm, stack: ExitStack) -> Pending:
    """Make the norm's forwards store their statistics, until the stack closes."""
    assert norm.running_mean is not None
    observes = norm.observed_mean is not None
    pending = _PENDING.get(norm)
    if pending is None or not pending.fits(norm.running_mean, observes=observes):
        pending = _PENDING[norm] = Pending(norm.running_mean, observes=observes)
    pending.clear()
    norm._pending = pending
    stack.callback(delattr, norm, "_pending")
    return pending


@torch.no_grad()
def _update_statistics(
    found: list[GroupedNorm], pending: list[Pending], group: distributed.ProcessGroup | None
) -> None:
    messages = [_message(norm, rows) for norm, rows in zip(found, pending, strict=True)]
    if group is None:
        received = [message.unsqueeze(0) for message in messages]
    else:
        device = messages[0].device
        together = RankGroup(group, _PLACE).gather(torch.cat([message.to(device) for message in messages]))
        received = list(together.split_with_sizes([len(message) for message in messages], 1))
    for norm, rows_R in zip(found, received, strict=True):
        _update_one(norm, rows_R)


def _message(norm: GroupedNorm, pending: Pending) -> Tensor:
    """The rows of a norm as one vector, after the number of values that they are computed from.

    Ranks that joined their observations all observed the same values. Each of them sends its part of the number.
    """
    own = norm._ranks.group()
    rows = pending.rows()
    values = pending.values.to(rows[0].dtype) / (1 if own is None else distributed.get_world_size(own))
    return torch.cat([values.unsqueeze(0), *rows])


def _update_one(norm: GroupedNorm, rows_R: Tensor) -> None:
    """Update a norm from the rows of each rank."""
    assert norm.running_mean is not None
    rows_R = rows_R.to(norm.running_mean.device)
    values_R, parts = rows_R[:, :1], rows_R[:, 1:].reshape(len(rows_R), -1, norm.num_features).unbind(1)
    values = values_R.sum()
    shares = values_R / values.clamp(min=1)
    dtype = norm.running_mean.dtype
    population = norm._pool(Groups(Moments(*parts[:2]), shares)).to(dtype)
    observation = pooled_values(Groups(Moments(*parts[2:]), shares)).to(dtype) if parts[2:] else None
    norm._update_statistics(population, observation, values.round().long())
