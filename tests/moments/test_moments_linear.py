"""Moments through linear layers against the layers themselves, run on samples.

For a linear map only the sample's own mean and covariance matter. A sample that has exactly mean 0 and unit covariance
therefore has no sampling error left, and what would be 1 % of noise becomes rounding.
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kalmannorm import moments
from kalmannorm.moments import Moments, belief, convolution, linear, output_size
from kalmannorm.moments import windows as geometry

torch.set_num_threads(1)


class Case:
    """A convolution: its id, the weight's shape, the input's spatial size, and its options."""

    def __init__(self, name, weight, size, **options):
        self.id, self.weight_shape, self.size, self.options = name, weight, size, options
        self.transposed = options.get("transposed", False)
        groups = options.get("groups", 1)
        self.inputs, self.outputs = (
            (weight[0], weight[1] * groups) if self.transposed else (weight[1] * groups, weight[0])
        )

    def draw(self, dtype=torch.float64, rows=1):
        """Moments with |mean| up to 4 deviations, a weight and a bias."""
        random = torch.Generator().manual_seed(sum(map(ord, self.id)))
        deviation = 0.1 + torch.rand(rows, self.inputs, generator=random, dtype=torch.float64) * 3
        mean = deviation * (torch.rand(rows, self.inputs, generator=random, dtype=torch.float64) * 8 - 4)
        weight = torch.randn(self.weight_shape, generator=random, dtype=torch.float64)
        bias = torch.randn(self.outputs, generator=random, dtype=torch.float64)
        return Moments(mean.to(dtype), deviation.square().to(dtype)), weight.to(dtype), bias.to(dtype)

    def predict(self, m: Moments, weight: Tensor, bias: Tensor | None, sized: bool = True) -> Moments:
        return convolution(m, weight, bias, input_size=self.size if sized else None, **self.options)

    def run(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """The layer itself."""
        options, dims = dict(self.options), len(self.size)
        if options.pop("transposed", False):
            return getattr(F, f"conv_transpose{dims}d")(x, weight, bias, **options)
        if (mode := options.pop("padding_mode", "zeros")) != "zeros":
            around = options.pop("padding")
            x = F.pad(x, (around,) * (2 * dims), mode=mode)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using padding='same' with even kernel")
            return getattr(F, f"conv{dims}d")(x, weight, bias, **options)


CASES = [
    Case("1d", (5, 4, 3), (8,)),
    Case("1d-padded", (5, 4, 3), (8,), padding=1),
    Case("1d-strided-dilated", (5, 4, 3), (15,), padding=3, stride=2, dilation=3),
    Case("2d", (5, 4, 3, 3), (8, 8)),
    Case("2d-1x1", (5, 4, 1, 1), (4, 4)),
    Case("2d-padded-8x8", (5, 4, 3, 3), (8, 8), padding=1),
    Case("2d-padded-unevenly", (5, 3, 3, 5), (8, 6), padding=(0, 2)),
    Case("2d-padded-1x1-map", (5, 4, 3, 3), (1, 1), padding=1),  # one position, eight of nine taps outside
    Case("2d-strided", (5, 4, 3, 3), (8, 8), padding=1, stride=2),
    Case("2d-stem-7x7", (4, 3, 7, 7), (12, 12), padding=3, stride=2),
    Case("2d-strided-unevenly", (5, 4, 3, 2), (8, 9), padding=1, stride=(2, 3)),
    Case("2d-dilated", (5, 4, 3, 3), (8, 8), padding=2, dilation=2),
    Case("2d-grouped", (6, 2, 3, 3), (8, 8), padding=1, groups=2),
    Case("2d-depthwise", (4, 1, 3, 3), (8, 8), padding=1, groups=4),
    Case("2d-depthwise-twofold", (8, 1, 3, 3), (8, 8), padding=1, groups=4, stride=2),
    Case("2d-depthwise-31x31", (2, 1, 31, 31), (8, 8), padding=15, groups=2),  # kernel larger than the map
    Case("2d-same", (5, 4, 3, 3), (8, 8), padding="same"),
    Case("2d-same-even-dilated", (5, 4, 4, 2), (8, 8), padding="same", dilation=(1, 3)),  # odd padding goes after
    Case("2d-valid", (5, 4, 3, 3), (8, 8), padding="valid"),
    Case("2d-circular", (5, 4, 3, 3), (8, 8), padding=1, padding_mode="circular"),
    Case("3d", (4, 2, 2, 3, 1), (4, 5, 3)),
    Case("3d-padded", (4, 2, 3, 3, 3), (4, 6, 4), padding=1, stride=(1, 2, 1)),
    Case("3d-depthwise", (3, 1, 3, 3, 3), (4, 4, 5), padding=(0, 1, 1), groups=3),
    Case("1d-transposed", (4, 3, 4), (7,), transposed=True, stride=2, padding=1),
    Case("2d-transposed-2x2", (4, 3, 2, 2), (8, 8), transposed=True, stride=2),  # one tap per position
    Case("2d-transposed-3x3", (4, 3, 3, 3), (8, 8), transposed=True, stride=2, padding=1, output_padding=1),
    Case("2d-transposed-gaps", (4, 3, 2, 2), (5, 5), transposed=True, stride=3),  # some positions see no tap
    Case("2d-transposed-stride-1", (4, 3, 3, 3), (6, 6), transposed=True),
    Case("2d-transposed-dilated", (4, 3, 3, 3), (5, 6), transposed=True, stride=2, dilation=(2, 3), padding=2),
    Case("2d-transposed-grouped", (4, 3, 3, 3), (6, 6), transposed=True, stride=2, groups=2),
    Case("3d-transposed", (3, 2, 2, 3, 2), (3, 3, 4), transposed=True, stride=2, padding=(0, 1, 0)),
]
every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
padded = next(case for case in CASES if case.id == "2d-padded-8x8")


def matched_sample(size: int) -> Tensor:
    """A Gaussian sample (size + 1, size), turned so that its mean is 0 and its covariance the identity, exactly."""
    random = torch.randn(size + 1, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.linalg.qr(random - random.mean(0)).Q * math.sqrt(size + 1)


def statistics(y: Tensor) -> Moments:
    """Over examples and positions, one row."""
    values = y.transpose(0, 1).flatten(1)
    return Moments(values.mean(1).unsqueeze(0), values.var(1, correction=0).unsqueeze(0))


def assert_within(found: Moments, expected: Moments, share: float) -> None:
    """The mean within `share` of the deviation, the variance within `share` of itself."""
    assert ((found.mean.double() - expected.mean).abs() / expected.var.sqrt()).max() < share
    assert (found.var.double() / expected.var - 1).abs().max() < share


@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["float64", "float32"]
)
@every
def test_convolution_agrees_with_the_layer(case, dtype, share):
    m, weight, bias = case.draw()
    z = matched_sample(case.inputs * math.prod(case.size)).view(-1, case.inputs, *case.size)
    column = (1, -1, *(1 for _ in case.size))
    x = m.mean.view(column) + m.var.sqrt().view(column) * z
    found = case.predict(m.to(dtype), weight.to(dtype), bias.to(dtype))
    assert found.mean.dtype == found.var.dtype == dtype
    assert_within(found, statistics(case.run(x, weight, bias)), share)


def test_convolution_agrees_with_plain_sampling():
    """The same by brute force, to 1 %: 8×8 maps, zero padding."""
    m, weight, bias = padded.draw(torch.float32)
    total = []
    for _ in range(8):
        x = m.mean.view(1, -1, 1, 1) + m.var.sqrt().view(1, -1, 1, 1) * torch.randn(8000, padded.inputs, 8, 8)
        total.append(statistics(padded.run(x, weight, bias)))
    sampled = Moments(torch.cat([s.mean for s in total]), torch.cat([s.var for s in total])).pooled()
    assert_within(padded.predict(m, weight, bias), sampled, 0.01)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_linear_agrees_with_the_layer(bias):
    random = torch.Generator().manual_seed(3)
    weight = torch.randn(5, 7, generator=random, dtype=torch.float64)
    offset = torch.randn(5, generator=random, dtype=torch.float64) if bias else None
    m = Moments(torch.randn(1, 7, generator=random).double(), torch.rand(1, 7, generator=random).double() + 0.1)
    x = m.mean + m.var.sqrt() * matched_sample(7)
    assert_within(linear(m, weight, offset), statistics(F.linear(x, weight, offset)), 1e-10)


def test_padding_matters():
    """What the shares are for: without them the prior of a padded 8×8 map is off by far more than 1 %."""
    m, weight, bias = padded.draw()
    exact, edgeless = padded.predict(m, weight, bias), padded.predict(m, weight, bias, sized=False)
    assert (edgeless.var / exact.var - 1).abs().max() > 0.05


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_other_paddings_keep_the_mean_everywhere(mode):
    case = Case(f"2d-{mode}", (5, 4, 3, 3), (8, 8), padding=1, padding_mode=mode)
    m, weight, bias = case.draw()
    found = case.predict(m, weight, bias)
    image = m.mean.view(1, -1, 1, 1).expand(1, -1, 8, 8)
    torch.testing.assert_close(found.mean, statistics(case.run(image, weight, bias)).mean)
    torch.testing.assert_close(found, case.predict(m, weight, bias, sized=False))


@every
def test_without_a_size_the_image_has_no_edges(case):
    """The limit of large maps, which cost no more than small ones."""
    m, weight, bias = case.draw()
    vast = convolution(m, weight, bias, input_size=(10**7,) * len(case.size), **case.options)
    torch.testing.assert_close(case.predict(m, weight, bias, sized=False), vast, rtol=1e-4, atol=1e-4)


@every
def test_output_size(case):
    kernel = case.weight_shape[2:]
    options = {key: value for key, value in case.options.items() if key not in ("groups", "padding_mode")}
    _, weight, bias = case.draw()
    y = case.run(torch.zeros(1, case.inputs, *case.size, dtype=torch.float64), weight, bias)
    assert output_size(case.size, kernel, **options) == tuple(y.shape[2:])


@every
def test_rows_are_independent(case):
    m, weight, bias = case.draw(rows=3)
    found = case.predict(m, weight, bias)
    assert found.mean.shape == found.var.shape == (3, case.outputs)
    for row in range(3):
        alone = case.predict(Moments(m.mean[row : row + 1], m.var[row : row + 1]), weight, bias)
        torch.testing.assert_close(alone, Moments(found.mean[row : row + 1], found.var[row : row + 1]))


@pytest.mark.parametrize("rows", [1, 2], ids=["row", "rows"])
@every
def test_gradients(case, rows):
    m, weight, bias = case.draw(rows=rows)
    arguments = [each.requires_grad_() for each in (m.mean, m.var, weight, bias)]
    assert torch.autograd.gradcheck(
        lambda mean, var, w, b: case.predict(Moments(mean, var), w, b)[:2], arguments, fast_mode=True
    )


CLOSED = ("1d-padded", "2d-valid", "2d-grouped", "2d-transposed-grouped")
closed = pytest.mark.parametrize("case", [case for case in CASES if case.id in CLOSED], ids=lambda case: case.id)


@closed
def test_gradients_of_gradients(case):
    """The closed form has none of its own: those of the operations it stands for."""
    m, weight, bias = case.draw()
    arguments = [each.requires_grad_() for each in (m.mean, m.var, weight)]
    assert torch.autograd.gradgradcheck(
        lambda mean, var, w: case.predict(Moments(mean, var), w, bias)[:2], arguments, fast_mode=True
    )


@closed
def test_transforms(case):
    m, weight, bias = case.draw()

    def total(mean, weight):
        found = case.predict(Moments(mean, m.var), weight, bias)
        return (found.mean + 3 * found.var).sum()

    leaves = m.mean.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = torch.autograd.grad(total(*leaves), leaves)
    torch.testing.assert_close(torch.func.grad(total, argnums=(0, 1))(m.mean, weight), expected)
    mapped = torch.func.vmap(torch.func.grad(total), in_dims=(0, None))(m.mean.expand(3, 1, -1), weight)
    torch.testing.assert_close(mapped[2], expected[0])


def test_gradients_of_what_is_asked_for():
    m, weight, bias = padded.draw()
    for asked in ([m.mean], [m.var], [weight]):
        leaf = asked[0].requires_grad_()
        found = padded.predict(m, weight, bias)
        (found.mean.sum() + found.var.sum()).backward()
        assert leaf.grad is not None and leaf.grad.abs().max() > 0
        leaf.requires_grad_(False)


def test_linear_gradients():
    arguments = [
        torch.rand(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3), (2, 3), (4, 3), (4,))
    ]
    assert torch.autograd.gradcheck(lambda mean, var, w, b: linear(Moments(mean, var), w, b)[:2], arguments)


def test_float32_does_not_cancel_under_a_large_mean():
    """Without edges all positions have one mean, so a mean of 1000 deviations must leave the variance alone."""
    m, weight, _ = padded.draw()
    far = Moments(m.mean.sign() * 1000 * m.var.sqrt(), m.var)
    exact = convolution(far, weight).var
    assert ((convolution(far.to(torch.float32), weight.float()).var / exact) - 1).abs().max() < 1e-6
    # A transposed convolution of constant sums: four kinds of position, one mean.
    checks = Moments(torch.full((1, 1), 1000.0), torch.ones(1, 1))
    found = convolution(checks, torch.ones(1, 1, 2, 2) * 0.1, stride=2, transposed=True, input_size=(8, 8))
    torch.testing.assert_close(found.var, torch.full((1, 1), 0.01))


@pytest.mark.parametrize("mean", [0.0, 1.0], ids=["mean-0", "mean-1"])
def test_zero_variance_is_finite(mean):
    gamma, beta = torch.zeros(4, requires_grad=True), torch.full((4,), mean, requires_grad=True)
    _, weight, bias = padded.draw(torch.float32)
    weight.requires_grad_()
    found = padded.predict(moments.relu(belief(gamma, beta)), weight, bias)
    (found.mean.sum() + found.var.sum()).backward()
    for each in (*found[:2], gamma.grad, beta.grad, weight.grad):
        assert each.isfinite().all()
    assert (found.var >= 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_weights_are_used_in_float32(dtype):
    m, weight, bias = padded.draw(torch.float32)
    weight, bias = weight.to(dtype), bias.to(dtype)
    found = padded.predict(m, weight, bias)
    assert found.mean.dtype == found.var.dtype == torch.float32
    torch.testing.assert_close(found, padded.predict(m, weight.float(), bias.float()), rtol=0, atol=0)
    flat = weight[:, :, 0, 0]
    torch.testing.assert_close(linear(m, flat, bias), linear(m, flat.float(), bias.float()), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast_changes_nothing(dtype):
    case = Case("2d-padded-7x7", (5, 4, 3, 3), (7, 7), padding=1)  # sevenths are not exact in half precision
    m, weight, bias = case.draw(torch.float32)
    with torch.autocast("cpu", dtype):
        geometry._tensors.clear()  # the shares too are made here
        cast = case.predict(m, weight, bias), linear(m, weight[:, :, 0, 0], bias)
    geometry._tensors.clear()
    plain = case.predict(m, weight, bias), linear(m, weight[:, :, 0, 0], bias)
    torch.testing.assert_close(cast, plain, rtol=0, atol=0)


def test_compiles_in_one_graph():
    chosen = [case for case in CASES if case.id in (*CLOSED, "3d-padded", "2d-depthwise", "2d-same")]
    drawn = [case.draw(torch.float32) for case in chosen]
    for _, weight, _ in drawn:
        weight.requires_grad_()

    def several(drawn: list[tuple[Moments, Tensor, Tensor]]) -> Tensor:
        found = [case.predict(*each) for case, each in zip(chosen, drawn, strict=True)]
        flat = linear(found[0], torch.ones(2, found[0].mean.shape[1]))
        return sum((m.mean.square().sum() + m.var.sum() for m in (*found, flat)), torch.zeros(()))

    geometry._tensors.clear()  # so that tracing itself must make them
    compiled = torch.compile(several, fullgraph=True, backend="aot_eager")(drawn)
    weights = [weight for _, weight, _ in drawn]
    gradients = torch.autograd.grad(compiled, weights)
    plain = several(drawn)
    torch.testing.assert_close(compiled, plain)
    torch.testing.assert_close(gradients, torch.autograd.grad(plain, weights))


ONE = Moments(torch.zeros(1, 4), torch.ones(1, 4))
W1, W2 = torch.zeros(6, 4, 3), torch.zeros(6, 4, 3, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(
            lambda: linear(ONE, torch.zeros(4, 3)), r"`weight` must have shape \(outputs, 4\)", id="linear-weight"
        ),
        pytest.param(
            lambda: linear(ONE, torch.zeros(3, 4), torch.zeros(4)), r"`bias`.*\(3,\), got \(4,\)", id="linear-bias"
        ),
        pytest.param(lambda: convolution(ONE, torch.zeros(6, 3, 3)), "takes 3 channels.*have 4", id="channels"),
        pytest.param(
            lambda: convolution(ONE, W1, transposed=True), "takes 6 channels.*have 4", id="transposed-channels"
        ),
        pytest.param(lambda: convolution(ONE, W1, groups=4), "`groups` must divide.*6, got 4", id="groups"),
        pytest.param(lambda: convolution(ONE, W1, groups=0), "`groups`.*got 0", id="no-groups"),
        pytest.param(lambda: convolution(ONE, torch.zeros(6, 4)), r"`weight`.*1, 2 or 3.*\(6, 4\)", id="weight-dim"),
        pytest.param(lambda: convolution(ONE, W1, torch.zeros(5)), r"`bias` must have shape \(6,\)", id="bias"),
        pytest.param(lambda: convolution(ONE, W2, input_size=(8,)), "`input_size` must hold the 2", id="size-length"),
        pytest.param(lambda: convolution(ONE, W1, input_size=0), "`input_size` must be at least 1", id="size-zero"),
        pytest.param(lambda: convolution(ONE, W2, input_size=(8, 2)), "leaves no output", id="smaller-than-kernel"),
        pytest.param(
            lambda: convolution(ONE, W2, stride=(1, 2, 3)), "`stride` must be one int or 2", id="stride-length"
        ),
        pytest.param(lambda: convolution(ONE, W1, stride=0), "`stride` must be at least 1", id="stride-zero"),
        pytest.param(lambda: convolution(ONE, W1, stride=1.5), "`stride` must be one int", id="stride-float"),
        pytest.param(lambda: convolution(ONE, W1, padding=-1), "`padding` must be at least 0", id="padding-negative"),
        pytest.param(
            lambda: convolution(ONE, W1, padding="full"), "'same', 'valid' or ints, got 'full'", id="padding-name"
        ),
        pytest.param(
            lambda: convolution(ONE, W1, padding="same", stride=2), "'same' needs stride 1", id="same-strided"
        ),
        pytest.param(lambda: convolution(ONE, W1, output_padding=1), "`output_padding`.*transposed=True", id="extra"),
        pytest.param(lambda: convolution(ONE, W1, padding_mode="mirror"), "`padding_mode` must be one of", id="mode"),
        pytest.param(
            lambda: convolution(ONE, W1.mT.reshape(4, 6, 3), padding="same", transposed=True),
            "as ints",
            id="same-transposed",
        ),
        pytest.param(
            lambda: convolution(ONE, W1.reshape(4, 6, 3), output_padding=2, stride=2, transposed=True),
            "`output_padding` must be smaller",
            id="extra-too-large",
        ),
        pytest.param(
            lambda: convolution(ONE, W1.reshape(4, 6, 3), padding_mode="reflect", transposed=True),
            "'zeros' only, got 'reflect'",
            id="mode-transposed",
        ),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_one_size_serves_every_axis():
    square = convolution(ONE, W2, padding=1, input_size=(8, 8))
    torch.testing.assert_close(convolution(ONE, W2, padding=1, input_size=8).var, square.var)
