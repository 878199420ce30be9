"""Measures what the README's picture shows, and writes it to `records/`; `draw.py` draws it.

`records/accuracy.jsonl` is what `examples/digits.py` writes. `records/deviation.jsonl` says, for each layer of the same
trained nets, how far the σ that a batch is normalized with in training lies from the σ that inference will use:

    ratio = sqrt(posterior var of a batch / running var)      per channel and batch; 1 where the two agree

Batch norm's posterior is the batch's own variance. About 8 minutes on two CPU cores:

    python docs/figures/measure.py
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import kalmannorm

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import digits  # noqa: E402

SEEDS = 5
STATISTICS_BATCHES = (2, 1)
METHODS = ("BN", "BKN learned", "BKN weights")
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


def measure_deviation() -> list[dict[str, object]]:
    records: list[dict[str, object]] = []
    for method in METHODS:
        for statistics_batch in STATISTICS_BATCHES:
            nets = [
                ratios(digits.train(method, statistics_batch, seed, digits.EPOCHS), statistics_batch)
                for seed in range(SEEDS)
            ]
            for layer, of_seeds in enumerate(zip(*nets, strict=True), 1):
                ratio = torch.stack(of_seeds)
                at = torch.quantile(ratio.flatten(), torch.tensor(PERCENTILES) / 100)
                records.append(
                    {
                        "method": method,
                        "gradient_batch": digits.GRADIENT_BATCH,
                        "statistics_batch": statistics_batch,
                        "layer": layer,
                        **{
                            f"p{percentile}": round(value, 4)
                            for percentile, value in zip(PERCENTILES, at.tolist(), strict=True)
                        },
                        "batches": ratio.shape[1],
                        "channels": ratio.shape[2],
                        "seeds": SEEDS,
                        "epochs": digits.EPOCHS,
                        "torch": torch.__version__,
                        "python": platform.python_version(),
                        "kalmannorm": kalmannorm.__version__,
                        "hardware": f"{platform.machine()}, {os.cpu_count()} CPU cores",
                        "command": "python docs/figures/measure.py",
                    }
                )
            print(f"deviation: {method} at m = {statistics_batch}: {SEEDS} seeds", file=sys.stderr)
    return records


def measure_accuracy() -> None:
    command = [sys.executable, "examples/digits.py", "--seeds", str(SEEDS)]
    command += ["--statistics-batches", "64", "8", "4", "2", "1", "--output", "docs/figures/records/accuracy.jsonl"]
    subprocess.run(command, cwd=EXAMPLES.parent, check=True)


def main() -> None:
    torch.set_num_threads(1)
    records = HERE / "records"
    records.mkdir(exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in measure_deviation())
    (records / "deviation.jsonl").write_text(lines)
    measure_accuracy()


if __name__ == "__main__":
    main()
