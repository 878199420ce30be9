"""The same promises on a CUDA device, which the other tests do not touch. Skipped where there is none."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from kalmannorm import BatchKalmanNorm2d, Moments, batch_kalman_norm, check_statistics, moments, set_inference
from kalmannorm._ops.dispatch import kernels_for
from kalmannorm._ops.normalize import aten, naive
from kalmannorm._ops.normalize.registered import batch_kalman_norm as op
from support.gpu_kernels import kernels_in
from support.inference_net import Net
from support.op_arguments import SHAPES, TOLERANCE, arguments, channels_last, relative_error, run
from support.ready_launches import forget
from support.waiting import nothing_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:.*Profiler clears events"),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("m", [1, 2, 3, 16])
@pytest.mark.parametrize("shape", [*SHAPES.values(), (16, 64, 28, 28)], ids=str)
def test_matches_reference(shape, m, layout, dtype):
    matches_reference(shape, m, layout, dtype)


LARGE = {
    "groups shared by eight, channels leave a tile half empty": (64, 96, 77, 77),
    "two halves of each group": (133, 160, 41, 41),
    "the last block of channels narrow, long groups": (16, 72, 189, 189),
    "two positions abreast": (64, 96, 78, 78),
    "two abreast, a ragged last group": (133, 160, 42, 42),
    "eight abreast, a ragged last group": (17, 72, 188, 188),
    "sixty-four abreast": (32, 17, 256, 256),
}


@pytest.mark.parametrize("m", [2, 256])
@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE.keys())
def test_large_tensors_match_reference(shape, m):
    """As they are launched from 69 MB on; nearly all with a last tile that is not full, by positions or channels."""
    matches_reference(shape, m, "channels_last", torch.bfloat16)


def matches_reference(shape, m, layout, dtype):
    inputs = arguments(shape, m, dtype, device="cuda")
    if layout == "channels_last":
        inputs[0] = channels_last(inputs[0].detach()).requires_grad_()
    inputs = [t.detach().cuda().requires_grad_() for t in inputs]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    grads = [torch.randn_like(o) for o in op(*inputs, m, 1e-5)]
    actual, actual_grads = run(op, inputs, m, grads)
    expected, expected_grads = run(naive.batch_kalman_norm, exact, m, grads)
    for index, (a, e) in enumerate(zip((*actual, *actual_grads), (*expected, *expected_grads), strict=True)):
        assert relative_error(a, e) < TOLERANCE[dtype], f"result {index}"
    assert actual[0].stride() == inputs[0].stride()


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "rows that begin anywhere"])
@pytest.mark.parametrize("m", [2, 16])
def test_launches_that_were_made_ready_give_the_same_bits(m, shift, monkeypatch):
    """The second and third step pass Triton by."""
    from triton.runtime.jit import JITFunction

    from kalmannorm._ops import triton_launching

    if not triton_launching.TRIED:
        pytest.skip("this Triton is asked every time")

    def step(seed):
        torch.manual_seed(seed)
        x = torch.randn(16, 64, 28, 28, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        rows = [torch.rand(64 + shift, device="cuda")[shift:].requires_grad_() for _ in range(5)]
        mean, var, gain, weight, bias = rows
        outputs = op(x, mean[None], var[None], gain, weight, bias, m, 1e-5)
        grads = torch.autograd.grad(outputs, [x, *rows], [torch.randn_like(output) for output in outputs])
        return [*outputs, *grads]

    forget()
    step(0)
    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", lambda *_, **__: pytest.fail("Triton was asked again"))
        actual = step(1), step(2)
    for seed, results in enumerate(actual, 1):
        forget()
        for a, b in zip(results, step(seed), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(4, 8, 5, 5), (2, 64, 56, 56)], ids=["one launch", "two launches"])
def test_launches_through_c_give_the_same_bits_in_every_thread(shape):
    """The first thread has a CUDA context. A new one gets it from Triton."""
    from kalmannorm._ops import triton_launching
    from kalmannorm._ops.normalize.row_kernels import Memory, Scratch
    from kalmannorm._ops.normalize.triton_rows import TritonRows

    if not triton_launching.DIRECT:
        pytest.skip("this Triton is asked every time")
    torch.manual_seed(0)
    x, grad_y = (torch.randn(shape, device="cuda").to(memory_format=torch.channels_last) for _ in range(2))
    C = shape[1]
    rows = torch.rand(5, 1, C, device="cuda")
    kernels = TritonRows(x, 2, 1e-5, residual=False, relu=True, pitch=C)
    found = []

    def step():
        memory = Memory(torch.empty(4 * kernels.step, device="cuda"), Scratch())
        y = kernels.forward(x, rows, None, memory, 0)
        dx, d_rows, _ = kernels.backward(grad_y, x, y, rows, memory, 0)
        torch.cuda.synchronize()
        found.append([y, memory.moments, dx, d_rows])

    step()
    launches = *kernels.forward_direct, *kernels.backward_direct
    assert {type(launch).__name__ for launch in launches} == {"Launch"}
    step()
    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert len(found) == 3
    for results in found[1:]:
        for actual, expected in zip(results, found[0], strict=True):
            assert torch.equal(actual, expected)


def test_a_parameter_on_the_host_is_refused_at_every_call():
    """By Triton, which must be asked: an address of the host would be read on the device."""
    x = torch.randn(16, 64, 28, 28, device="cuda", dtype=torch.bfloat16)
    rows = [torch.rand(64, device="cuda") for _ in range(2)]
    for weight in (rows[0], rows[0].cpu(), rows[0], rows[0].cpu()):
        if weight.is_cuda:
            op(x, None, None, None, weight, rows[1], 2, 1e-5)
        else:
            with pytest.raises(ValueError, match="cpu tensor"):
                op(x, None, None, None, weight, rows[1], 2, 1e-5)
    torch.cuda.synchronize()


def test_gradcheck():
    inputs = [t.detach().cuda().requires_grad_() for t in arguments((4, 2, 3), 2)]
    assert torch.autograd.gradcheck(lambda *a: op(*a, 2, 1e-5), inputs)
    torch.library.opcheck(op, (*inputs, 2, 1e-5))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_training_with_autocast_and_compile(memory_format):
    model = Net(attribute=True).cuda().to(memory_format=memory_format)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, fullgraph=True)
    for _ in range(3):
        x = torch.randn(8, 3, 7, 6, device="cuda").contiguous(memory_format=memory_format)
        with torch.autocast("cuda", torch.bfloat16):
            expected, actual = model(x), compiled(x)
        assert actual.dtype == torch.bfloat16
        assert model.norms[2].posterior.mean.dtype == torch.float32
        assert relative_error(actual, expected) < 3e-2
        actual.float().square().mean().backward()
        expected.float().square().mean().backward()
    for name, p in twin.named_parameters():
        assert torch.isfinite(p.grad).all(), name


def test_nothing_waits_for_the_device_in_a_training_step():
    model = Net().cuda()
    x = torch.randn(8, 3, 7, 6, device="cuda")
    model(x).sum().backward()
    with nothing_waits():
        model(x).sum().backward()


def test_a_training_step_goes_into_a_cuda_graph():
    model = Net().cuda()
    twin = copy.deepcopy(model)
    x = torch.randn(8, 3, 7, 6, device="cuda")

    def step(net):
        net.zero_grad(set_to_none=False)
        net(x).square().mean().backward()
        for norm in net.norms:
            norm.release()  # a held posterior keeps the last step's graph, and with it gradients of another stream

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(twin)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(twin)
    graph.replay()
    for _ in range(4):
        step(model)
    torch.cuda.synchronize()
    for (name, p), q in zip(model.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(q, p, msg=name)


def test_bad_batch_is_reported_when_asked():
    layer = BatchKalmanNorm2d(3).cuda()
    layer(torch.full((2, 3, 4, 4), float("nan"), device="cuda"))
    assert torch.equal(layer.running_mean, torch.zeros(3, device="cuda"))
    with pytest.warns(RuntimeWarning, match="NaN or Inf"):
        assert check_statistics(nn.ModuleDict({"norm": layer})) == {"norm": 1}


@pytest.mark.parametrize("mode", ["population", "batch", "example"])
def test_inference_equals_the_cpu(mode):
    torch.backends.cudnn.allow_tf32 = False
    net = Net()
    net(torch.randn(8, 3, 7, 6))
    set_inference(net, mode)
    x = torch.randn(5, 3, 7, 6)
    expected = net.eval()(x)
    actual = copy.deepcopy(net).cuda()(x.cuda())
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-3, atol=1e-4)


def test_moments_travel_on_the_device():
    conv, weight, bias = nn.Conv2d(4, 6, 3, padding=1), torch.randn(4), torch.randn(4)

    def prior(device):
        belief = moments.belief(weight.to(device), bias.to(device))
        here = copy.deepcopy(conv).to(device)
        return moments.convolution(moments.relu(belief), here.weight, here.bias, padding=1, input_size=(8, 8))

    on_cpu, on_cuda = prior("cpu"), prior("cuda")
    torch.testing.assert_close(on_cuda.mean.cpu(), on_cpu.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(on_cuda.var.cpu(), on_cpu.var, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_large_tensor_offsets(memory_format):
    """More than 2^31 values: sizes must not wrap, forward or backward."""
    x = torch.empty(33, 64, 1024, 1024, device="cuda", dtype=torch.bfloat16, memory_format=memory_format).normal_()
    x.requires_grad_()
    y, posterior = batch_kalman_norm(x, None, None, None, None, statistics_batch_size=2, relu=True)
    last = x[32:].detach().requires_grad_()
    expected, _ = batch_kalman_norm(last, None, None, None, None, relu=True)
    torch.testing.assert_close(posterior.mean[-1], last.float().mean((0, 2, 3)), rtol=1e-3, atol=1e-4)
    assert relative_error(y[32:], expected) < 1e-2
    (dx,) = torch.autograd.grad(y, x, y.detach())
    assert relative_error(dx[32:], torch.autograd.grad(expected, last, expected.detach())[0]) < 1e-2


def test_who_runs_where():
    shape = (4, 3, 2, 2)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert kernels_for(torch.empty(shape, device="cuda", dtype=dtype), 2) is not aten
    assert kernels_for(torch.empty(shape, device="cuda", dtype=torch.float64), 2) is aten
    assert kernels_for(torch.empty(shape), 2) is not kernels_for(torch.empty(shape, device="cuda"), 2)


@pytest.mark.parametrize(
    ("shape", "m", "forward", "backward"),
    [((32, 256, 14, 14), 2, 1, 3), ((32, 64, 56, 56), 32, 2, 3)],
    ids=["on chip", "streamed"],
)
def test_how_many_kernels_run(shape, m, forward, backward):
    """No zeros for gradients that do not arrive, no sums after the op but over groups and of the gain."""
    C = shape[1]
    x = torch.randn(shape, device="cuda").contiguous(memory_format=torch.channels_last).requires_grad_()
    rows = [torch.ones(1, C, device="cuda", requires_grad=True) for _ in range(2)]
    weight, bias = (torch.ones(C, device="cuda", requires_grad=True) for _ in range(2))
    gain = torch.tensor(0.5, device="cuda", requires_grad=True)

    def run():
        y, _ = batch_kalman_norm(x, Moments(*rows), gain, weight, bias, statistics_batch_size=m, relu=True)
        return y

    y = run()
    assert len(kernels_in(run)) == forward
    leaves = (x, *rows, gain, weight, bias)
    g = torch.randn_like(y)
    assert len(kernels_in(lambda: torch.autograd.grad(y, leaves, g, retain_graph=True))) == backward


def test_a_norm_moves_its_statistics_in_one_kernel():
    layer = BatchKalmanNorm2d(64, statistics_batch_size=2).cuda()
    x = torch.randn(8, 64, 7, 7, device="cuda")
    assert sum("track" in name for name in kernels_in(lambda: layer(x))) == 1
    assert len(kernels_in(lambda: layer(x))) <= 4


@pytest.mark.parametrize("residual", [False, True], ids=["relu", "residual and relu"])
def test_memory_is_at_most_that_of_batch_norm(residual):
    x = torch.randn(16, 64, 56, 56, device="cuda", dtype=torch.bfloat16).requires_grad_()
    r = torch.randn_like(x) if residual else None
    weight, bias = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")

    def ours():
        return batch_kalman_norm(x, None, None, weight, bias, statistics_batch_size=2, residual=r, relu=True)[0]

    def theirs():
        y = nn.functional.batch_norm(x, None, None, weight, bias, True)
        return torch.relu(y if r is None else y + r)

    def held(function) -> tuple[int, int]:
        function()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = function()
        kept = torch.cuda.memory_allocated() - before
        y.backward(y.detach())
        x.grad = None
        return kept, torch.cuda.max_memory_allocated() - before

    for mine, limit in zip(held(ours), held(theirs), strict=True):
        assert mine <= limit + 2**16
