"""Population statistics from data: what `recalibrate` estimates, from which batches, and `finish_on_population`.

What users ask for: eval() as good as train() (research #3), frozen statistics that survive `.train()` (#5), control
over when statistics move (#6), precise statistics over unequal batches (#12; over ranks: test_recalibrate_ranks.py).
"""

from __future__ import annotations

import collections
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kalmannorm
from kalmannorm import BatchKalmanNorm2d, BatchRenorm2d, GhostBatchNorm2d, freeze_statistics, set_inference
from support.population_nets import KINDS, data, finish, quiet, same, statistics


@pytest.mark.parametrize("build", KINDS.values(), ids=KINDS)
def test_the_split_into_batches_does_not_matter(build):
    x = data()
    model = build()
    expected = None
    for split in ([24], [6] * 4, [10, 10, 4], [2, 22], [22, 2]):
        net = copy.deepcopy(model)
        result = quiet(net, x.split(split))
        assert result == (len(split), {"first": 24 * 16, "second": 24 * 16}, {})
        expected = expected or statistics(net)
        same(statistics(net), expected, rtol=1e-10, atol=1e-10)
    start = statistics(model)
    assert all(not torch.equal(value, start[name]) for name, value in expected.items())


@pytest.mark.parametrize("split", [[24], [23, 1], [10, 10, 4], [1] * 24], ids=str)
def test_torch_batchnorm_gets_the_pooled_moments_of_unequal_batches(split):
    """torch's own momentum=None lets the last, smaller batch weigh as much as a whole one."""
    x = data()
    model = nn.Sequential(nn.BatchNorm2d(3, dtype=torch.float64))
    quiet(model, x.split(split))
    torch.testing.assert_close(model[0].running_mean, x.mean((0, 2, 3)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model[0].running_var, x.var((0, 2, 3), correction=0), rtol=1e-12, atol=1e-12)
    assert model[0].num_batches_tracked == len(split)


def test_torch_batchnorm_runs_on_its_batches_as_in_training():
    x = data(16)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double()
    nn.init.constant_(model[0].running_mean, 50.0)
    with torch.no_grad():
        seen = torch.cat([model[1](F.batch_norm(part, None, None, training=True)) for part in x.split(8)])
    quiet(model, x.split(8))
    torch.testing.assert_close(model[2].running_mean, seen.mean((0, 2, 3)))
    torch.testing.assert_close(model[2].running_var, seen.var((0, 2, 3), correction=0))


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_batches_of_one_value_per_channel_count_in_a_torch_batchnorm(kind):
    """In training it raises "Expected more than 1 value per channel"."""
    x = torch.randn(9, 3, dtype=torch.float64)
    model = nn.Sequential(kind(3)).double()
    quiet(model, x.split([4, 4, 1]))
    torch.testing.assert_close(model[0].running_var, x.var(0, correction=0))
    quiet(model, x.split(1))
    torch.testing.assert_close(model[0].running_var, x.var(0, correction=0))


def test_the_posterior_is_what_running_statistics_estimate():
    """Against a plain transcription: the posteriors of groups of 2, pooled; and the observations, pooled."""
    x, model = data(8), KINDS["BKN-learned"]()
    rows = []
    with torch.no_grad():
        net = copy.deepcopy(model).train()
        net.dropout.p = 0.0
        for part in x.split(2):
            net(part)
            rows.append(net.second.posterior)
    mean, var = torch.cat([row.mean for row in rows]), torch.cat([row.var for row in rows])
    quiet(model, x.split(4))
    torch.testing.assert_close(model.second.running_mean, mean.mean(0))
    torch.testing.assert_close(model.second.running_var, var.mean(0) + mean.var(0, correction=0))
    torch.testing.assert_close(model.first.observed_mean, x.mean((0, 2, 3)))
    torch.testing.assert_close(model.first.observed_var, x.var((0, 2, 3), correction=0))


@pytest.mark.parametrize("kind", [BatchKalmanNorm2d, BatchRenorm2d, nn.BatchNorm2d])
def test_thousands_of_batches_lose_no_precision(kind):
    parts = [torch.randn(1 + i % 3, 2, 3, 3) + 1000 + i / 100 for i in range(2000)]
    everything = torch.cat(parts).double()
    groups = {} if kind is nn.BatchNorm2d else {"statistics_batch_size": 1}
    norm = kind(2, **groups)
    quiet(norm, parts)
    torch.testing.assert_close(norm.running_mean.double(), everything.mean((0, 2, 3)), rtol=1e-7, atol=0)
    expected = everything.var((0, 2, 3), correction=0)
    if kind is BatchRenorm2d:  # keeps the average σ of groups
        expected = everything.var((2, 3), correction=0).add(norm.eps).sqrt().mean(0).square() - norm.eps
    torch.testing.assert_close(norm.running_var.double(), expected, rtol=1e-5, atol=0)


def test_dropout_is_off_because_inference_does_not_meet_its_noise():
    x, model = data(8), KINDS["BKN"]()
    again = copy.deepcopy(model)
    quiet(model.train(), [x])
    again.dropout.p = 0.0
    quiet(again.eval(), [x])
    same(statistics(model), statistics(again), rtol=0, atol=0)


def test_max_batches_takes_no_batch_more_than_it_uses():
    x, model = data(12), KINDS["BKN"]()
    loader = iter(x.split(4))
    assert quiet(model, loader, max_batches=2).batches == 2
    torch.testing.assert_close(model.first.running_mean, x[:8].mean((0, 2, 3)))
    assert torch.equal(next(loader), x[8:])
    with pytest.raises(ValueError, match="max_batches must be at least 1"):
        quiet(model, [x], max_batches=0)


class FancyDict(collections.UserDict):
    """As the batches of Hugging Face: a mapping, but no dict."""


Pair = collections.namedtuple("Pair", ["image", "label"])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: (x, "label"),
        lambda x: [x, None],
        lambda x: {"image": x, "label": 3},
        lambda x: FancyDict(image=x, label=[1]),
        lambda x: Pair(x, torch.ones(1)),
    ],
    ids=["tensor", "tuple", "list", "dict", "mapping", "namedtuple"],
)
def test_the_first_element_of_a_batch_is_the_input(wrap):
    x, model = data(4), KINDS["BKN"]()
    quiet(model, [wrap(x)])
    torch.testing.assert_close(model.first.running_mean, x.mean((0, 2, 3)))


def test_forward_runs_batches_of_any_other_kind():
    x, model = data(4), KINDS["BKN"]()
    seen = []

    def forward(net, batch):
        seen.append(batch)
        assert not net(batch["deep"][0]["x"]).requires_grad

    label = object()
    batch = {"label": label, "deep": [FancyDict(x=x)]}
    quiet(model, [batch], forward=forward)
    torch.testing.assert_close(model.first.running_mean, x.mean((0, 2, 3)))
    assert seen[0]["label"] is label
    assert isinstance(seen[0]["deep"][0], FancyDict)


def test_tensors_go_to_the_device_of_the_model():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, device="meta"), nn.BatchNorm2d(4, track_running_stats=False, device="meta")
    )
    model.append(BatchKalmanNorm2d(4))
    seen = []
    quiet(
        model,
        [(torch.randn(2, 3, 4, 4), "text", {"y": torch.ones(1)})],
        forward=lambda _, batch: seen.append(batch) or model[2](data(2, 4).float()),
    )
    assert seen[0][0].is_meta and seen[0][2]["y"].is_meta
    assert seen[0][1] == "text"


def test_a_part_of_a_model_can_be_recalibrated_alone():
    x, model = data(8), KINDS["BKN"]().eval()
    first = statistics(model.first)
    quiet(model.second, [x], forward=lambda _, batch: model(batch))
    same(statistics(model.first), first, rtol=0, atol=0)
    with torch.no_grad():
        y = model.conv(model.first(x).relu())
    torch.testing.assert_close(model.second.running_mean, y.mean((0, 2, 3)))


def test_errors_say_what_would_work():
    model, x = KINDS["BKN"](), data(4)
    spent = iter([x])
    quiet(model, spent)
    before = statistics(model)
    for loader, kind, text in (
        ([], ValueError, "loader yielded no batch"),
        (spent, ValueError, "loader yielded no batch"),
        (x, TypeError, r"pass \[tensor\]"),
        ([object()], TypeError, "got a object. For other batches pass forward"),
        ([()], TypeError, "got an empty tuple"),
    ):
        with pytest.raises(kind, match=text):
            quiet(model, loader)
    same(statistics(model), before, rtol=0, atol=0)
    with pytest.raises(ValueError, match="Linear contains no norm with running statistics"):
        quiet(nn.Linear(2, 2), [x])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_nan_batches_are_left_out_and_reported_once(bad):
    x, model = data(12).float(), nn.Sequential(nn.BatchNorm2d(3), GhostBatchNorm2d(3), BatchRenorm2d(3))
    clean = copy.deepcopy(model)
    poisoned = list(x.split(4))
    poisoned.insert(1, torch.full((4, 3, 4, 4), bad))
    quiet(clean, x.split(4))
    with pytest.warns(RuntimeWarning, match=r"3 norms had batches with NaN or Inf.*0 \(1 skipped\)") as caught:
        result = quiet(model, poisoned)
    assert len(caught) == 1
    assert result.skipped == {"0": 1, "1": 1, "2": 1}
    same(statistics(model), statistics(clean))
    assert model[1].skipped_batches == 0


def test_where_every_batch_is_nan_the_statistics_stay():
    model = nn.Sequential(BatchKalmanNorm2d(3), nn.BatchNorm2d(3))
    before = statistics(model)
    with pytest.warns(RuntimeWarning, match="statistics kept"):
        result = quiet(model, [torch.full((4, 3, 2, 2), float("nan"))])
    assert result.values == {"0": 0, "1": 0}
    same(statistics(model), before, rtol=0, atol=0)


def test_statistics_that_the_buffers_cannot_hold_are_not_written():
    model = nn.Sequential(nn.BatchNorm2d(3).half())
    with pytest.warns(RuntimeWarning, match="statistics kept"):
        quiet(model, [torch.randn(4, 3, 4, 4).half() * 500])
    assert (model[0].running_var == 1).all()


def test_a_poisoned_norm_is_healed():
    """Statistics that are NaN themselves are no start for a moving average."""
    x, model = data(4).float(), nn.Sequential(BatchKalmanNorm2d(3), nn.BatchNorm2d(3))
    for norm in model:
        norm.running_var.fill_(float("nan"))
    quiet(model, [x])
    torch.testing.assert_close(model[0].running_var, x.var((0, 2, 3), correction=0))
    assert torch.isfinite(model.eval()(x)).all()


def test_norms_that_never_ran_keep_their_statistics_and_are_named():
    model = nn.ModuleDict({"used": BatchKalmanNorm2d(3), "ours": BatchKalmanNorm2d(3), "torch": nn.BatchNorm2d(3)})
    nn.init.constant_(model["ours"].running_mean, 7.0)
    with pytest.warns(UserWarning, match="2 norms never ran and keep their statistics: ours, torch") as caught:
        result = quiet(model, [torch.randn(4, 3, 2, 2)], forward=lambda net, x: net["used"](x))
    assert len(caught) == 1
    assert result.values == {"used": 16, "ours": 0, "torch": 0}
    assert (model["ours"].running_mean == 7).all()


def test_training_goes_on_from_recalibrated_statistics():
    """momentum=None: what comes next joins what the pass has seen; Batch Renorm's schedule is not set back."""
    x, y = data(8), data(4)
    model = nn.Sequential(BatchKalmanNorm2d(3, momentum=None), nn.BatchNorm2d(3, momentum=None)).double()
    for norm in model:
        quiet(norm, x.split(4))
        norm(y)
        torch.testing.assert_close(norm.running_mean, torch.cat([x, y]).mean((0, 2, 3)))
    renorm = BatchRenorm2d(3)
    renorm.num_batches_tracked.fill_(20_000)
    quiet(renorm, [x.float()])
    assert renorm.num_batches_tracked == 20_000


def test_batch_renorm_corrects_as_in_training_while_it_is_recalibrated():
    x = data(8)
    model = KINDS["BatchRenorm"]()
    for norm in (model.first, model.second):
        norm.num_batches_tracked.fill_(10)
    nn.init.constant_(model.first.running_mean, 1.0)
    with torch.no_grad():
        twin = copy.deepcopy(model.first).train()
        y = model.conv(twin(x).relu())
    quiet(model, [x])
    torch.testing.assert_close(model.second.running_mean, y.mean((0, 2, 3)))


@pytest.mark.parametrize("inference", ["population", "batch", "example"])
def test_after_finishing_on_population_training_runs_as_inference_will(inference):
    x, model = data(8), KINDS["BKN-learned"]()
    model.dropout.p = 0.0
    set_inference(model, inference)
    if inference == "population":
        result = finish(model, [(x, None)])
    else:
        with pytest.warns(UserWarning, match=r"2 norms had another inference .* 'population'.*: first, second"):
            result = finish(model, [(x, None)])
    assert result.values == {"first": 128, "second": 128}
    torch.testing.assert_close(model.first.running_mean, x.mean((0, 2, 3)))
    before = statistics(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gamma, beta = model.second.weight.clone(), model.second.bias.clone()
    y = model.train()(data(6))
    y.square().sum().backward()
    optimizer.step()
    same(statistics(model), before, rtol=0, atol=0)
    assert not torch.equal(model.second.weight, gamma) and not torch.equal(model.second.bias, beta)
    z = data(6)
    trained = model.train()(z)
    torch.testing.assert_close(trained, model.eval()(z), rtol=0, atol=0)
    torch.testing.assert_close(trained[:1], model(z[:1]))


def test_finishing_again_refreshes_the_statistics_after_the_weights_have_moved():
    x, model = data(8), KINDS["BKN"]()
    finish(model, [x])
    nn.init.normal_(model.conv.weight)
    finish(model, [x])
    fresh = copy.deepcopy(model)
    freeze_statistics(fresh, False)
    quiet(fresh, [x])
    same(statistics(model), statistics(fresh), rtol=0, atol=0)


def test_finishing_names_torch_batchnorms_and_needs_a_norm_of_ours():
    model = nn.Sequential(BatchKalmanNorm2d(3), nn.BatchNorm2d(3))
    with pytest.warns(UserWarning, match="1 torch BatchNorm layers are not frozen.*: 1"):
        finish(model, [torch.randn(4, 3, 2, 2)])
    with pytest.raises(ValueError, match="finish_on_population: Sequential contains no norm of kalmannorm"):
        finish(nn.Sequential(nn.BatchNorm2d(3)), [torch.randn(4, 3, 2, 2)])


def test_finishing_fails_whole():
    model = KINDS["BKN"]()
    set_inference(model, "example")
    with pytest.raises(ValueError, match="no batch"):
        finish(model, [])
    assert not model.first.frozen and model.first.inference == "example"


def test_eval_is_as_good_as_training_after_recalibration():
    """Moving averages of a single short run are far off; the pass mends it."""
    x, model = data(64) + 20, KINDS["Ghost"]()
    model.dropout.p = 0.0
    with torch.no_grad():
        model(x[:2])
        trained = model(x)

        def gap():
            return (model.eval()(x).std() - trained.std()).abs().item()

        before = gap()
        quiet(model, x.split(8))
        assert gap() < before / 20


class Scaled(nn.Module):
    """Takes a second argument, which changes the statistics."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        )

    def forward(self, image, scale=1.0):
        return self.body(image * scale)


SCALE, LABEL = torch.tensor(3.0), torch.zeros(4, dtype=torch.long)
BATCHES = {  # the example of convert, a batch of recalibrate, and the scale that the model then gets
    "tensor": (lambda x: x, lambda x: x, 1),
    "image and label": (lambda x: x, lambda x: (x, LABEL), 1),
    "tuple": (lambda x: (x, SCALE), lambda x: (x, SCALE), 3),
    "tuple and label": (lambda x: (x, SCALE), lambda x: [x, SCALE, LABEL], 3),
    "dict": (lambda x: {"image": x, "scale": SCALE}, lambda x: {"scale": SCALE, "image": x}, 3),
    "dict and label": (lambda x: {"image": x}, lambda x: {"label": LABEL, "image": x}, 1),
    "dict of other names": (lambda x: x, lambda x: {"pixels": x, "scale": SCALE}, 1),
}


@pytest.mark.parametrize("case", BATCHES)
def test_batches_are_taken_as_examples_are(case):
    example, batch, scale = BATCHES[case]
    x = torch.randn(4, 3, 8, 8)
    model = kalmannorm.convert(Scaled(), example(x))
    for given in (model, torch.optim.swa_utils.AveragedModel(model)):
        kalmannorm.recalibrate(given, [batch(x)], progress=False)
        inner = getattr(given, "module", given)
        torch.testing.assert_close(inner.body[1].running_mean, inner.body[0](x * scale).mean((0, 2, 3)))


def test_a_model_with_two_required_arguments_gets_both():
    class Two(Scaled):
        def forward(self, image, scale):
            return super().forward(image, scale)

    model, x = kalmannorm.convert(Two(), to="ghost", statistics_batch_size=4), torch.randn(4, 3, 8, 8)
    kalmannorm.recalibrate(model, [(x, SCALE, LABEL)], progress=False)
    torch.testing.assert_close(model.body[1].running_mean, model.body[0](x * SCALE).mean((0, 2, 3)))
