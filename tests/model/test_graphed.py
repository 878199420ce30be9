"""Graphed models, with a stand-in for CUDA graphs that runs the same work again on the CPU."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from kalmannorm import BatchKalmanNorm2d, convert, fuse, graphed
from kalmannorm._model.graphed.wrapping import wrapped
from support import two_ranks
from support.converted_net import Net, image
from support.graphed_cases import CASES, alike, close, converted, images, loss_of, pair, steps_alike
from support.rerun import Rerun


def make(model, limit=8):
    return wrapped(model, limit, Rerun())


@pytest.mark.parametrize("name", CASES)
def test_graphed(name):
    CASES[name](make, "cpu")


def test_without_a_gpu_the_model_runs_as_it_is():
    run, twin = graphed(converted("cpu")), converted("cpu")
    steps_alike(run, twin, images("cpu", 3))
    assert dict(run.cuda_graphs.eager) == {"on cpu": 3} and "3 eager: on cpu" in str(run.cuda_graphs)


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got function"):
        graphed(lambda x: x)
    with pytest.raises(ValueError, match="limit"):
        graphed(nn.Linear(2, 2), limit=0)
    with pytest.raises(TypeError, match=r"wrapped by DataParallel: pass the model inside"):
        graphed(nn.DataParallel(nn.Linear(2, 2)))


def test_an_error_of_the_model_is_its_own():
    class Failing(nn.Module):
        fails = False

        def __init__(self):
            super().__init__()
            self.body = nn.Linear(3, 3)

        def forward(self, x):
            if Failing.fails:
                raise ValueError("too bad")
            return self.body(x)

    run, x = make(Failing()), torch.randn(2, 3)
    run(x)
    Failing.fails = True
    with (
        pytest.warns(UserWarning, match=r"runs without a graph: .*too bad"),
        pytest.raises(ValueError, match="too bad"),
    ):
        run(x)
    assert run.body.weight is run.cuda_graphs.state.parameters[0]
    Failing.fails = False
    close(run(x), run.body(x))


def test_a_graphed_model_is_pickled_with_its_weights():
    run = make(converted("cpu"))
    loss_of(run, image()).backward()
    other = pickle.loads(pickle.dumps(run))
    assert type(other).__name__ == "Net" and len(other.cuda_graphs) == 0
    close(other.state_dict(), run.state_dict())


def test_a_deleted_model_frees_its_memory_at_once():
    gc.collect()
    gc.disable()
    try:
        run = make(converted("cpu"))
        for x in images("cpu", 4):
            loss_of(run, x).backward()
        assert run.cuda_graphs.replays
        gone = weakref.ref(run.stem[0].weight)
        del run, x
        assert gone() is None
    finally:
        gc.enable()


def test_a_fused_model_returns_to_its_own_forward():
    """An attribute that is set on the graphed model reaches the fused one."""
    run = make(fuse(converted("cpu"), image()))
    with pytest.warns(UserWarning, match="runs unfused"):
        run.block1 = nn.Identity()
    twin = copy.deepcopy(run.cuda_graphs.model)
    with pytest.warns(UserWarning, match="'block1.bn2' was replaced after conversion"):
        steps_alike(run, twin, images("cpu", 4))


def test_several_threads():
    run = make(converted("cpu"))
    twin = copy.deepcopy(run.cuda_graphs.model)
    expected = [twin.eval()(x).detach() for x in images("cpu", 8)]
    run.eval()
    found = [None] * 8

    def work(start):
        for number in range(start, 8, 2):
            out = run(image(seed=number))
            with run.cuda_graphs.lock:  # the stand-in runs the model again in a backward, a CUDA graph does not
                out.sum().backward()
            found[number] = out.detach()

    threads = [threading.Thread(target=work, args=(start,)) for start in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    close(found, expected)


def test_inside_an_activation_checkpoint():
    run, twin = pair(make, converted("cpu"))
    for x in images("cpu", 3):
        for each in (run, twin):
            each.zero_grad()
            x.requires_grad_()
            checkpoint(each, x, use_reentrant=False).square().mean().backward()
        alike(run, twin)
    assert run.cuda_graphs.replays == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_under_a_compiler_the_model_itself_is_traced():
    run, twin = pair(make, converted("cpu"))
    compiled = torch.compile(run, backend="aot_eager")
    for x in images("cpu", 2):
        for each in (compiled, twin):
            loss_of(each, x).backward()
    alike(run, twin)
    assert run.cuda_graphs.replays == 0


def test_norms_connected_by_hand_run_eagerly():
    """A norm keeps its posterior as an attribute, for the user."""

    class ByHand(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.conv, self.two = BatchKalmanNorm2d(3), nn.Conv2d(3, 4, 1), BatchKalmanNorm2d(4, 3)

        def forward(self, x):
            y = self.one(x)
            return self.two(self.conv(y), self.one.posterior)

    run, twin = pair(make, ByHand())
    for number in (2, 4):
        steps_alike(run, twin, images("cpu", number))
        close(run.two.posterior.mean, twin.two.posterior.mean)
        last = weakref.ref(run.two.posterior.mean)
        run.two.release()
        assert last() is None, "the graph of a forward is kept"
    assert run.cuda_graphs.replays == 0


def trained_by_ddp(rank):
    results = []
    for graph in (True, False):
        model = converted("cpu")
        net = DistributedDataParallel(make(model) if graph else model)
        optimizer = torch.optim.SGD(net.parameters(), 0.05)
        for number in range(5):
            optimizer.zero_grad()
            loss_of(net, image(seed=2 * number + rank)).backward()
            optimizer.step()
        with net.no_sync():
            loss_of(net, image(seed=rank)).backward()
        results.append(
            [each.detach() for each in (*model.state_dict().values(), *(p.grad for p in model.parameters()))]
        )
        if graph:
            assert net.module.cuda_graphs.replays == 4, str(net.module.cuda_graphs)
    return results


def test_two_ranks(tmp_path):
    ranks = two_ranks.run(tmp_path, {"ddp": trained_by_ddp})
    for each in ranks:
        close(*each["ddp"])
    weights = [each["ddp"][0][0] for each in ranks]
    close(*weights)


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    state, results = accelerate.state.AcceleratorState, []
    state._reset_state(reset_partial_state=True)  # it belongs to the process: another test may have set it
    for graph in (True, False):
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
        model = converted("cpu")
        model = make(model) if graph else model
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.05))
        for x in images("cpu", 6):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, x))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        if graph:
            assert model.cuda_graphs.replays >= 4, str(model.cuda_graphs)
        results.append(list(model.state_dict().values()))
    state._reset_state(reset_partial_state=True)
    torch.testing.assert_close(*results, rtol=2e-2, atol=1e-3)


@pytest.mark.filterwarnings("ignore")  # Lightning warns of workers, loggers and its own imports
def test_lightning():
    lightning = pytest.importorskip("pytorch_lightning")

    class Training(lightning.LightningModule):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def training_step(self, batch, number):
            return self.net(batch).square().mean()

        def validation_step(self, batch, number):
            self.log("loss", self.net(batch).square().mean())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.05)

    results = []
    for graph in (True, False):
        net = converted("cpu")
        training = Training(make(net) if graph else net)
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, gradient_clip_val=1.0,
        )  # fmt: skip
        trainer.fit(training, *(DataLoader(images("cpu", number), batch_size=None) for number in (5, 2)))
        results.append((list(net.state_dict().values()), trainer.callback_metrics["loss"]))
        assert list(training.state_dict()) == [f"net.{name}" for name in net.state_dict()]
        if graph:
            assert training.net.cuda_graphs.replays >= 6, str(training.net.cuda_graphs)
    close(*results)


def test_the_whole_order_of_calls():
    """As in the README: convert, fuse, graph, train."""
    model = convert(Net(), image(), statistics_batch_size=2)
    run, twin = pair(make, fuse(model, image()))
    assert str(run.fusion) == str(twin.fusion)
    steps_alike(run, twin, images("cpu", 4))


def test_gradients_are_kept_without_a_copy():
    """Autograd copies a gradient whose strides are not those of the parameter. So graphs write them in its layout."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), Turned()).to(memory_format=torch.channels_last)
    run = make(net)
    addresses = []
    for x in images("cpu", 4):
        run.zero_grad()
        loss = loss_of(run, x.to(memory_format=torch.channels_last))
        if run.cuda_graphs.replays == 3:
            (captured,) = run.cuda_graphs.captured.values()
            gradients = captured.passes.gradients
            copied = gradients.copied

            def watched(joined, copied=copied):
                found = copied(joined)
                addresses.extend(each.data_ptr() for each in found)
                return found

            gradients.copied = watched
        loss.backward()
    assert len(addresses) == 5 == len({*addresses} & {parameter.grad.data_ptr() for parameter in run.parameters()})
    for parameter in run.parameters():
        assert parameter.stride() == parameter.grad.stride() and parameter.grad.data_ptr() % 64 == 0


class Turned(nn.Module):
    """The gradient of its weight is transposed."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4))

    def forward(self, x):
        return (x.mean((2, 3))[..., None] * self.weight.t()).sum(1)


def test_a_slice_of_a_weight():
    """`weight.data` may be replaced by a part of itself, at the same address."""
    run, twin = pair(make, nn.Sequential(nn.Linear(6, 8), nn.Tanh()))
    for size in (8, 5):
        for each in (run, twin):
            for parameter in each[0].parameters():
                parameter.grad = None
                parameter.data = parameter.data[:size]
        for x in torch.randn(3, 4, 6):
            results = []
            for each in (run, twin):
                each.zero_grad()
                results.append(each(x))
                results[-1].sum().backward()
            close(*results)
            alike(run, twin)
    assert run.cuda_graphs.captures == 2


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_part_that_is_scripted():
    """Its registries are no dicts, and its parameters are new objects whenever they are read."""
    part = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
    run, twin = pair(make, nn.Sequential(nn.Linear(6, 6), part))
    for x in torch.randn(3, 4, 6):
        results = [loss_of(each, x) for each in (run, twin)]
        for loss in results:
            loss.backward()
        close(*results)
        close(run[0].weight.grad, twin[0].weight.grad)
    assert run.cuda_graphs.replays == 0
