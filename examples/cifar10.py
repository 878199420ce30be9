"""A statistics batch of 2 on CIFAR-10: batch norm beside Batch Kalman Normalization in the paper's Inception net.

    python examples/cifar10.py --data FOLDER --output records.jsonl

FOLDER is `cifar-10-batches-py`, CIFAR-10's "python version". Each run trains the net of the paper's section 4.4 (a 3×3
stem of stride 2, three Inception blocks on 16×16 maps, a hidden layer of 1000) with SGD, Nesterov 0.9, a learning rate
falling linearly from 0.1 to 0, weight decay 5e-4, crops and flips, bf16 on a GPU. Runs differ in the norm, the
statistics batch and the seed only; "BKN learned" starts at a gain of 0.9 and has a noise of its own in each layer, "BKN
weights" starts at 0.5. They are tested in the three ways of inference. On a GPU the step is a CUDA graph, and several
runs share the device (`--jobs`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import pickle
import platform
import shlex
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kalmannorm
from kalmannorm import BatchKalmanNorm2d, GhostBatchNorm2d, Moments, moments

METHODS = ("BN", "GN", "BKN learned", "BKN weights")
GRADIENT_BATCH = 128
# 1×1; 1×1 then 3×3; 1×1 then 5×5; pool then 1×1
BLOCKS = ((64, (96, 128), (16, 32), 32), (128, (128, 192), (32, 96), 64), (192, (96, 208), (16, 48), 64))


class Unit(nn.Module):
    """Convolution, norm, ReLU. Beside the features travels what the next norm's prior is made of (`state`)."""

    def __init__(self, method: str, m: int, fan_in: int, width: int, kernel: int, stride: int = 1, first: bool = False):
        super().__init__()
        self.method = method
        self.conv = nn.Conv2d(fan_in, width, kernel, stride, padding=kernel // 2, bias=False)
        self.norm: nn.Module
        if method == "BN":
            self.norm = GhostBatchNorm2d(width, statistics_batch_size=m)
        elif method == "GN":
            self.norm = nn.GroupNorm(next(g for g in (32, 16, 8, 4) if width % g == 0), width)
        elif method == "BKN learned":
            self.norm = BatchKalmanNorm2d(width, None if first else fan_in, statistics_batch_size=m, gain=0.9)
        else:
            prior = None if first else width
            self.norm = BatchKalmanNorm2d(width, prior, statistics_batch_size=m, transition="weights")

    def forward(self, x: Tensor, state: Moments | None) -> tuple[Tensor, Moments | None]:
        y = self.conv(x)
        if self.method == "BKN learned":
            y, state = self.norm(y, state, return_posterior=True)
        elif self.method == "BKN weights":
            prior = None
            if state is not None:
                conv = self.conv
                prior = moments.convolution(
                    state, conv.weight, stride=conv.stride, padding=conv.padding, input_size=tuple(x.shape[2:])
                )
            y = self.norm(y, prior)
            state = moments.relu(moments.belief(self.norm.weight, self.norm.bias))
        else:
            y = self.norm(y)
        return F.relu(y), state


class Block(nn.Module):
    """Four branches side by side; states are concatenated as the features are, and pooling leaves them."""

    def __init__(self, method: str, m: int, fan_in: int, widths: tuple[Any, ...]):
        super().__init__()
        one, (three_in, three), (five_in, five), pooled = widths
        self.one = Unit(method, m, fan_in, one, 1)
        self.three = nn.ModuleList((Unit(method, m, fan_in, three_in, 1), Unit(method, m, three_in, three, 3)))
        self.five = nn.ModuleList((Unit(method, m, fan_in, five_in, 1), Unit(method, m, five_in, five, 5)))
        self.pooled = Unit(method, m, fan_in, pooled, 1)

    def forward(self, x: Tensor, state: Moments | None) -> tuple[Tensor, Moments | None]:
        results = [self.one(x, state)]
        for branch in (self.three, self.five):
            y, s = x, state
            for unit in branch:
                y, s = unit(y, s)
            results.append((y, s))
        results.append(self.pooled(F.max_pool2d(x, 3, 1, padding=1), state))
        states = [s for _, s in results if s is not None]
        return torch.cat([y for y, _ in results], 1), moments.concatenate(states) if states else None


class Inception(nn.Module):
    def __init__(self, method: str, m: int):
        super().__init__()
        self.stem = Unit(method, m, 3, 32, 3, stride=2, first=True)
        widths = [32] + [one + three[1] + five[1] + pooled for one, three, five, pooled in BLOCKS]
        self.blocks = nn.ModuleList(
            Block(method, m, fan_in, block) for fan_in, block in zip(widths[:-1], BLOCKS, strict=True)
        )
        self.hidden, self.classifier = nn.Linear(widths[-1], 1000), nn.Linear(1000, 10)

    def forward(self, x: Tensor) -> Tensor:
        x, state = self.stem(x, None)
        for block in self.blocks:
            x, state = block(x, state)
        return self.classifier(F.relu(self.hidden(x.mean((2, 3)))))


def load(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images (N, 3, 32, 32), normalized, and labels; test images and labels."""
    files = [folder / f"data_batch_{i}" for i in range(1, 6)] + [folder / "test_batch"]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        sys.exit(f"cifar10.py: {folder} lacks {', '.join(missing)}; give the folder cifar-10-batches-py as --data")
    batches = [pickle.loads(file.read_bytes(), encoding="latin1") for file in files]
    images = torch.from_numpy(np.concatenate([batch["data"] for batch in batches])).view(-1, 3, 32, 32).float() / 255
    labels = torch.tensor([label for batch in batches for label in batch["labels"]])
    train = len(images) - len(batches[-1]["labels"])
    mean, std = images[:train].mean((0, 2, 3), keepdim=True), images[:train].std((0, 2, 3), keepdim=True)
    images = (images - mean) / std
    return images[:train], labels[:train], images[train:], labels[train:]


def augment(images: Tensor) -> Tensor:
    """A random crop of the image padded by 4, and a flip, for the whole batch on its device."""
    N, C, H, W = images.shape
    padded = F.pad(images, (4, 4, 4, 4))
    top, left = (torch.randint(0, 9, (N, 1), device=images.device) for _ in range(2))
    rows = top + torch.arange(H, device=images.device)
    columns = left + torch.arange(W, device=images.device)
    flip = torch.rand(N, 1, device=images.device) < 0.5
    columns = torch.where(flip, columns.flip(1), columns)
    index = (rows.unsqueeze(2) * (W + 8) + columns.unsqueeze(1)).view(N, 1, -1).expand(N, C, -1)
    return padded.flatten(2).gather(2, index).view(images.shape)


class Step:
    """Forward and backward of one batch: eager on a CPU, one CUDA graph on a GPU."""

    def __init__(self, net: nn.Module, device: torch.device):
        self.net, self.device = net, device
        self.images = torch.randn(GRADIENT_BATCH, 3, 32, 32, device=device)
        self.labels = torch.zeros(GRADIENT_BATCH, dtype=torch.long, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type != "cuda":
            return
        start = {name: value.clone() for name, value in net.state_dict().items()}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._run()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._run()
        net.load_state_dict(start)  # the warm-up moved the running statistics

    def _run(self) -> None:
        for parameter in self.net.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        with torch.autocast(self.device.type, torch.bfloat16, self.device.type == "cuda", cache_enabled=False):
            loss = F.cross_entropy(self.net(self.images), self.labels)
        loss.backward()
        for module in self.net.modules():
            if isinstance(module, BatchKalmanNorm2d):
                module.release()

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        self.images.copy_(images)
        self.labels.copy_(labels)
        if self.graph is None:
            self._run()
        else:
            self.graph.replay()


def train(method: str, m: int, seed: int, epochs: int, data: tuple[Tensor, ...], device: torch.device) -> nn.Module:
    images, labels = (part.to(device) for part in data[:2])
    torch.manual_seed(seed)
    net = Inception(method, m).to(device)
    groups = kalmannorm.parameter_groups(net, 5e-4)
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    per_epoch = len(images) // GRADIENT_BATCH
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, epochs * per_epoch)
    step = Step(net, device)
    for _ in range(epochs):
        order = torch.randperm(len(images), device=device)
        for batch in order.split(GRADIENT_BATCH)[:per_epoch]:
            step(augment(images[batch]), labels[batch])
            optimizer.step()
            schedule.step()
    return net


@torch.no_grad()
def test(net: nn.Module, method: str, data: tuple[Tensor, ...], device: torch.device) -> dict[str, float]:
    images, labels = (part.to(device) for part in data[2:])
    net.eval()
    accuracy = {}
    for mode in ("population",) if method == "GN" else ("population", "batch", "example"):
        if method != "GN":
            kalmannorm.set_inference(net, mode)
        with torch.autocast(device.type, torch.bfloat16, device.type == "cuda"):
            predicted = torch.cat([net(part).argmax(1) for part in images.split(1024)])
        accuracy[mode] = round(100 * (predicted == labels).float().mean().item(), 2)
    return accuracy


def run(method: str, m: int, seed: int, epochs: int, folder: Path) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start = time.perf_counter()
    data = load(folder)
    net = train(method, m, seed, epochs, data, device)
    return {
        "method": method,
        "gradient_batch": GRADIENT_BATCH,
        "statistics_batch": m,
        "seed": seed,
        "epochs": epochs,
        "accuracy": test(net, method, data, device),
        "gains": {name: round(gain, 4) for name, gain in kalmannorm.gains(net).items()},
        "seconds": round(time.perf_counter() - start, 1),
        "torch": torch.__version__,
        "hardware": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="cifar-10-batches-py")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--statistics-batches", type=int, nargs="+", default=[128, 2], metavar="m")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--jobs", type=int, default=1, help="runs that share the device at a time")
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl", help="append a JSON line per run")
    options = parser.parse_args()
    cells = itertools.product(options.methods, options.statistics_batches, range(options.seeds))
    command = shlex.join(["python", "examples/cifar10.py", *sys.argv[1:]])
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(run, *cell, options.epochs, options.data) for cell in cells]
        for future in as_completed(futures):
            record = {**future.result(), "kalmannorm": kalmannorm.__version__, "command": command}
            line = f"{record['method']:<12} ({GRADIENT_BATCH}, {record['statistics_batch']}) seed {record['seed']}"
            print(f"{line}  {record['accuracy']}  {record['seconds']} s", flush=True)
            if options.output is not None:
                with options.output.open("a") as file:
                    file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
