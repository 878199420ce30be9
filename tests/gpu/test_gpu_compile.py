"""Compiled training steps on a GPU: the results of eager steps, as code of inductor and as CUDA graphs."""

from __future__ import annotations

import copy

import pytest
import torch

from kalmannorm import fuse
from support.bundled_nets import IMAGE, Blocks, converted

pytestmark = [
    pytest.mark.gpu,
    # Nothing follows the last norm of the net, so the graph behind it is empty.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*cuBLAS.*no current CUDA context:UserWarning"),
]


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch._dynamo.reset()


BUFFERS = ("running_mean", "running_var", "observed_mean", "observed_var")


def net(fused=False):
    torch.manual_seed(0)
    model = converted(Blocks(), IMAGE).cuda().to(memory_format=torch.channels_last)
    x = torch.randn(8, *IMAGE[1:], device="cuda").to(memory_format=torch.channels_last)
    return (fuse(model, x) if fused else model), x


def train(model, call, batches):
    """Losses of steps, then the statistics."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.01), []
    for x in batches:
        torch.compiler.cudagraph_mark_step_begin()
        loss = call(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return torch.stack(losses), {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_alike(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("fused", [False, True])
def test_equals_eager(fused, mode):
    model, x = net(fused)
    twin = copy.deepcopy(model)
    batches = [k * x for k in (1, -1, 2, 0.5, 1, 3)]  # CUDA graphs are recorded after the first steps
    call = torch.compile(twin, fullgraph=True, mode=None if mode == "default" else mode)
    assert_alike(train(twin, call, batches), train(model, model, batches))


def test_graphs_write_to_the_buffers_of_now():
    """A CUDA graph keeps addresses. Statistics must not go to buffers that the norms no longer have."""
    model, x = net()
    twin = copy.deepcopy(model)
    call = torch.compile(twin, fullgraph=True, mode="reduce-overhead")
    for each, run in ((model, model), (twin, call)):
        train(each, run, [x] * 4)
        for module in each.modules():
            for name in BUFFERS:
                if getattr(module, name, None) is not None:
                    module._buffers[name] = getattr(module, name).clone()
    assert_alike(train(twin, call, [-x] * 3), train(model, model, [-x] * 3))


def test_changing_sizes_under_autocast():
    model, _ = net()
    twin = copy.deepcopy(model)
    call = torch.compile(twin, fullgraph=True, dynamic=True)
    batches = [torch.randn(4, IMAGE[1], side, side, device="cuda") for side in (12, 16, 20, 13)]
    with torch.autocast("cuda", torch.bfloat16):
        found, expected = train(twin, call, batches), train(model, model, batches)
    torch.testing.assert_close(found[0], expected[0], rtol=2e-2, atol=2e-2)
