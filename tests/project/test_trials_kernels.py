"""The kernels of the trials against PyTorch's operations: outputs and gradients, with all memory poisoned before."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kalmannorm.lab.models.cifar_inception import CifarInception
from support.poisoned import DEVICE, poison
from trials import faster
from trials.evidence import TABLE3
from trials.triton_parts import JoinedReLUs, MaxPool, Mean, Shared

pytestmark = [  # of Triton's interpreter
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    poison(monkeypatch)


def some(*shape, dtype=torch.float32, coarse=False):
    """Channels last. Coarse values have many ties."""
    x = torch.randn(shape, device=DEVICE)
    x = x.mul(2).round() if coarse else x
    return x.to(dtype).to(memory_format=torch.channels_last).requires_grad_()


def gradients(y, inputs):
    torch.manual_seed(1)
    return torch.autograd.grad(y, inputs, torch.randn(y.shape, device=DEVICE).to(y.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("window", [(3, 1, 1), (3, 2, 1), (2, 2, 0)], ids=str)
@pytest.mark.parametrize("shape", [(2, 5, 7, 6), (3, 70, 4, 5), (1, 3, 2, 9), (1, 2, 3, 66)], ids=str)
def test_max_pooling_is_that_of_torch(shape, window, dtype):
    x = some(*shape, dtype=dtype, coarse=True)
    ours, theirs = MaxPool.apply(x, *window), F.max_pool2d(x, *window)
    assert torch.equal(ours, theirs) and ours.is_contiguous(memory_format=torch.channels_last)
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(*gradients(ours, x), *gradients(theirs, x), **tolerance)


@pytest.mark.parametrize("window", [(3, 1, 1), (3, 2, 1)], ids=str)
def test_max_pooling_passes_nan_on(window):
    x = some(1, 4, 5, 5)
    with torch.no_grad():
        x[0, 1, 2, 2] = torch.nan
    torch.testing.assert_close(MaxPool.apply(x, *window), F.max_pool2d(x, *window), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_joined_relus_are_those_of_torch(dtype):
    parts = [some(2, width, 3, 5, dtype=dtype) for width in (64, 5, 16, 70)]
    with torch.no_grad():
        parts[1][0, 0, 0, 0] = 0
    ours, theirs = JoinedReLUs.apply(*parts), torch.cat([F.relu(part) for part in parts], 1)
    assert torch.equal(ours, theirs)
    for mine, other in zip(gradients(ours, parts), gradients(theirs, parts), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(
    "pool",
    [nn.MaxPool2d(3, 1, padding=(1, 0)), nn.MaxPool2d((3, 2)), nn.MaxPool2d(12, 1), nn.MaxPool2d(2, 1, dilation=2)],
    ids=str,
)
def test_other_windows_are_left_to_torch(pool):
    x = some(1, 3, 13, 14)
    assert torch.equal(faster._max_pool(pool, x), pool(x))


def test_joined_relus_of_one_column():
    """The stride of a dimension of size 1 has no meaning."""
    parts = [some(2, 16, 4, 1), some(2, 8, 4, 1)]
    grad = torch.randn(2, 4, 24, device=DEVICE).as_strided((2, 24, 4, 1), (96, 1, 24, 7))
    ours, theirs = JoinedReLUs.apply(*parts), torch.cat([F.relu(part) for part in parts], 1)
    for mine, other in zip(*(torch.autograd.grad(y, parts, grad) for y in (ours, theirs)), strict=True):
        assert torch.equal(mine, other)


def test_joined_relus_take_the_gradient_of_a_mean():
    """It is expanded from one value per image and channel."""
    parts = [some(3, width, 4, 5) for width in (64, 5)]
    ours = Mean.apply(JoinedReLUs.apply(*parts))
    theirs = torch.cat([F.relu(part) for part in parts], 1).mean((2, 3))
    assert torch.equal(ours, theirs)
    for mine, other in zip(gradients(ours, parts), gradients(theirs, parts), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("readers", [2, 3, 4])
def test_gradients_of_a_shared_input_are_added(readers):
    x = some(2, 9, 5, 7)
    factors = torch.arange(1, readers + 1)
    ours = sum(factor * part.sin() for factor, part in zip(factors, Shared.apply(x, readers), strict=True))
    theirs = sum(factor * x.sin() for factor in factors)
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(*gradients(ours, x), *gradients(theirs, x))


@pytest.fixture
def _full_float32():
    """TF32 on a GPU would differ by more than the kernels do."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


@pytest.mark.usefixtures("_full_float32")
@pytest.mark.parametrize("name", TABLE3)
def test_a_net_of_the_table_has_the_same_outputs_and_gradients(name):
    torch.manual_seed(0)
    model = CifarInception(10, width=0.25).to(DEVICE, memory_format=torch.channels_last)
    x = some(4, 3, 12, 12)
    TABLE3[name].apply(model, x.detach(), 10)
    for norm in model.modules():
        if isinstance(norm, nn.GroupNorm):
            norm.forward = lambda *inputs, own=norm: nn.GroupNorm.forward(own, *inputs)  # it is not compiled here
    state = {key: value.clone() for key, value in model.state_dict().items()}
    found = []
    for fast in (False, True):
        model.load_state_dict(state)
        if fast:
            for module in model.modules():
                if isinstance(module, faster.WITH_TRITON):
                    module.forward = faster._Faster(module)
        y = model(x)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found.append([y, *gradients(y, [x, *parameters]), *model.buffers()])
        found[-1] = [tensor.clone() for tensor in found[-1]]
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
