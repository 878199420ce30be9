"""The autograd nodes of a forward: its leaves, and the casts that autocast makes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

ACCUMULATE, CAST = "torch::autograd::AccumulateGrad", "ToCopyBackward0"


def nodes_of(outputs: Sequence[Tensor]) -> list[Node]:
    """All nodes that the outputs depend on."""
    seen = dict[Node, None]()
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen[node] = None
            waiting += [following for following, _ in node.next_functions if following is not None]
    return list(seen)


def leaves_of(outputs: Sequence[Tensor]) -> dict[int, Tensor]:
    """The leaves that the outputs depend on, by id."""
    leaves = (_leaf(node) for node in nodes_of(outputs) if node.name() == ACCUMULATE)
    return {id(leaf): leaf for leaf in leaves}


@contextmanager
def casts_taken(outputs: Sequence[Tensor]) -> Iterator[dict[int, Tensor]]:
    """In this context a backward leaves out the casts of gradients to the dtype of their leaf.

    It puts the gradients themselves into the dict, by the id of the leaf. The gradient of the leaf is then what the
    other use of it contributes. Autocast casts each weight for its convolution, and the prior of a Kalman norm uses the
    weight too. So the backward would cast and add every gradient by kernels of its own, and few kernels can do it for
    all of them. Leaves with several casts or other uses stay as they are, so that sums have the same order as ever.
    """
    users, casts = Counter[Node](), dict[Node, list[Node]]()
    for node in nodes_of(outputs):
        for following, _ in node.next_functions:
            if following is not None and following.name() == ACCUMULATE:
                users[following] += 1
                if node.name() == CAST:
                    casts.setdefault(following, []).append(node)
    taken: dict[int, Tensor] = {}
    handles = [
        found[0].register_prehook(partial(_take, taken, id(_leaf(leaf))))
        for leaf, found in casts.items()
        if len(found) == 1 and users[leaf] <= 2
    ]
    try:
        yield taken
    finally:
        for handle in handles:
            handle.remove()


def _take(taken: dict[int, Tensor], leaf: int, gradients: tuple[Tensor | None, ...]) -> tuple[None] | None:
    (gradient,) = gradients
    if gradient is None or gradient.is_complex():  # of a complex gradient the cast keeps the real part
        return None
    taken[leaf] = gradient
    return (None,)


def _leaf(node: Any) -> Tensor:
    leaf: Tensor = node.variable
    return leaf
