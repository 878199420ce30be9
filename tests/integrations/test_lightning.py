"""Lightning's trainer with the callback: what is trained, restored, recalibrated and logged."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import kalmannorm
from kalmannorm._support.fused_modules import is_fused
from kalmannorm.integrations.lightning import KalmanCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]


def net():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Dropout(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


class Classifier(LightningModule):
    example_input_array = torch.randn(2, 1, 8, 8)

    def __init__(self):
        super().__init__()
        self.net = net()
        self.loss = nn.CrossEntropyLoss()

    def training_step(self, batch, _):
        return self.loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(kalmannorm.parameter_groups(self, 1e-4), lr=0.05)


def loader(batch=4, shuffle=True):
    torch.manual_seed(3)
    return DataLoader(TensorDataset(torch.randn(24, 1, 8, 8) + 1, torch.arange(24) % 3), batch, shuffle=shuffle)


def trainer(tmp_path, callback, **options):
    options = {"max_epochs": 2, "enable_progress_bar": False, "enable_model_summary": False} | options
    return Trainer(default_root_dir=tmp_path, accelerator="cpu", callbacks=[callback], **options)


def fit(tmp_path, callback, **options):
    torch.manual_seed(0)
    model = Classifier()
    running = trainer(tmp_path, callback, logger=CSVLogger(tmp_path), log_every_n_steps=1, **options)
    running.fit(model, loader(), loader(shuffle=False))
    return model, running


def test_it_converts_before_the_optimizer_is_built_and_logs(tmp_path):
    model, running = fit(tmp_path, KalmanCallback(statistics_batch_size=2, per_layer=True))
    assert kalmannorm.wiring(model.net).summary.startswith("1 of 2 norms")
    optimized = {id(p) for group in running.optimizers[0].param_groups for p in group["params"]}
    assert {id(p) for p in model.parameters()} == optimized
    assert kalmannorm.gains(model.net) != {"4": 0.5}
    logged = running.logged_metrics
    assert float(logged["kalman/gain"]) == pytest.approx(kalmannorm.gains(model.net)["4"])
    assert set(logged) >= {"kalman/gain/4", "kalman/variance_gap", "kalman/variance_gap/1", "kalman/variance_gap/4"}
    assert 0 < float(logged["kalman/variance_gap"]) < 10


def test_a_checkpoint_is_restored_into_a_converted_model(tmp_path):
    model, running = fit(tmp_path, KalmanCallback(statistics_batch_size=2))
    path = running.checkpoint_callback.best_model_path
    again = Classifier()
    trainer(tmp_path, KalmanCallback(statistics_batch_size=2), max_epochs=3).fit(
        again, loader(), loader(shuffle=False), ckpt_path=path
    )
    assert kalmannorm.gains(again.net) != kalmannorm.gains(model.net)
    fresh = Classifier()
    tester = trainer(tmp_path, KalmanCallback(statistics_batch_size=2), logger=False)
    tester.test(fresh, loader(shuffle=False), ckpt_path=path, verbose=False)
    torch.testing.assert_close(fresh.state_dict(), model.state_dict(), rtol=0, atol=0)


class Stop(Callback):
    """Ends a training after its first epoch."""

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = True


class Watch(Callback):
    """λ of every batch."""

    def __init__(self, callback):
        self.callback, self.seen = callback, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append(self.callback.following.phase.strength)


def close(tmp_path, more=(), path=None, **options):
    """Train 3 epochs of 6 batches."""
    torch.manual_seed(0)
    callback, model = KalmanCallback(statistics_batch_size=2, closing=(0.2, 0.6)), Classifier()
    watch = Watch(callback)
    running = Trainer(
        default_root_dir=tmp_path, accelerator="cpu", callbacks=[callback, watch, *more], max_epochs=3, logger=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    model.net[6] = nn.Identity()  # no dropout: a resumed training draws other numbers
    running.fit(model, loader(shuffle=False), loader(shuffle=False), ckpt_path=path)
    return model, running, watch.seen


def test_options_of_the_closing_phase():
    closing = {"start": 0, "end": 0, "present": 0.5, "fade_prior": True}
    callback = KalmanCallback(statistics_batch_size=2, closing=closing)
    model = kalmannorm.convert(net(), Classifier.example_input_array, statistics_batch_size=2)
    callback.following.begin(model, 10, 0)
    phase = callback.following.phase
    assert (phase.strength, phase.present, phase.fade_prior) == (1, 0.5, True)
    with pytest.raises(ValueError, match="no option 'begin'; it takes start, end, top"):
        KalmanCallback(closing={"begin": 0})
    with pytest.raises(ValueError, match=r"end must be at least start = 0\.6, got 0\.3"):
        KalmanCallback(closing={"start": 0.6, "end": 0.3})


@pytest.mark.parametrize("parts", [1, 3])
def test_the_closing_phase_counts_steps_of_the_optimizer(tmp_path, parts):
    model, _, seen = close(tmp_path, accumulate_grad_batches=parts)
    steps = 18 // parts
    expected = [min(max((number / steps - 0.2) / 0.4, 0), 1) for number in range(steps) for _ in range(parts)]
    assert seen == pytest.approx(expected)
    assert not any("closing" in name for name in model.state_dict())


def test_a_closing_phase_is_resumed(tmp_path):
    whole, _, seen = close(tmp_path / "whole")
    _, running, first = close(tmp_path / "part", [Stop()])
    running.save_checkpoint(tmp_path / "part.ckpt")
    resumed, _, second = close(tmp_path / "rest", path=tmp_path / "part.ckpt")
    assert [*first, *second] == pytest.approx(seen)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(value, resumed.state_dict()[name], msg=name)


def test_recalibration_gives_population_statistics_and_leaves_training_alone(tmp_path):
    data = loader(shuffle=False)
    seen = []

    class Recorded(KalmanCallback):
        def on_validation_start(self, *both):
            super().on_validation_start(*both)
            seen.append(both[1].net[1].running_mean.clone())

    callback = Recorded(recalibrate_on=lambda: data, statistics_batch_size=2)
    model, _ = fit(tmp_path, callback, num_sanity_val_steps=0)
    plain, _ = fit(tmp_path, KalmanCallback(statistics_batch_size=2), num_sanity_val_steps=0)
    for name, parameter in plain.named_parameters():  # neither statistics nor random numbers enter training
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=0, atol=0)
    everything = torch.cat([x for x, _ in data])
    mean = model.net[0](everything).mean((0, 2, 3)).detach()
    torch.testing.assert_close(seen[-1], mean, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(plain.net[1].running_mean, mean, rtol=1e-3)


def test_recalibration_before_the_test_only(tmp_path):
    callback = KalmanCallback(recalibrate_on=loader(shuffle=False), before=("test",), statistics_batch_size=2)
    model, running = fit(tmp_path, callback)
    plain, _ = fit(tmp_path, KalmanCallback(statistics_batch_size=2))
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
    running.test(model, loader(shuffle=False), verbose=False)
    assert not torch.allclose(model.net[1].running_mean, plain.net[1].running_mean, rtol=1e-3)


class Two(Classifier):
    def __init__(self):
        super().__init__()
        self.other = net()

    def forward(self, x):
        return self.net(x) + self.other(x)


def test_the_module_to_convert(tmp_path):
    callback = KalmanCallback(statistics_batch_size=2)
    with pytest.raises(ValueError, match=r"module must name the part of Two.*2 of them: net, other"):
        callback.setup(None, Two(), "fit")
    whole, part = Two(), Two()
    KalmanCallback(module="", statistics_batch_size=2).setup(None, whole, "fit")
    assert kalmannorm.wiring(whole).summary.startswith("2 of 4")
    KalmanCallback(module="other", statistics_batch_size=2).setup(None, part, "fit")
    assert type(part.net[1]) is nn.BatchNorm2d
    assert kalmannorm.wiring(part.other).summary.startswith("1 of 2")


def test_norms_of_a_constructor_are_wired(tmp_path):
    model = Classifier()
    model.net[1], model.net[4] = kalmannorm.norm_layer(2)(4), kalmannorm.norm_layer(2)(8)
    KalmanCallback().setup(None, model, "fit")
    assert kalmannorm.wiring(model.net).summary.startswith("1 of 2")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: KalmanCallback(before=("validate",)), ValueError, "before must be .*'validation', 'test'.*validate"),
        (lambda: KalmanCallback(before="test"), ValueError, "before must be a tuple"),
        (lambda: KalmanCallback(inplace=True), TypeError, "inplace: the callback always converts in place"),
        (lambda: KalmanCallback(recalibrate_batches=0), ValueError, "recalibrate_batches"),
    ],
)
def test_mistakes(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_an_example_input_is_needed():
    model = Classifier()
    model.example_input_array = None
    with pytest.raises(ValueError, match="example_input must be given, or set example_input_array"):
        KalmanCallback().setup(None, model, "fit")


def test_a_fused_model_stays_fused_when_it_is_compiled():
    """Importing Lightning makes `torch.compile` store its arguments in the model."""
    x = torch.randn(4, 1, 8, 8)
    model = kalmannorm.fuse(kalmannorm.convert(net(), x, statistics_batch_size=2), x)
    for mode in ("default", "reduce-overhead"):
        torch.compile(model, mode=mode)
        assert "_compile_kwargs" in vars(model) and is_fused(model)
