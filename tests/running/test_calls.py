"""Host work of a training step, counted without a GPU: kernels are not launched, everything around them runs."""

from __future__ import annotations

import operator
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torchvision
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase

import kalmannorm
from kalmannorm import ClosingPhase, convert, fuse
from kalmannorm._ops import dispatch
from support.no_launches import no_launches
from support.short_way import count_short

pytest.importorskip("triton")
PACKAGE = str(Path(kalmannorm.__file__).parent)
NORMS = 53  # of ResNet-50


@pytest.fixture(autouse=True)
def _no_launches(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("kernels would really run")
    no_launches(monkeypatch)


def calls_of(work):
    """Python and C functions that `work` calls, with the file of each Python function."""
    found = Counter()

    def seen(frame, event, argument):
        if event == "call":
            found[frame.f_code.co_filename] += 1
        elif event == "c_call":
            found["C"] += 1

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def resnet50(x, **options):
    model = torchvision.models.resnet50(num_classes=10).to(memory_format=torch.channels_last)
    return convert(model, x, statistics_batch_size=2, **options)


def steps(model, x, count=1):
    for _ in range(count):
        model(x).sum().backward()


@pytest.mark.filterwarnings("ignore:kalmannorm")  # nothing is computed
@pytest.mark.parametrize("to", ["kalman", "ghost"])
def test_calls_of_a_step_of_resnet50(to, monkeypatch):
    """Forward and backward, all calls of the model included. On the long way it was 767 per norm, and 335 for ghost
    norms. It is 42 with BatchNorm."""
    x = torch.randn(4, 3, 32, 32).to(memory_format=torch.channels_last)
    model = resnet50(x if to == "kalman" else None, to=to)
    with monkeypatch.context() as patch:
        taken = count_short(patch)
        steps(model, x, 3)
    assert len(taken) == 3 * NORMS
    found = calls_of(lambda: steps(model, x))
    assert sum(found.values()) <= 110 * NORMS, sum(found.values()) / NORMS


@pytest.mark.filterwarnings("ignore:kalmannorm")
@pytest.mark.parametrize(("rank", "most"), [(None, 140), (4, 160)], ids=["dense", "low rank"])
def test_calls_of_a_step_with_learned_transitions(rank, most, monkeypatch):
    """As above. It was 581 per norm on the long way. A low rank needs a product of matrices for each norm."""
    x = torch.randn(4, 3, 32, 32).to(memory_format=torch.channels_last)
    model = resnet50(x, transition="learned", rank=rank)
    with monkeypatch.context() as patch:
        taken = count_short(patch)
        steps(model, x, 3)
    assert len(taken) == 3 * NORMS
    found = calls_of(lambda: steps(model, x))
    assert sum(found.values()) <= most * NORMS, sum(found.values()) / NORMS


@pytest.mark.filterwarnings("ignore:kalmannorm")
def test_calls_of_a_step_at_the_end_of_a_closing_phase(monkeypatch):
    """As above, with the step of the phase. It was 626 per norm on the long way."""
    x = torch.randn(4, 3, 32, 32).to(memory_format=torch.channels_last)
    model = resnet50(x)
    phase = ClosingPhase(model, 100, start=0, end=0)
    with monkeypatch.context() as patch:
        taken = count_short(patch)
        steps(model, x, 3)
        phase.step()
    assert len(taken) == 3 * NORMS
    assert sum(calls_of(lambda: (steps(model, x), phase.step())).values()) <= 135 * NORMS


@pytest.mark.filterwarnings("ignore:kalmannorm", "ignore:ClosingPhase.step")
def test_calls_of_a_step_of_the_recipe(monkeypatch):
    """As above. It was 614 per norm until the priors have faded, when each layer of a prior was computed by itself."""
    x = torch.randn(4, 3, 32, 32).to(memory_format=torch.channels_last)
    model = resnet50(x, weight_standardization=True)
    steps(model, x, 3)
    first = sum(calls_of(lambda: steps(model, x)).values())
    assert first <= 205 * NORMS, first / NORMS
    phase = ClosingPhase(model, 100, start=0, end=0, fade_prior=True)
    with monkeypatch.context() as patch:
        taken = count_short(patch)
        steps(model, x, 3)
        phase.step()
    assert len(taken) == 3 * NORMS
    settled = sum(calls_of(lambda: (steps(model, x), phase.step())).values())
    assert settled <= 205 * NORMS, settled / NORMS


def standardized(weight_standardization):
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10)
    return convert(model, to="group", weight_standardization=weight_standardization)


CONVOLUTIONS = 20  # of ResNet-18
UPLOAD = {"aten::to", "aten::lift_fresh", "aten::detach_"}
"""Operators that make a tensor of a list."""


def operators_of(work):
    """Operators that compute something, without those that they call themselves. A profiler disturbs no launch."""
    with torch.autograd.profiler.profile() as profile:
        work()
    views = {"as_strided", "view", "expand", "movedim", "permute", "t", "detach", "empty", "empty_like"}
    events = [event for event in profile.function_events if event.name.startswith("aten::")]
    return Counter(
        event.name
        for event in events
        if not (event.cpu_parent is not None and event.cpu_parent.name.startswith("aten::"))
        and event.name.removeprefix("aten::") not in views
    )


@pytest.mark.parametrize("kernels", [False, True], ids=["on a CPU", "with kernels"])
def test_operators_of_computed_filters(kernels, monkeypatch):
    """What standardized filters add to a step of ResNet-18. It was 100 operators forward, and 300 backward."""
    from kalmannorm._ops.triton_launching import Ready

    launched = []
    monkeypatch.setattr(Ready, "__call__", lambda self, *given: launched.append(self.kernel.__name__))
    monkeypatch.setattr(dispatch, "has_kernels", lambda device: kernels)
    x, found, outs = torch.randn(2, 3, 32, 32), [], []
    for model in (standardized(False), standardized(True)):
        steps(model, x, 2)
        model.zero_grad()
        launched.clear()
        forward = operators_of(lambda model=model: outs.append(model(x)))
        found.append((forward, operators_of(lambda: outs[-1].backward(torch.ones_like(outs[-1])))))
    (plain_forward, plain_backward), (forward, backward) = found
    if kernels:
        assert launched == ["filters_kernel", "filters_backward_kernel"]
        assert not forward - plain_forward
        assert set(backward - plain_backward) <= UPLOAD  # gradients may have other addresses than in the last step
    else:
        assert not launched
        assert forward - plain_forward == Counter({"aten::layer_norm": CONVOLUTIONS})
        assert backward - plain_backward == Counter({"aten::native_layer_norm_backward": CONVOLUTIONS})


def test_calls_of_computed_filters():
    """What standardized filters add in Python to a step of ResNet-18, which has 68 modules."""
    x, found = torch.randn(2, 3, 32, 32), []
    for model in (standardized(False), standardized(True)):
        steps(model, x, 2)
        found.append(sum(calls_of(lambda model=model: steps(model, x)).values()))
    assert found[1] - found[0] <= 85 * CONVOLUTIONS, (found[1] - found[0]) / CONVOLUTIONS


@pytest.mark.filterwarnings("ignore:kalmannorm")
def test_files_of_the_forward_of_one_norm():
    """Someone who reads what happens in a step opens few files. It was 16."""
    x = torch.randn(4, 3, 32, 32).to(memory_format=torch.channels_last)
    model = resnet50(x)
    steps(model, x, 2)
    norm, found = model.layer2[1].bn2, []
    forward = norm.forward

    def counted(*args, **options):
        found.append(calls_of(lambda: results.append(forward(*args, **options))))
        return results[-1]

    results = []
    norm.forward = counted
    steps(model, x)
    files = {name.removeprefix(PACKAGE) for name in found[0] if name.startswith(PACKAGE)}
    assert 1 < len(files) <= 8, files


class Trace(NamedTuple):
    """What `torch.compile` makes of a forward: compiled functions, nodes, guards and traced instructions.

    Nodes without inputs, outputs and the parts of tuples.
    """

    functions: int
    nodes: int
    guards: int
    instructions: int


def trace_of(model, x, monkeypatch):
    torch._dynamo.reset()
    graphs, guards, steps = [], [], []

    def keep(graph, inputs):
        graphs.append(graph)
        guards.extend(torch._guards.TracingContext.get().guards_context.dynamo_guards)
        return graph

    original = InstructionTranslatorBase.step

    def step(self):
        steps.append(self)
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(InstructionTranslatorBase, "step", step)
        torch.compile(model, backend=keep, fullgraph=True)(x)
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    listed = [node for node in nodes if node.op not in ("placeholder", "output", "get_attr")]
    kept = [node for node in listed if node.target is not operator.getitem]
    functions = {id(translator) for translator in steps if isinstance(translator, InstructionTranslator)}
    return Trace(len(functions), len(kept), len(guards), len(steps))


@pytest.mark.parametrize("fused", [False, True])
def test_compiled_resnet18(fused, monkeypatch):
    """It was 2,800 nodes, and 89 with BatchNorm, whose counters are nodes too.

    Three functions with 2,016 guards and 13,756 instructions were compiled, for BatchNorm one with 1,168 and 3,787. The
    time of a compilation with cached kernels is that of these. An instruction of ours takes less time than one of
    BatchNorm, which reads buffers.
    """
    x = torch.randn(4, 3, 32, 32)
    batchnorm = torchvision.models.resnet18(num_classes=10)
    model = convert(batchnorm, x, statistics_batch_size=2)
    found = trace_of(fuse(model, x) if fused else model, x, monkeypatch)
    expected = trace_of(batchnorm, x, monkeypatch)
    assert found.functions == expected.functions == 1
    assert found.nodes < expected.nodes
    assert found.guards < 1.2 * expected.guards
    assert found.instructions < 2.2 * expected.instructions


def test_compiled_ghost_resnet18(monkeypatch):
    """Compiled code does not use the wires of ghost norms. They and the hooks add no node."""
    x = torch.randn(4, 3, 32, 32)
    model = convert(torchvision.models.resnet18(num_classes=10), to="ghost", statistics_batch_size=2)
    found = trace_of(model, x, monkeypatch)
    for module in model.modules():
        vars(module).pop("wire", None)
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
    expected = trace_of(model, x, monkeypatch)
    assert found.functions == expected.functions == 1
    assert found.nodes == expected.nodes
    assert found.guards < 1.1 * expected.guards  # of the hooks
    assert found.instructions < 1.05 * expected.instructions
