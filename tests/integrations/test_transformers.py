"""Hugging Face's Trainer with the callback, and Accelerate with a converted model."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import kalmannorm

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # their imports warn
    from accelerate import Accelerator
    from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments

    from kalmannorm.integrations.transformers import KalmanCallback

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore:.*pin_memory")]


class Images(Dataset):
    def __init__(self, count=24):
        generator = torch.Generator().manual_seed(3)
        self.images = torch.randn(count, 3, 32, 32, generator=generator) + 1

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"pixel_values": self.images[index], "labels": index % 3}


def classifier():
    torch.manual_seed(0)
    config = ResNetConfig(
        num_labels=3, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_channels=3
    )
    return ResNetForImageClassification(config)


EXAMPLE = {"pixel_values": torch.randn(2, 3, 32, 32)}


def trainer(tmp_path, callback, model=None, **options):
    options = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "logging_steps": 3,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "learning_rate": 0.01,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    } | options
    arguments = TrainingArguments(output_dir=str(tmp_path), **options)
    model = model or classifier()
    return Trainer(model, arguments, train_dataset=Images(), eval_dataset=Images(8), callbacks=[callback])


def test_it_converts_before_the_optimizer_is_built_and_logs(tmp_path):
    running = trainer(tmp_path, KalmanCallback(EXAMPLE, statistics_batch_size=2, per_layer=True))
    assert kalmannorm.wiring(running.model).summary.startswith("5 of 6 norms")
    before = kalmannorm.gains(running.model)
    running.train()
    after = kalmannorm.gains(running.model)
    assert all(after[name] != before[name] for name in before)
    training = [entry for entry in running.state.log_history if "loss" in entry]
    assert len(training) == 4
    assert training[-1]["kalman/gain"] == pytest.approx(sum(after.values()) / len(after))
    assert all(0 < entry["kalman/variance_gap"] < 100 for entry in training)
    assert {f"kalman/gain/{name}" for name in after} <= set(training[-1])
    assert not any("kalman/gain" in entry for entry in running.state.log_history if "eval_loss" in entry)


def test_training_resumes_from_a_checkpoint(tmp_path):
    whole = trainer(tmp_path / "a", KalmanCallback(EXAMPLE, statistics_batch_size=2))
    whole.train()
    again = trainer(tmp_path / "b", KalmanCallback(EXAMPLE, statistics_batch_size=2))
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-6"))
    torch.testing.assert_close(again.model.state_dict(), whole.model.state_dict())


def test_a_closing_phase_is_resumed(tmp_path):
    """The checkpoint lies in the middle of the phase."""

    def closing():
        return KalmanCallback(EXAMPLE, statistics_batch_size=2, closing=(0.2, 0.9))

    whole = trainer(tmp_path / "a", closing())
    whole.train()
    again = trainer(tmp_path / "b", closing())
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-6"))
    assert not any("closing" in name for name in whole.model.state_dict())
    torch.testing.assert_close(again.model.state_dict(), whole.model.state_dict())
    plain = trainer(tmp_path / "c", KalmanCallback(EXAMPLE, statistics_batch_size=2))
    plain.train()
    assert not torch.equal(plain.model.classifier[1].weight, whole.model.classifier[1].weight)


def test_fp16_has_a_scaler_that_callbacks_do_not_get(tmp_path):
    running = trainer(tmp_path, KalmanCallback(EXAMPLE, closing=(0.2, 0.9)))
    running.args.fp16 = True
    with pytest.raises(ValueError, match="closing does not work with fp16"):
        running.callback_handler.on_train_begin(running.args, running.state, running.control)


def test_recalibration_gives_population_statistics_and_leaves_training_alone(tmp_path):
    callback = KalmanCallback(EXAMPLE, recalibrate_on=lambda: DataLoader(Images(), 4), statistics_batch_size=2)
    running = trainer(tmp_path, callback)
    running.train()
    plain = trainer(tmp_path, KalmanCallback(EXAMPLE, statistics_batch_size=2))
    plain.train()
    for name, parameter in plain.model.named_parameters():
        torch.testing.assert_close(running.model.get_parameter(name), parameter, rtol=0, atol=0)
    first = running.model.resnet.embedder.embedder
    mean = first.convolution(Images().images).mean((0, 2, 3)).detach()
    torch.testing.assert_close(first.normalization.running_mean, mean, rtol=1e-5, atol=1e-5)


def test_a_callback_that_comes_too_late_says_so(tmp_path):
    running = trainer(tmp_path, KalmanCallback(EXAMPLE))
    running.model = classifier()
    running.callback_handler.model = running.model
    with pytest.raises(ValueError, match=r"came too late.*Trainer\(callbacks="):
        running.train()


def test_accelerate_needs_a_converted_model_only():
    """Gradient accumulation in Accelerate's own way, with statistics of the whole step."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = kalmannorm.convert(classifier(), EXAMPLE, statistics_batch_size=2)
    optimizer = torch.optim.SGD(kalmannorm.parameter_groups(model, 1e-4), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Images(), 4))
    before = kalmannorm.gains(model)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    assert all(gain != before[name] for name, gain in kalmannorm.gains(accelerator.unwrap_model(model)).items())
