"""Makes a plan from an example input: runs the model in training and in eval, and applies the rules of a transition."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from kalmannorm._support.copying import Detached
from kalmannorm._support.pickles import Complete
from kalmannorm._wiring.foldable import foldable
from kalmannorm._wiring.normalized import normalized_convolutions
from kalmannorm._wiring.program import NormBelief, Parameter, Posterior, Program
from kalmannorm._wiring.recording.records import FROM_NUMBERS, UNSEEN
from kalmannorm._wiring.recording.trace import LostGradientError, NoInputError, Trace, arguments, trace
from kalmannorm._wiring.rules.beliefs import Beliefs, Unknown
from kalmannorm._wiring.rules.feeding import Feeding
from kalmannorm._wiring.rules.posteriors import Posteriors
from kalmannorm._wiring.weak_modules import WeakModule

Transition = Literal["weights", "learned"]
NEVER_RAN = "did not run on the example input"
FIRST = "no norm before it"


@dataclass
class CallPlan(Complete):
    """One call of a norm: its sources, and the step that computes its prior."""

    identity: int
    sources: list[str]
    path: str
    target: int | None = None
    size: int | None = None
    reason: str | None = None
    posteriors: tuple[int, ...] = ()
    needs: tuple[int, ...] = ()  # the first calls of the norms on which the prior depends
    others: list[CallPlan] = field(default_factory=list)  # the same call on other paths, from further examples
    first: bool = False  # no norm runs before this call, neither in eval nor in training
    last: bool = False  # no norm runs after this call, neither in eval nor in training
    shape: tuple[int, ...] = ()  # of its input in the example


@dataclass
class NormPlan(Complete):
    name: str
    channels: int
    rank: int | None = None
    calls: list[CallPlan] = field(default_factory=list)
    fold: WeakModule = field(default_factory=lambda: WeakModule(None))  # the layer that this norm can be folded into
    module: WeakModule = field(default_factory=lambda: WeakModule(None))


@dataclass
class Plan(Complete):
    program: Program
    norms: dict[str, NormPlan]
    transition: Transition
    failed: list[str] = field(default_factory=list)  # at most one run that failed, with its error
    owners: dict[int, str] = field(default_factory=dict)  # layer that each Parameter step reads
    arguments: int = 1  # number of positional arguments in the example
    normalized: list[WeakModule] = field(default_factory=list)  # convolutions with a norm after them

    def read_filters(self, layers: Iterable[nn.Module]) -> None:
        """From now on, priors read the attribute `filter` of these layers instead of their weight."""
        computed = set(map(id, layers))
        for step in self.program.steps:
            if isinstance(step, Parameter) and step.name == "weight" and id(step.owner.module()) in computed:
                step.name = "filter"


Norms = Mapping[str, tuple[nn.Module, Sequence[str]]]


def make_plan(
    model: nn.Module,
    example_input: Any,
    norms: Norms,
    transition: Transition,
    detached: Detached | None = None,
    more_examples: Sequence[Any] = (),
) -> Plan:
    """Trace the model in eval and in training, and wire every norm that ran in either of them.

    If a norm runs in both, the eval run counts, because it has no randomness. Auxiliary heads run in training only.
    `detached` are tensors that lost their graph when the model was copied. Its forward may not read them. With
    `more_examples` a norm that other norms feed there gets one prior for each path.
    """
    traces, failed = _traces(model, example_input, norms, detached or {})
    main = len(traces)
    for example in more_examples:
        further, said = _traces(model, example, norms, detached or {})
        traces, failed = traces + further, failed + said
    program, norm_steps = Program(), dict[int, int]()
    plans = {name: NormPlan(name, _channels(module), module=WeakModule(module)) for name, (module, _) in norms.items()}
    identities = _identities(traces)
    firsts = {here[0] for here in identities if here}
    firsts -= {identity for here in identities for identity in here[1:]}
    lasts = {here[-1] for here in identities if here}
    lasts -= {identity for here in identities for identity in here[:-1]}
    first_calls = _first_calls(traces, identities)
    spare = itertools.count(1 + max((i for here in identities for i in here), default=0))
    for number, (run, here) in enumerate(zip(traces, identities, strict=True)):
        feeding = Feeding(run)
        reader = (Beliefs if transition == "weights" else Posteriors)(run, program, here, norm_steps)
        # A norm that runs in training only does not exist at inference. Its layer may, and may feed another module
        # there.
        folds = foldable(model, run) if run is traces[0] else {}
        done = {name for name, plan in plans.items() if plan.calls}
        counts = Counter[str]()
        for call, norm in enumerate(run.norms):
            plan, nth = plans[norm.name], counts[norm.name]
            counts[norm.name] += 1
            if norm.name in done:
                if number >= main and nth < len(plan.calls):
                    other = _call_plan(run, call, here, feeding, reader, program)
                    _add_path(plan.calls[nth], other, next(spare), first_calls, program)
                continue
            plan.rank = len(run.values[norm.value].shape)
            plan.fold = WeakModule(folds.get(norm.name))
            plan.calls.append(_call_plan(run, call, here, feeding, reader, program))
            plan.calls[-1].needs = _needs(plan.calls[-1], first_calls, program)
            plan.calls[-1].first, plan.calls[-1].last = here[call] in firsts, here[call] in lasts
    _agree(plans)
    names = {id(module): name for name, module in model.named_modules()}
    owned = {i: id(step.owner.module()) for i, step in enumerate(program.steps) if isinstance(step, Parameter)}
    owners = {step: names[owner] for step, owner in owned.items() if owner in names}
    normalized = [WeakModule(layer) for layer in normalized_convolutions(model, traces)]
    return Plan(program, plans, transition, failed, owners, len(arguments(example_input)[0]), normalized)


def find_normalized(
    model: nn.Module,
    example_input: Any,
    norms: Norms,
    detached: Detached | None = None,
    more_examples: Sequence[Any] = (),
) -> list[nn.Module]:
    """The convolutions with a norm after them, as in `Plan.normalized`."""
    traces = [run for each in (example_input, *more_examples) for run in _traces(model, each, norms, detached or {})[0]]
    return normalized_convolutions(model, traces)


def _traces(model: nn.Module, example_input: Any, norms: Norms, detached: Detached) -> tuple[list[Trace], list[str]]:
    traces, errors, failed = [], [], []
    for training in (False, True):
        try:
            traces.append(trace(model, example_input, norms, training=training, detached=detached))
        except (NoInputError, LostGradientError):
            raise
        except Exception as error:
            errors.append(error)
            said = str(error).partition("\n")[0]
            failed.append(f"{'training' if training else 'eval'} run failed: {type(error).__name__}: {said:.120}")
    if not traces:
        raise ValueError(
            f"example_input: {type(model).__name__} does not run on it, neither in eval nor in training: "
            f"{type(errors[0]).__name__}: {errors[0]}"
        ) from errors[0]
    return traces, failed


def _identities(traces: list[Trace]) -> list[list[int]]:
    """One number for each call in each run. The n-th call of a norm has the same number in both runs."""
    numbers: dict[tuple[str, int], int] = {}
    identities: list[list[int]] = []
    for run in traces:
        counts: dict[str, int] = {}
        identities.append([])
        for norm in run.norms:
            nth = counts.get(norm.name, 0)
            counts[norm.name] = nth + 1
            identities[-1].append(numbers.setdefault((norm.name, nth), len(numbers)))
    return identities


def _channels(module: nn.Module) -> int:
    return int(getattr(module, "num_features", 0) or getattr(module, "num_channels", 0))


def _call_plan(
    run: Trace, call: int, identities: list[int], feeding: Feeding, reader: Beliefs | Posteriors, program: Program
) -> CallPlan:
    norm = run.norms[call]
    sources = list(dict.fromkeys(run.norms[k].name for k in feeding.sources(call)))
    plan = CallPlan(identities[call], sources, describe_path(run, call), shape=run.values[norm.value].shape)
    if isinstance(reader, Beliefs):
        target = reader.prior(call)
        if isinstance(target, Unknown):
            hidden = target.reason in (UNSEEN, FROM_NUMBERS)
            plan.reason = target.reason if sources or hidden else FIRST
        else:
            plan.target, plan.size = target, run.values[norm.value].shape[1]
    else:
        found = reader.prior(call)
        if found is None:
            plan.reason = "the posteriors of its sources do not reach it" if sources else FIRST
        else:
            plan.target, plan.size = found
            leaves = program.leaves(plan.target, Posterior)
            plan.posteriors = tuple(sorted(step.call for step in leaves if isinstance(step, Posterior)))
    return plan


FirstCalls = dict[int, int]
"""By the identity of a norm, and by every call of it: the number of its first call."""


def _first_calls(traces: list[Trace], identities: list[list[int]]) -> tuple[FirstCalls, FirstCalls]:
    by_norm, by_call = FirstCalls(), FirstCalls()
    for run, here in zip(traces, identities, strict=True):
        for norm, identity in zip(run.norms, here, strict=True):
            by_call[identity] = by_norm.setdefault(id(norm.module), identity)
    return by_norm, by_call


def _needs(call: CallPlan, first_calls: tuple[FirstCalls, FirstCalls], program: Program) -> tuple[int, ...]:
    """The norms whose beliefs or posteriors are in the prior of this call."""
    if call.target is None:
        return ()
    by_norm, by_call = first_calls
    beliefs = [step.norm.module() for step in program.leaves(call.target, NormBelief) if isinstance(step, NormBelief)]
    found = {by_norm[id(norm)] for norm in beliefs if id(norm) in by_norm}
    return tuple(sorted(found | {by_call[source] for source in call.posteriors}))


def _add_path(
    call: CallPlan, other: CallPlan, identity: int, first_calls: tuple[FirstCalls, FirstCalls], program: Program
) -> None:
    """Add another path to a call, unless it has this path already."""
    other.identity, other.needs = identity, _needs(other, first_calls, program)
    if all(other.needs != known.needs for known in (call, *call.others)):
        call.others.append(other)


def _agree(plans: dict[str, NormPlan]) -> None:
    """A norm has one A for all its calls. A call with another number of posteriors than the first gets no prior."""
    for plan in plans.values():
        sizes = [path.size for call in plan.calls for path in (call, *call.others) if path.size is not None]
        for path in (path for call in plan.calls for path in (call, *call.others)):
            if path.size is not None and path.size != sizes[0]:
                path.target, path.posteriors, path.needs = None, (), ()
                path.reason = f"this call reads {path.size} posterior entries, the first call {sizes[0]}"


def describe_path(run: Trace, call: int) -> str:
    """The operations between a norm and the nearest norm before it, in the order in which they run."""
    index, steps = run.norms[call].value, []
    while True:
        value = run.values[index]
        if value.op is None or run.ops[value.op].norm is not None:
            break
        op = run.ops[value.op]
        steps.append(_described(run, value.op))
        fed = [i for i in op.inputs if run.values[i].fed]
        if not fed:
            break
        # Follow an operand that a norm reaches. If there are several, follow the one with the nearest norm.
        index = max(fed, key=lambda i: (run.values[i].sources != 0, run.values[i].sources.bit_length(), i))
    shown = [step for step in reversed(steps) if step]
    merged = [step for i, step in enumerate(shown) if i == 0 or step != shown[i - 1]]
    return " → ".join(merged if len(merged) <= 6 else [*merged[:2], "…", *merged[-3:]])


def _described(run: Trace, index: int) -> str:
    op = run.ops[index]
    if op.name in ("contiguous", "to", "dropout", "clone", "float", "getitem", "view", "reshape"):
        return ""
    if op.name.startswith("conv") and len(op.inputs) > 1:
        kernel = "×".join(str(size) for size in run.values[op.inputs[1]].shape[2:])
        return f"{op.name.replace('conv_transpose', 'transposed conv').rstrip('123d')} {kernel}"
    return op.name
