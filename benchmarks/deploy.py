"""Checks deployment with 20 families of timm and torchvision: `make deploy-check`.

Each model has random weights, γ and β away from 1 and 0, and the statistics of a batch of noise. Its logits on other
noise are compared with those of the original BatchNorm model, relative to the largest logit:

    converted       by `convert`, in population inference
    batchnorm       turned back by `to_batchnorm`: equal bits or not
    folded          by `fold`
    onnxruntime     the folded model, exported with a dynamic batch and run on 1, 3 and 5 examples

Writes benchmarks/records/deploy.csv. `--check` writes nothing, and fails if an error is above the limit.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import onnxruntime
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import kalmannorm
from kalmannorm.lab.machine.origin import origin

HERE = Path(__file__).parent
RECORD = HERE / "records" / "deploy.csv"
LIMIT = 1e-4
BATCHES = (1, 3, 5)


class Chosen(NamedTuple):
    library: str
    family: str
    model: str
    size: int = 128


FAMILIES = [
    Chosen("timm", "byobnet", "test_byobnet"),
    Chosen("timm", "cspnet", "cs3darknet_focus_s"),
    Chosen("timm", "densenet", "densenet121"),
    Chosen("timm", "dla", "dla46x_c"),
    Chosen("timm", "efficientnet", "tf_efficientnet_lite0"),
    Chosen("timm", "efficientvit", "efficientvit_b0"),
    Chosen("timm", "fastvit", "fastvit_t8"),
    Chosen("timm", "ghostnet", "ghostnet_050"),
    Chosen("timm", "hgnet", "hgnetv2_b0"),
    Chosen("timm", "mobilenetv3", "mobilenetv3_small_050"),
    Chosen("timm", "mobilevit", "mobilevit_xxs"),
    Chosen("timm", "regnet", "regnetx_002"),
    Chosen("timm", "repvit", "repvit_m1"),
    Chosen("timm", "resnet", "test_resnet"),
    Chosen("timm", "resnetv2", "resnetv2_18"),
    Chosen("timm", "starnet", "starnet_s050"),
    Chosen("timm", "vovnet", "ese_vovnet19b_slim_dw"),
    Chosen("torchvision", "googlenet", "googlenet"),
    Chosen("torchvision", "mobilenetv2", "mobilenet_v2"),
    Chosen("torchvision", "shufflenetv2", "shufflenet_v2_x0_5"),
]

Row = dict[str, Any]


def build(chosen: Chosen) -> nn.Module:
    """The model in eval mode, with random weights and non-trivial norms."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the models' own code
        if chosen.library == "timm":
            model: nn.Module = timm.create_model(chosen.model)
        else:
            own = {"init_weights": True} if chosen.model == "googlenet" else {}
            model = torchvision.models.get_model(chosen.model, weights=None, **own)
    return trained(model, noise(chosen, 8, seed=1))


def noise(chosen: Chosen, examples: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(examples, 3, chosen.size, chosen.size, generator=generator)


@torch.no_grad()
def trained(model: nn.Module, x: Tensor) -> nn.Module:
    """Move γ and β away from 1 and 0, and set statistics near those of a batch, so that features keep their scale."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias, std=0.2)
        norm.momentum = 1.0
    model.train()(x)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        mean, var = norm.running_mean, norm.running_var
        assert mean is not None and var is not None
        mean += 0.1 * var.sqrt() * torch.randn_like(mean)
        var *= 0.8 + 0.4 * torch.rand_like(var)
    return model.eval()


def batch_norms(model: nn.Module) -> int:
    return sum(isinstance(module, _BatchNorm) for module in model.modules())


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest logit."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def onnxruntime_error(model: nn.Module, original: nn.Module, chosen: Chosen) -> float:
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "model.onnx"
        example = (noise(chosen, 2),)
        torch.onnx.export(model, example, path, dynamo=True, dynamic_shapes=({0: "batch"},), verbose=False)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (given,), errors = session.get_inputs(), []
        for examples in BATCHES:
            x = noise(chosen, examples, seed=examples)
            (y,) = session.run(None, {given.name: x.numpy()})
            errors.append(error(torch.from_numpy(y), original(x)))
        return max(errors)


@torch.no_grad()
def examine(chosen: Chosen, *, onnx: bool = True) -> Row:
    """One row of the record."""
    start = time.perf_counter()
    model, x = build(chosen), noise(chosen, 4)
    expected = model(x)
    converted = kalmannorm.convert(model, x, statistics_batch_size=2)
    folded, back = kalmannorm.fold(converted), kalmannorm.to_batchnorm(converted)
    norms = batch_norms(model)
    row: Row = {
        **chosen._asdict(),
        "norms": norms,
        "folded": norms - batch_norms(folded),
        "largest_logit": f"{expected.abs().max().item():.2f}",
        "converted": f"{error(converted(x), expected):.1e}",
        "batchnorm": "equal" if torch.equal(back(x), expected) else f"{error(back(x), expected):.1e}",
        "fold": f"{error(folded(x), expected):.1e}",
    }
    if onnx:
        row["onnxruntime"] = f"{onnxruntime_error(folded, model, chosen):.1e}"
    return {**row, "seconds": f"{time.perf_counter() - start:.1f}"}


def faults(row: Row) -> list[str]:
    """The problems of a row."""
    above = [stage for stage in ("converted", "fold", "onnxruntime") if stage in row and float(row[stage]) > LIMIT]
    found = [f"{row['model']}: {stage} is off by {row[stage]}" for stage in above]
    if row["batchnorm"] != "equal":
        found.append(f"{row['model']}: to_batchnorm is off by {row['batchnorm']}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert, fold and export 20 families, and compare their logits.")
    parser.add_argument("--only", metavar="NAME,NAME", help="only these families; writes nothing")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if an error is above the limit")
    options = parser.parse_args()
    wanted = set(options.only.split(",")) if options.only else {chosen.family for chosen in FAMILIES}
    unknown = wanted - {chosen.family for chosen in FAMILIES}
    if unknown:
        parser.error(f"--only: there is no family {', '.join(sorted(unknown))}")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # small models gain nothing from more threads
    rows, source, found = [], origin("timm", "torchvision", "onnxruntime"), list[str]()
    for chosen in FAMILIES:
        if chosen.family in wanted:
            row = examine(chosen)
            print("  ".join(f"{key} {value}" for key, value in row.items() if key != "library"), flush=True)
            rows.append({**row, **{f"{key}_version" if key in row else key: value for key, value in source.items()}})
            found += faults(row)
    if not options.check and not options.only:
        with RECORD.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    if found:
        sys.exit("\n".join(found))
    print(f"{len(rows)} models keep their logits to {LIMIT:g} of the largest")


if __name__ == "__main__":
    main()
