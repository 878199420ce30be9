"""Converted models on CUDA: backward runs in threads of its own there, and constants of the plan have to follow."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kalmannorm import convert, fold, recalibrate, set_inference, to_batchnorm
from support.converted_net import assert_same, step
from support.gpu_nets import TRANSITIONS, Shuffled, image, net

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _on_cuda(monkeypatch):
    monkeypatch.setattr("support.converted_net.image", lambda batch=4, seed=0: image(batch, seed).cuda())
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_moved_after_conversion_equals_converted_there(transition):
    updated, there = net(transition, "cpu").cuda(), net(transition, "cpu")
    twin = convert(to_batchnorm(there).cuda(), image().cuda(), transition=transition, statistics_batch_size=2)
    twin.load_state_dict(there.state_dict())
    assert_same(step(updated), step(twin))


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_activation_checkpointing_on_cuda(transition):
    model = net(transition)
    expected = step(copy.deepcopy(model))
    model.run = lambda block, x: checkpoint(block, x, use_reentrant=False)
    assert_same(step(model), expected)


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_autocast_on_cuda(transition):
    model = net(transition)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        model(image().cuda()).float().square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transition", TRANSITIONS)
def test_torch_compile_with_inductor_on_cuda(transition):
    torch._dynamo.reset()
    model = net(transition)
    twin = copy.deepcopy(model)
    twin.compile(fullgraph=True)
    assert_same(step(twin), step(model))


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream", "ignore:Attempting to run cuBLAS")  # torch's own
@pytest.mark.parametrize("transition", TRANSITIONS)
def test_forward_and_backward_as_graphs(transition):
    """By torch's own means, which take no module with hooks: the model is put into another."""
    model = net(transition)
    twin, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    optimizers = [torch.optim.SGD(each.parameters(), 0.05) for each in (model, twin)]
    graphed = torch.cuda.make_graphed_callables(nn.Sequential(model), (image().cuda(),))
    model.load_state_dict(before)  # capturing runs the model, which moves its statistics
    for seed in range(1, 4):
        for each in (graphed, twin):
            each.zero_grad()
            each(image(seed=seed).cuda()).square().mean().backward()
        for (name, p), q in zip(twin.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(
                q.grad, p.grad, rtol=1e-4, atol=1e-6, msg=lambda said, name=name: f"{name} {said}"
            )
        for optimizer in optimizers:
            optimizer.step()
    for (name, p), q in zip(twin.named_buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-4, atol=1e-6, msg=name)
    x = image(3).cuda()
    torch.testing.assert_close(graphed.eval()(x), twin.eval()(x), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_inference_and_deployment_on_cuda(transition):
    model = net(transition)
    recalibrate(model, [image(seed=seed) for seed in range(3)], progress=False)
    x = image().cuda()
    population = model.eval()(x)
    torch.testing.assert_close(to_batchnorm(model)(x), population, rtol=0, atol=0)
    torch.testing.assert_close(fold(model)(x), population, rtol=1e-3, atol=1e-4)
    set_inference(model, "example")
    torch.testing.assert_close(model(x)[:1], model(x[:1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_a_model_on_two_devices(transition):
    """What is too large for one device lies on several: the prior follows, with its gradient."""

    class Split(Shuffled):
        def run(self, block, x):
            return block(x.to(next(block.parameters()).device))

    torch.manual_seed(0)
    model = Split()
    for part in (model.block2, model.block3, model.head):
        part.cuda()
    model = convert(model, image(), transition=transition, statistics_batch_size=2)
    model(image()).square().sum().backward()
    assert all(p.grad is not None and p.grad.device == p.device for p in model.parameters())
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_moved_between_steps(transition):
    """Kernels that were prepared on one device are not used on another, also if shapes are the same."""
    model = net(transition)
    for device in ("cuda", "cpu", "cuda"):
        model.to(device)
        results = []
        for each in (copy.deepcopy(model), model):  # the copy has prepared nothing
            each.zero_grad()
            out = each(image().to(device))
            out.square().mean().backward()
            results.append([out.detach(), *(p.grad for p in each.parameters()), *each.buffers()])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
