"""From a trained model to ONNX, in population and in example inference.

    python examples/export_onnx.py [folder]

In `population` inference the norms are folded into the convolutions: the file contains no norm. In `example` inference
the priors become constants, and each example is normalized with its own posterior.
"""

from __future__ import annotations

import sys
from pathlib import Path

import onnxruntime
import torch
from torch import Tensor, nn

import kalmannorm


def trained(x: Tensor) -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    net = kalmannorm.convert(net, x, statistics_batch_size=2)
    for _ in range(10):  # stands for training
        net(torch.randn_like(x))
    return net.eval()


def written(net: nn.Module, x: Tensor, path: Path) -> float:
    """Export, run the file with another batch size, and return the largest difference of the results."""
    torch.onnx.export(net, (x,), str(path), dynamo=True, dynamic_shapes=({0: "batch"},), verbose=False)
    more = torch.cat([x, x + 1])
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    [result] = session.run(None, {session.get_inputs()[0].name: more.numpy()})
    with torch.no_grad():
        return (torch.from_numpy(result) - net(more)).abs().max().item()


def main(folder: str = ".") -> dict[str, float]:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 16, 16)
    model = trained(x)
    kalmannorm.set_inference(model, "population")
    found = {"population": written(kalmannorm.fold(model), x, Path(folder, "population.onnx"))}
    kalmannorm.set_inference(model, "example")
    found["example"] = written(kalmannorm.freeze_priors(model).eval(), x, Path(folder, "example.onnx"))
    for mode, difference in found.items():
        print(f"{mode}.onnx differs from torch by at most {difference:.1e}")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
