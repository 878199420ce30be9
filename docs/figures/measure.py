"""Measures what the README's picture shows, and writes it to `records/`; `draw.py` draws it.

`records/accuracy.jsonl` is what `examples/digits.py` writes. `records/deviation.jsonl` says, for each layer of the same
trained nets, how far the σ that a batch is normalized with in training lies from the σ that inference will use:

    ratio = sqrt(posterior var of a batch / running var)      per channel and batch; 1 where the two agree

Batch norm's posterior is the batch's own variance. "gain" is q, the trust in the batch, averaged over seeds.

About 6 minutes on two CPU cores, from the repository's root:

    python docs/figures/measure.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import kalmannorm

RECORDS = Path(__file__).parent / "records"
EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import digits  # noqa: E402

SEEDS = 5
STATISTICS_BATCHES = (2, 1)
PERCENTILES = (5, 25, 50, 75, 95)


@torch.no_grad()
def ratios(net: digits.DigitsNet, statistics_batch: int) -> list[Tensor]:
    """σ of each batch of training images over σ at inference, (batches, channels), for every norm of the net."""
    found: list[Tensor] = []

    def compare(norm: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        if isinstance(norm, kalmannorm.GhostBatchNorm2d):
            posterior = kalmannorm.batch_kalman_norm(
                inputs[0], None, None, None, None, statistics_batch_size=statistics_batch
            )[1]
        else:
            posterior = norm.posterior
        found.append(((posterior.var + norm.eps) / (norm.running_var + norm.eps)).sqrt())

    hooks = [norm.register_forward_hook(compare) for norm in net.norms]
    images = digits.load_data()[0]
    images = images[: len(images) // digits.GRADIENT_BATCH * digits.GRADIENT_BATCH]
    net.eval()
    kalmannorm.set_inference(net, "batch")  # normalizes as training does, and leaves the running statistics alone
    net(images)
    for hook in hooks:
        hook.remove()
    return found


def trust(net: digits.DigitsNet) -> list[float]:
    """q of every norm; 1 where there is no prior."""
    gains = kalmannorm.gains(net)
    return [gains.get(f"norms.{index}", 1.0) for index in range(len(net.norms))]


def measure_deviation() -> None:
    origin = digits.origin("python docs/figures/measure.py")
    lines = []
    for method in digits.METHODS:
        for statistics_batch in STATISTICS_BATCHES:
            nets = [digits.train(method, statistics_batch, seed, digits.EPOCHS) for seed in range(SEEDS)]
            gains = torch.tensor([trust(net) for net in nets]).mean(0)
            of_layers = zip(*(ratios(net, statistics_batch) for net in nets), strict=True)
            for layer, of_seeds in enumerate(of_layers):
                ratio = torch.stack(of_seeds)
                values = torch.quantile(ratio.flatten(), torch.tensor(PERCENTILES) / 100).tolist()
                record = {
                    "method": method,
                    "gradient_batch": digits.GRADIENT_BATCH,
                    "statistics_batch": statistics_batch,
                    "layer": layer + 1,
                    **{f"p{rank}": round(value, 4) for rank, value in zip(PERCENTILES, values, strict=True)},
                    "gain": round(gains[layer].item(), 4),
                    "batches": ratio.shape[1],
                    "channels": ratio.shape[2],
                    "seeds": SEEDS,
                    "epochs": digits.EPOCHS,
                }
                lines.append(json.dumps({**record, **origin}) + "\n")
            print(f"deviation: {method} at m = {statistics_batch}, {SEEDS} seeds", file=sys.stderr)
    (RECORDS / "deviation.jsonl").write_text("".join(lines))


def measure_accuracy() -> None:
    command = [sys.executable, "examples/digits.py", "--seeds", str(SEEDS)]
    command += ["--statistics-batches", "64", "8", "4", "2", "1", "--output", "docs/figures/records/accuracy.jsonl"]
    subprocess.run(command, cwd=EXAMPLES.parent, check=True)


def main() -> None:
    torch.set_num_threads(1)  # nets this small gain nothing from more
    RECORDS.mkdir(exist_ok=True)
    measure_deviation()
    measure_accuracy()


if __name__ == "__main__":
    main()
