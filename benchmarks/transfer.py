"""Fine-tuning on other data: a network that was trained on five classes of CIFAR-10 learns the other five.

    python benchmarks/transfer.py                # about an hour on two cores; can be interrupted

A ResNet-20 of half width is trained with batch norm in batches of 128 on 10,000 images of the first five classes, in
16×16 pixels. Then it gets a new head, and each form fine-tunes all of it on 2,000 images of the other classes: four
epochs of SGD with Nesterov momentum 0.9 in batches of 32, at a learning rate that falls from 0.01 to 0, weight decay
5e-4. A record contains the accuracy in % on the 5,000 test images of these classes, in population inference.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from fine_tuning import DECAY, RATE, TRAIN_BATCH, TRAIN_RATE, Form, accuracy, optimizer_of, step
from torch import nn

import kalmannorm
from kalmannorm.lab import data as data_sets
from kalmannorm.lab import models
from kalmannorm.lab.data.resident import Resident, Split
from kalmannorm.lab.machine.origin import origin

HERE = Path(__file__).parent
RECORD = HERE / "records" / "transfer.jsonl"
CLASSES, IMAGE_SIZE, WIDTH = 5, 16, 0.5
TRAIN_EPOCHS, EPOCHS, BATCH, IMAGES = 20, 4, 32, 2_000
REFERENCE = Form("batch norm", "ghost")
FORMS = [
    Form("batch norm, closing phase, present 0.5", "ghost", closing=True, present=0.5),
    Form("BKN, calibrated, closing phase, present 0.5", calibrate=True, closing=True, present=0.5),
    REFERENCE,
    Form("BKN"),
]


def both_parts() -> tuple[Resident, Resident]:
    """The first five classes, and the other five with fewer training images."""
    whole = data_sets.load("cifar10", image_size=IMAGE_SIZE, train_examples=20_000)
    assert isinstance(whole, Resident)

    def part(first: int, images: int | None) -> Resident:
        def chosen(split: Split) -> Split:
            mine = (split.labels >= first) & (split.labels < first + CLASSES)
            return Split(split.images[mine], split.labels[mine] - first)

        train, test = chosen(whole._train).subset(images, 0), chosen(whole._test)
        moments = {"mean": whole.mean.flatten(), "std": whole.std.flatten()}
        return Resident("cifar10", CLASSES, train, test, **moments, padding=whole.padding, device=whole.device)

    return part(0, None), part(CLASSES, IMAGES)


def trained(data: Resident, path: Path) -> nn.Module:
    """The network, from the file if an earlier call has trained it."""
    torch.manual_seed(0)
    model = models.build("cifar-resnet-20", classes=CLASSES, shape=data.shape, width=WIDTH)
    if path.is_file():
        model.load_state_dict(torch.load(path))
        return model
    optimizer = optimizer_of(model, TRAIN_RATE)
    _run(model, optimizer, data, TRAIN_EPOCHS, TRAIN_BATCH, 0, None)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model


def _run(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Resident, epochs: int, batch: int, seed: int, phase: Any
) -> None:
    rate, done, steps = optimizer.param_groups[0]["lr"], 0, epochs * (data.train_size // batch)
    for epoch in range(epochs):
        for x, target in data.train_batches(batch, seed=seed, epoch=epoch):
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 - done / steps)
            step(model, optimizer, x, target)
            if phase is not None:
                phase.step()
            done += 1


def fine_tuned(model: nn.Module, form: Form, data: Resident, m: int, seed: int) -> float:
    model = copy.deepcopy(model)
    torch.manual_seed(seed)
    head = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)][-1]
    model.set_submodule(head, nn.Linear(model.get_submodule(head).in_features, CLASSES))
    model = form.converted(model, data, m)
    steps = EPOCHS * (data.train_size // BATCH)
    phase = kalmannorm.ClosingPhase(model, steps, start=0, end=0, present=form.present) if form.closing else None
    _run(model, optimizer_of(model, RATE), data, EPOCHS, BATCH, seed + 100, phase)
    return accuracy(model, data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=HERE.parent / "runs" / "transfer.pt", help="trained network")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    lines = RECORD.read_text(encoding="utf-8").splitlines() if RECORD.is_file() else []
    done = {json.loads(line)["key"] for line in lines}
    first, other = both_parts()
    model = trained(first, options.weights)
    known = round(accuracy(model, first), 2)
    print(f"first five classes: {known} %", flush=True)
    for seed in range(options.seeds):
        for form, m in [(REFERENCE, BATCH), *((form, m) for form in FORMS for m in (2, 1))]:
            key = f"{form.name} | m={m} | seed={seed}"
            if key in done:
                continue
            row = {"key": key, "form": form.name, "m": m, "seed": seed, "trained": known, "decay": DECAY}
            row["accuracy"] = round(fine_tuned(model, form, other, m, seed), 2)
            with RECORD.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**row, **origin()}) + "\n")
            print(f"{key}: {row['accuracy']}", flush=True)


if __name__ == "__main__":
    main()
