"""Fine-tuning a network that was trained with batch norm, at statistics batches of 64, 2 and 1.

    python benchmarks/fine_tuning.py                                    # two small networks, on a CPU
    python benchmarks/fine_tuning.py --net resnet-20 --device cuda      # CIFAR-10 as a whole, on a GPU
    python benchmarks/fine_tuning.py --tables                           # the tables of docs/conversion.md

Finished fine-tunings are recorded, so a run can be interrupted.

A network is trained with batch norm in batches of 128 on a data set. Its weights are kept in `--weights`. Then each
form fine-tunes it on the same data: 80 steps of SGD with Nesterov momentum 0.9, batches of 64, a constant learning rate
of 0.01, weight decay 5e-4. A record contains

    start        the mean of the first three losses
    eval         the mean loss on these three batches in eval mode, before the first step
    accuracy     % of the test images after the last step, in population inference
    trained      the same before fine-tuning

Records of kind "prior" compare the prior variance of every norm of the trained network with the variance that the norm
observes on 512 training images: the quartiles over channels of their ratio.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measured import markdown, placed
from torch import Tensor, nn
from torch.nn import functional as F

import kalmannorm
from kalmannorm.lab import data as data_sets
from kalmannorm.lab import models
from kalmannorm.lab.data import Data
from kalmannorm.lab.machine.origin import origin

HERE = Path(__file__).parent
RECORD = HERE / "records" / "fine-tuning.jsonl"
DOCUMENT = HERE.parent / "docs" / "conversion.md"
RATE, STEPS, BATCH, DECAY = 0.01, 80, 64, 5e-4
TRAIN_BATCH, TRAIN_RATE = 128, 0.1

Row = dict[str, Any]


@dataclass(frozen=True)
class Net:
    """A network and how it is trained with batch norm."""

    name: str
    model: str
    data: str
    epochs: int
    width: float = 1.0
    options: tuple[tuple[str, int], ...] = ()

    def load(self, device: str) -> Data:
        return data_sets.load(self.data, device=device, **dict(self.options))  # type: ignore[arg-type]

    def trained(self, data: Data, folder: Path, device: str, seed: int = 0) -> nn.Module:
        """The trained network. It is read from the folder if an earlier call has trained it."""
        path = folder / f"{self.name}-{seed}.pt"
        torch.manual_seed(seed)
        model = models.build(self.model, classes=data.classes, shape=data.shape, width=self.width).to(device)
        if path.is_file():
            model.load_state_dict(torch.load(path, map_location=device))
            return model
        optimizer = optimizer_of(model, TRAIN_RATE)
        steps, done = self.epochs * (data.train_size // TRAIN_BATCH), 0
        for epoch in range(self.epochs):
            for x, target in data.train_batches(TRAIN_BATCH, seed=seed, epoch=epoch):
                for group in optimizer.param_groups:
                    group["lr"] = TRAIN_RATE * (1 - done / steps)
                step(model, optimizer, x, target)
                done += 1
            print(f"{self.name}: epoch {epoch + 1}, {accuracy(model, data):.1f} %", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)
        return model


SMALL = (("image_size", 16), ("train_examples", 8_000), ("test_examples", 5_000))
NETS = [
    Net("digits-net", "digits-net", "digits", 15),
    Net("small-resnet-20", "cifar-resnet-20", "cifar10", 10, 0.5, SMALL),
    Net("resnet-20", "cifar-resnet-20", "cifar10", 30),
]


def optimizer_of(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(kalmannorm.parameter_groups(model, DECAY), lr=rate, momentum=0.9, nesterov=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor) -> float:
    model.train()
    loss = F.cross_entropy(model(x), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    model.eval()
    right = sum(int((model(x).argmax(1) == target).sum()) for x, target in data.test_batches(500))
    return 100 * right / data.test_size


@dataclass(frozen=True)
class Form:
    """What normalizes in fine-tuning."""

    name: str
    to: str = "kalman"
    calibrate: bool = False
    closing: bool = False
    present: float = 0.0
    """Of the closing phase: the share of the present batch in the expected gradients."""

    def converted(self, model: nn.Module, data: Data, m: int) -> nn.Module:
        size = {"statistics_batch_size": m}
        if self.to == "ghost":
            return kalmannorm.convert(model, to="ghost", **size)
        example, _ = next(iter(data.plain_batches(4)))
        return kalmannorm.convert(model, example, calibrate=self.calibrate, **size)


REFERENCE = Form("batch norm", "ghost")
FORMS = [
    Form("BKN, calibrated, closing phase, present 0.5", calibrate=True, closing=True, present=0.5),
    Form("batch norm, closing phase, present 0.5", "ghost", closing=True, present=0.5),
    REFERENCE,
    Form("batch norm, closing phase", "ghost", closing=True),
    Form("BKN"),
    Form("BKN, calibrated", calibrate=True),
    Form("BKN, closing phase", closing=True),
    Form("BKN, calibrated, closing phase", calibrate=True, closing=True),
]


def fine_tuned(model: nn.Module, form: Form, data: Data, m: int, seed: int) -> Row:
    torch.manual_seed(seed)
    model = form.converted(copy.deepcopy(model), data, m)
    phase = kalmannorm.ClosingPhase(model, STEPS, start=0, end=0, present=form.present) if form.closing else None
    optimizer = optimizer_of(model, RATE)
    batches = []
    while len(batches) < STEPS:
        batches += list(data.train_batches(BATCH, seed=seed + 100, epoch=len(batches)))
    model.eval()
    with torch.no_grad():
        before = [F.cross_entropy(model(x), target).item() for x, target in batches[:3]]
    losses = []
    for x, target in batches[:STEPS]:
        losses.append(step(model, optimizer, x, target))
        if phase is not None:
            phase.step()
    ends = {"start": sum(losses[:3]) / 3, "eval": sum(before) / 3, "end": sum(losses[-10:]) / 10}
    rounded = {name: round(value, 4) for name, value in ends.items()}
    return {**rounded, "losses": [round(loss, 4) for loss in losses[:3]], "accuracy": round(accuracy(model, data), 2)}


@torch.no_grad()
def priors(model: nn.Module, data: Data, calibrate: bool) -> list[Row]:
    """The quartiles of prior variance / observed variance, norm by norm, on a batch that the network is trained on."""
    x, _ = next(iter(data.plain_batches(512)))
    converted = kalmannorm.convert(model, x[:4], calibrate=calibrate).eval()
    seen: dict[str, Tensor] = {}
    for name, norm in converted.named_modules():
        if isinstance(norm, kalmannorm.GroupedNorm):
            norm.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0]}))
    converted(x)
    rows = []
    for name, norm in converted.named_modules():
        if isinstance(norm, kalmannorm.BatchKalmanNorm2d) and norm.gain is not None:
            prior = norm.wire.previous(0, x)
            over = seen[name].var((0, 2, 3), correction=0)
            quartiles = (prior.var[0] / over).quantile(torch.tensor([0.25, 0.5, 0.75]))
            rows.append({"norm": name, "quartiles": [round(q, 3) for q in quartiles.tolist()]})
    return rows


def read() -> list[Row]:
    return [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]


def prior_table(rows: list[Row]) -> str:
    """Quartiles of prior variance / observed variance, before and after calibration."""
    found = {(row["net"], row["calibrate"]): row["priors"] for row in rows if row["kind"] == "prior"}
    headings, lines = ["network", "norm", "as computed", "calibrated"], []
    for net in dict.fromkeys(net for net, _ in found):
        for before, after in zip(found[net, False], found[net, True], strict=True):
            cells = [" / ".join(f"{q:.2f}" for q in each["quartiles"]) for each in (before, after)]
            lines.append([net, f"`{before['norm']}`", *cells])
    return "\n".join(markdown(headings, lines, 2)) + "\n"


def tuning_table(rows: list[Row]) -> str:
    """Means over seeds, and accuracies of all seeds."""
    found: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        if row["kind"] == "fine-tuning":
            found.setdefault((row["net"], row["m"], row["form"]), []).append(row)
    headings = ["network", "m", "norm", "first three losses above the loss in eval mode", "accuracy %", "mean"]
    lines = []
    for (net, m, form), each in sorted(found.items(), key=lambda item: (item[0][0], -item[0][1])):
        above = statistics.mean(row["start"] - row["eval"] for row in each)
        scores = [row["accuracy"] for row in each]
        cells = [f"{above:+.2f}", "; ".join(f"{score:.1f}" for score in scores), f"{statistics.mean(scores):.1f}"]
        lines.append([net, str(m), form, *cells])
    return "\n".join(markdown(headings, lines, 3)) + "\n"


def written(text: str) -> str:
    """The document with both tables from the records."""
    rows = read()
    text = placed(text, "priors of fine-tuning.jsonl", prior_table(rows), DOCUMENT.name)
    return placed(text, "fine-tuning.jsonl", tuning_table(rows), DOCUMENT.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=HERE.parent / "runs" / "fine-tuning", help="trained networks")
    parser.add_argument("--seeds", type=int, default=3, help="fine-tunings of each form")
    parser.add_argument("--net", choices=[net.name for net in NETS], help="this network only; the first two")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tables", action="store_true", help="only write the tables of the document")
    options = parser.parse_args()
    if options.tables:
        DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
        return
    lines = RECORD.read_text(encoding="utf-8").splitlines() if RECORD.is_file() else []
    done = {json.loads(line)["key"] for line in lines}

    def record(key: str, **row: Any) -> None:
        with RECORD.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, **row, **origin()}) + "\n")
        print(f"{key}: { {name: value for name, value in row.items() if name != 'priors'} }", flush=True)

    for net in [net for net in NETS if net.name == options.net] or NETS[:2]:
        data = net.load(options.device)
        model = net.trained(data, options.weights, options.device)
        trained = round(accuracy(model, data), 2)
        base: Row = {"net": net.name, "model": net.model, "width": net.width, "data": net.data, **dict(net.options)}
        base |= {"epochs": net.epochs, "trained": trained}
        for calibrate in (False, True):
            key = f"{net.name} | prior | calibrate={calibrate}"
            if key not in done:
                record(key, kind="prior", **base, calibrate=calibrate, priors=priors(model, data, calibrate))
        cells = [(REFERENCE, BATCH), *((form, m) for form in FORMS for m in (2, 1))]
        for form, m in cells:
            for seed in range(options.seeds):
                key = f"{net.name} | {form.name} | m={m} | seed={seed}"
                if key not in done:
                    row = fine_tuned(model, form, data, m, seed)
                    record(key, kind="fine-tuning", **base, form=form.name, m=m, seed=seed, **row)


if __name__ == "__main__":
    main()
