"""Numbers of any size, through the op and through the layers, against the naive reference in float64.

Channels are independent of each other, so each is a case of its own: values from 1e-30 to 1e30, constant, denormal,
with an outlier, NaN or infinite; a prior near or far; gains next to 0, 1/2 and 1. Outputs and gradients must be as near
to the exact ones as `bounds` says that the arithmetic allows. Where a number on the way overflows float32, the result
must be the exact one or that of the naive formulas in float32. Buffers of a layer must stay finite, and go where the
formulas say.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

from kalmannorm import Moments
from kalmannorm._ops.normalize import arm_sums, exportable, registered
from support.attacks.cases import Case, draw
from support.attacks.judging import OUTPUTS, Truth, differentiated
from support.attacks.layers import LAYERS, attack_layer

MUST_BE_ZERO = ("wrong", "broken_buffers")


def run(count: int, seed: int, folder: Path) -> dict[str, int]:
    """`count` channels or a few more, from `seed` on; nothing is written to `folder`."""
    del folder
    found: Counter[str] = Counter(cases=0, calls=0, judged=0, unjudged=0, **dict.fromkeys(MUST_BE_ZERO, 0))
    while found["cases"] < count:
        attack(seed, found["calls"], found)
        found["calls"] += 1
    return dict(found)


def attack(seed: int, index: int, found: Counter[str]) -> None:
    """Call number `index` of the seed: the op or a layer."""
    dice = random.Random(f"{seed} {index}")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), pooling(dice.random() < 0.1) as wide:
        warnings.filterwarnings("ignore", "kalmannorm: a batch had NaN", RuntimeWarning)
        torch.manual_seed(dice.getrandbits(32))
        case = draw(dice, wide)
        kind = dice.choice(["op", "op", "plain", *LAYERS])
        call = f"attacks.numbers.attack({seed}, {index}, Counter()), {kind}"
        if kind in LAYERS:
            attack_layer(kind, case, dice, call, found)
        else:
            attack_op(case, call, found, plainly=kind == "plain")
        found["cases"] += case.x.shape[1]


@contextlib.contextmanager
def pooling(wanted: bool) -> Iterator[bool]:
    """With the sums for ARM's processors, which wait for large tensors otherwise."""
    with contextlib.ExitStack() as stack:
        if wanted:
            stack.enter_context(mock.patch.object(arm_sums, "ARM", True))
            stack.enter_context(mock.patch.object(arm_sums, "SMALLEST", 1))
        yield wanted


def attack_op(case: Case, call: str, found: Counter[str], *, plainly: bool) -> None:
    """The op as eager code runs it; or its plain form, of which autograd knows the gradients."""
    truth = Truth(case, call, found, merged=plainly)
    if not plainly:
        truth.compare(differentiated(lambda *given: registered.run(*given, None, False), case.inputs(), case))
        return
    prior = None if case.prior is None else Moments(*case.prior)
    y, posterior, observation = exportable.normalize(
        case.x, prior, case.gain, case.weight, case.bias, statistics_batch_size=case.size, eps=case.eps
    )
    truth.compare(dict(zip(OUTPUTS, (y, *posterior[:2], *observation[:2]), strict=True)))
