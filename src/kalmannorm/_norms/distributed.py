"""Statistics over the ranks of a process group: groups with the same number g on all ranks form one group.

Rank r holds n_r values of the group, with mean m_r and variance v_r. The joint moments are

    n = Σ n_r        mean = Σ n_r m_r / n        var = Σ n_r (v_r + (m_r - mean)²) / n

One all_gather collects the rows of all ranks. Each rank merges them in float64. So all ranks get the same bits, and
nothing cancels where |mean| ≫ σ. Gradients with respect to the joint moments are summed over ranks. So the ranks learn
as one process does on the joined batch with the sum of their losses.

If a rank does not take part, the others wait. The error of `Company` then names the layer and the ranks. If a rank has
no examples, `Company` raises on all ranks. It needs no additional message for this.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from kalmannorm._groups import group_count, group_size, group_sizes
from kalmannorm._ops.normalize import exportable
from kalmannorm._ops.track.averages import Groups
from kalmannorm.functional import normalize, observe
from kalmannorm.moments import Moments

ProcessGroupChoice: TypeAlias = "dist.ProcessGroup | Literal['world'] | None"


def _is_group(value: object) -> bool:
    if not dist.is_available():
        return False
    # Processes outside a group hold a number instead of the group. They run alone.
    outside = isinstance(value, int) and value == dist.GroupMember.NON_GROUP_MEMBER
    return outside or isinstance(value, dist.ProcessGroup)


class Ranks:
    """The ranks whose observations a norm joins. `choice` is None (only its own), "world" (all) or a ProcessGroup.

    A ProcessGroup can be neither copied nor pickled. A copy shares it, and a pickle contains "world" instead.
    """

    def __init__(self, choice: ProcessGroupChoice) -> None:
        expected = "process_group must be None, 'world' or a torch ProcessGroup"
        if isinstance(choice, str) and choice != "world":
            raise ValueError(f"{expected}, got {choice!r}")
        if not (choice is None or isinstance(choice, str) or _is_group(choice)):
            raise TypeError(f"{expected}, got a {type(choice).__name__}")
        self.choice = choice

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self

    def __reduce__(self) -> tuple[type[Ranks], tuple[str | None]]:
        return Ranks, (None if self.choice is None else "world",)

    def group(self) -> dist.ProcessGroup | None:
        """The process group. None for a single rank, or if torch.distributed is not initialised."""
        if self.choice is None or not (dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD if isinstance(self.choice, str) else self.choice
        return group if dist.get_world_size(group) > 1 else None


class LayerName(NamedTuple):
    """A layer of the model: its name or a description, and a hash of it below 2^32 that ranks compare."""

    name: str
    sign: int

    @classmethod
    def of(cls, name: str) -> LayerName:
        return cls(name, zlib.crc32(name.encode()))


class RankGroup(NamedTuple):
    """The ranks of a process group, at one layer of a model."""

    group: dist.ProcessGroup
    place: LayerName

    def gather(self, own: Tensor) -> Tensor:
        """This tensor from every rank, stacked. It has no gradient."""
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        with self._placed():
            dist.all_gather(parts, own.contiguous(), group=self.group)
        return torch.stack(parts)

    def add_up(self, own: Tensor) -> None:
        """Sum the tensor over ranks, in place."""
        with self._placed():
            dist.all_reduce(own, group=self.group)

    def check(self, signs: list[int], values: list[int]) -> None:
        """Raise if ranks are at another layer or have no values. All ranks call it with the same lists."""
        elsewhere = [number for number, sign in enumerate(signs) if sign != self.place.sign]
        if elsewhere:
            raise RuntimeError(
                f"{self.place.name}: rank {dist.get_rank()} of process_group is here, but {self._named(elsewhere)} at "
                f"another layer. {LIKELY}"
            )
        empty = [number for number, count in enumerate(values) if not count]
        if empty:
            raise ValueError(
                f"{self.place.name}: x must hold at least one value per channel on every rank of process_group, got an "
                f"empty batch on {self._named(empty)}; give every rank an example, or skip the step on all ranks"
            )

    def _named(self, numbers: list[int]) -> str:
        """Global rank numbers, as words, from the numbers in this group."""
        return _ranks([dist.get_global_rank(self.group, number) for number in numbers])

    @contextmanager
    def _placed(self) -> Iterator[None]:
        """If an exchange inside this context fails, the error names the layer and the missing ranks."""
        try:
            yield
        except RuntimeError as error:
            here = dist.get_rank()
            others = [rank for rank in dist.get_process_group_ranks(self.group) if rank != here]
            found = whereabouts(self.group, here, others, self.place.name)
            together = sorted([here, *(rank for rank, place in found.items() if place == self.place.name)])
            apart = [
                f"rank {rank} {f'waited at {place}' if place else 'did not take part'}"
                for rank, place in found.items()
                if place != self.place.name
            ]
            raise type(error)(
                f"{self.place.name}: {_ranks(together)} of process_group waited here for all ranks"
                f"{', but ' if apart else ''}{', '.join(apart)}. {LIKELY} Or a rank has ended. ({error})"
            ) from error


def whereabouts(group: Any, here: int, others: list[int], place: str) -> dict[int, str | None]:
    """The layers at which the other ranks wait, after an exchange failed at `place`. None: the rank does not wait.

    Each failing rank writes its layer and the number of its failures into the group's store. Ranks that wait for each
    other fail at about the same time and equally often.
    """
    found: dict[int, str | None] = dict.fromkeys(others)
    try:
        store = group.get_group_store()
        number = store.add(f"kalmannorm/{here}", 1)
        store.set(f"kalmannorm/{here}/{number}", place)
        until = time.monotonic() + GRACE
        while None in found.values() and time.monotonic() < until:
            for rank in others:
                if found[rank] is None and store.check([f"kalmannorm/{rank}/{number}"]):
                    found[rank] = store.get(f"kalmannorm/{rank}/{number}").decode()
            time.sleep(0.02)
    except (AttributeError, RuntimeError):  # an older torch, or the process of the store has ended
        return {} if len(others) > 1 else found
    return found


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


GRACE = 1.0
"""Seconds within which all waiting ranks fail."""

LIKELY = "A rank skipped this forward or took another path through the model: all ranks must run the same layers."


class Joint(NamedTuple):
    """Joint observation: moments (G, C), and the number of values per rank and group, (R, G, 1)."""

    moments: Moments
    counts: Tensor
    rank_group: RankGroup

    def values(self) -> Tensor:
        """Values per channel, over all groups and ranks."""
        return self.counts.sum().long()

    def observation(self) -> Groups:
        return Groups(self.moments, self._shares(self.counts.sum(0)))

    def posterior(self, own: Moments) -> Groups:
        """The posteriors of all ranks' groups, (R·G, C). Priors may differ between ranks."""
        rows = self.rank_group.gather(padded(torch.cat([own.mean, own.var], 1), self.counts.shape[1])).flatten(0, 1)
        return Groups(Moments(*rows.chunk(2, 1)), self._shares(self.counts.flatten(0, 1)))

    def _shares(self, counts: Tensor) -> Tensor:
        return (counts / self.counts.sum()).to(self.moments.mean.dtype)


def normalize_with(
    x: Tensor,
    moments: Moments,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    statistics_batch_size: int | None,
    eps: float,
) -> Tensor:
    """Normalize with given moments (G, C), with their gradients.

    The op gets them as its prior, with a gain near 0. The op keeps only x for the backward, but plain operations would
    keep three tensors of that size. The gain is not 0, because the variance of x may be infinite, and 0 times infinity
    is NaN. The effect of a finite variance is smaller than the rounding error.
    """
    almost_none = torch.full_like(moments.mean[0, 0], torch.finfo(moments.mean.dtype).eps ** 3)
    size = statistics_batch_size
    return normalize(x, moments, almost_none, weight, bias, statistics_batch_size=size, eps=eps)[0]


def normalize_jointly(
    x: Tensor,
    prior: Moments | None,
    gain: Tensor | None,
    apply: Callable[[Tensor, Moments, Moments], Tensor],
    *,
    statistics_batch_size: int | None,
    rank_group: RankGroup,
) -> tuple[Tensor, Moments, Joint]:
    """Output and posterior of this rank's groups, and the joint observation.

    `apply` normalizes x with a posterior. It also gets the observation.
    """
    groups = count_groups(x, statistics_batch_size, rank_group, prior=prior is not None)
    size = group_size(x.shape[0], statistics_batch_size)
    rows = group_count(x.shape[0], size)
    joined = rows > groups  # this rank's last group is the only one with this number, and has one value
    seen = observe(x, statistics_batch_size, join_last=joined)
    joint = join(x, seen, size, groups, rank_group)
    observation = Moments(joint.moments.mean[:rows], joint.moments.var[:rows])
    if joined:
        observation = Moments(*(torch.cat([part, part[-1:]]) for part in observation[:2]))
    posterior = exportable.posterior_of(prior, observation, gain)
    return apply(x, posterior, observation), posterior, joint


def take_part_empty(x: Tensor, statistics_batch_size: int | None, rank_group: RankGroup) -> None:
    """Take part in the exchange without examples. All ranks then raise."""
    if statistics_batch_size is not None:
        count_groups(x, statistics_batch_size, rank_group, prior=True)
    nothing = x.new_zeros(1, x.shape[1], dtype=torch.float64)
    _Join.apply(nothing, nothing, nothing[:, :1], 1, rank_group)  # type: ignore[no-untyped-call]
    here = dist.get_rank(rank_group.group)  # on a GPU the counts were not checked
    ranks = range(dist.get_world_size(rank_group.group))
    rank_group.check([rank_group.place.sign for _ in ranks], [int(rank != here) for rank in ranks])


def join(x: Tensor, local: Moments, size: int, groups: int, rank_group: RankGroup) -> Joint:
    """Joint moments from the moments of this rank's groups of `size` examples of x. `groups`: see `count_groups`."""
    positions = x.numel() // (x.shape[0] * x.shape[1])
    counts = torch.full_like(local.mean[:, :1], positions, dtype=torch.float64)  # exact up to 2^53
    counts = counts * group_sizes(x.shape[0], size, counts)
    if counts.shape[0] > groups:  # the last group has joined the group before it
        counts = torch.cat([counts[:-2], counts[-2:].sum(0, keepdim=True)])
        local = Moments(local.mean[:-1], local.var[:-1])
    mean, var, all_counts = _Join.apply(local.mean, local.var, counts, groups, rank_group)  # type: ignore[no-untyped-call]
    return Joint(Moments(mean, var), all_counts, rank_group)


def count_groups(x: Tensor, statistics_batch_size: int | None, rank_group: RankGroup, *, prior: bool) -> int:
    """Number of joint groups. Without a prior each must hold two values per channel, so a last one of one value per
    channel joins the group before it, and is not counted.

    All ranks exchange their shapes, so if one rank must raise, all raise. If the whole batch is one group, no exchange
    is needed, because two ranks always hold two values.
    """
    if statistics_batch_size is None:
        return 1
    m = statistics_batch_size
    positions = x.numel() // max(x.shape[0] * x.shape[1], 1)
    called = rank_group.gather(torch.tensor([rank_group.place.sign, x.shape[0], positions], device=x.device)).tolist()
    shapes = [shape for _, *shape in called]
    rank_group.check([sign for sign, *_ in called], [examples * positions for examples, positions in shapes])
    groups = max(group_count(examples, m) for examples, _ in shapes)
    for g in range(0 if prior else groups):
        if sum(min(max(examples - g * m, 0), m) * positions for examples, positions in shapes) == 1:
            if m > 1 and g > 0:  # all groups before are full on one rank, so g is the last
                return g
            enough = "2 or more as statistics_batch_size (`convert` can set it by layer)" if m == 1 else "more examples"
            raise ValueError(
                f"{rank_group.place.name}: x in statistics batches of {m} has a group, number {g}, with one value per "
                f"channel over all {len(shapes)} ranks of process_group, and there is no prior. The variance of one "
                f"value is 0. Use {enough}."
            )
    return groups


def padded(rows_GC: Tensor, groups: int) -> Tensor:
    """Append rows of zeros for groups that only other ranks have."""
    return F.pad(rows_GC, (0, 0, 0, groups - rows_GC.shape[0]))


class _Sum(torch.autograd.Function):
    """The sum over ranks, on every rank. Its backward is the same sum."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, rank_group: RankGroup) -> Tensor:
        ctx.rank_group = rank_group
        total = own.clone(memory_format=torch.contiguous_format)
        rank_group.add_up(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.rank_group), None  # type: ignore[no-untyped-call]


class _Join(torch.autograd.Function):
    """Joint mean and variance (G, C) and the counts of all ranks (R, G, 1), from this rank's rows and counts."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, var: Tensor, counts: Tensor, groups: int, rank_group: RankGroup
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, channels = mean.shape
        signed = mean.device.type == "cpu"  # on a GPU, reading the signs would wait for the device
        signs = [torch.full_like(counts, rank_group.place.sign)] if signed else []
        gathered = rank_group.gather(padded(torch.cat([mean.double(), var.double(), counts, *signs], 1), groups))
        means, variances, all_counts = gathered[..., : 2 * channels + 1].split_with_sizes([channels, channels, 1], 2)
        if signed and not torch.compiler.is_compiling():
            rank_group.check(gathered[:, 0, -1].long().tolist(), all_counts[:, 0, 0].long().tolist())
        shares = all_counts / all_counts.sum(0)
        joint_mean = (shares * means).sum(0)
        joint_var = (shares * (variances + (means - joint_mean).square())).sum(0).to(var.dtype)
        joint_mean = joint_mean.to(mean.dtype)
        ctx.rank_group = rank_group
        ctx.save_for_backward(mean, joint_mean, shares[dist.get_rank(rank_group.group), :rows].to(mean.dtype))
        ctx.mark_non_differentiable(all_counts)
        return joint_mean, joint_var, all_counts

    @staticmethod
    def backward(ctx: Any, grad_mean: Tensor, grad_var: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        mean, joint_mean, share = ctx.saved_tensors
        rows = mean.shape[0]
        total = _Sum.apply(torch.stack([grad_mean, grad_var]), ctx.rank_group)  # type: ignore[no-untyped-call]
        at_mean, at_var = total[:, :rows]
        # The joint mean inside the variance has no gradient, because Σ n_r (m_r - mean) = 0.
        return share * (at_mean + 2 * at_var * (mean - joint_mean[:rows])), share * at_var, None, None, None


def take_part(target: Tensor, idle: list[Tensor]) -> Tensor:
    """Add the `idle` parameters to the graph of `target`, with gradients of exactly zero. No bit of `target` changes.

    DDP waits for the gradient of every parameter. An empty sum is 0 even if the parameter is NaN. t - 0 is always t,
    but t + 0 is not: -0 + 0 is 0.
    """
    if not idle:
        return target
    zero = torch.stack([parameter.flatten()[:0].sum() for parameter in idle]).sum()
    return target - zero.to(target.dtype)
