"""Hugging Face Trainer: a callback converts the model before the trainer builds its optimizer.

    python examples/hugging_face_trainer.py

For published weights use `ResNetForImageClassification.from_pretrained("microsoft/resnet-50")`.
"""

from __future__ import annotations

import tempfile

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments

from kalmannorm.integrations.transformers import KalmanCallback


def main(steps: int = 200) -> dict[str, float]:
    torch.manual_seed(0)
    digits = load_digits()
    images = F.interpolate(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1, size=32)
    examples = [{"pixel_values": x, "labels": int(y)} for x, y in zip(images, digits.target, strict=True)]
    shape = {"num_channels": 1, "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}
    model = ResNetForImageClassification(ResNetConfig(num_labels=10, layer_type="basic", **shape))
    callback = KalmanCallback({"pixel_values": images[:2]}, statistics_batch_size=2)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=8, max_steps=steps, learning_rate=5e-3, logging_steps=steps // 4,
            save_strategy="no", report_to="none", use_cpu=True,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=examples[:1200], callbacks=[callback])
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "kalman/gain" in entry]
    for entry in logged:
        print({name: entry[name] for name in ("step", "loss", "kalman/gain", "kalman/variance_gap")})
    return {"first": logged[0]["loss"], "last": logged[-1]["loss"]}


if __name__ == "__main__":
    main()
