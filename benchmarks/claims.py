"""Figures in the text of README and guides that no other benchmark measures.

    python benchmarks/claims.py      # writes benchmarks/records/claims.jsonl, and its table in docs/performance.md

fused       A converted ResNet-18, 8 noise images of 64², m = 2, one training forward and backward, fused and unfused,
            from the same weights, in three precisions. `difference` is the largest difference of the two, relative to
            the largest value: of logits, and of the gradient of each parameter (the median over parameters).
            `fused_error` and `error` are the differences of each from the unfused model in float64.
parameters  The parameters that `transition="learned"` adds to a network, as a share of its own parameters.
width       How far digits-net is from the parameters of BKN learned after `reproduce parameters` has widened it.
chains      Of the norms whose prior variance is outside 0.5 to 2 of the observed one, how many are below: in networks
            with long chains of sums without a norm, on four noise images, as in families.csv.
"""

from __future__ import annotations

import contextlib
import copy
import json
import statistics
from collections.abc import Iterator
from typing import Any

import family_checks as checks
import family_models as models
import torch
import torchvision
from measured import DOCUMENT, RECORDS, markdown, placed
from torch import Tensor, nn
from torch.nn import functional as F

import kalmannorm
from kalmannorm.lab.experiments.widths import batchnorm_parameters, learned_parameters, matching_width
from kalmannorm.lab.machine.origin import origin

RECORD = RECORDS / "claims.jsonl"
SHAPE = (8, 3, 64, 64)
CHAINS = (("inception_resnet_v2", "inception_resnet_v2"), ("xception_aligned", "xception41p"))
"""Families and models of timm."""

Row = dict[str, Any]
Results = list[Tensor]
"""The logits, and the gradient of every parameter, in float64."""


def step(model: nn.Module, x: Tensor, precision: str) -> Results:
    model, dtype = copy.deepcopy(model).train(), torch.float64 if precision == "float64" else torch.float32
    model.to(dtype)
    labels = torch.arange(len(x)) % 10
    with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext():
        logits = model(x.to(dtype))
        loss = F.cross_entropy(logits, labels)
    loss.backward()
    found = [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return [t.double() for t in found]


def off(one: Results, other: Results) -> dict[str, float]:
    """The difference of two results: of their logits, and of their gradients, the median over parameters."""
    apart = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(one, other, strict=True) if b.abs().max() > 0]
    return {"logits": float(f"{apart[0]:.1e}"), "gradients": float(f"{statistics.median(apart[1:]):.1e}")}


def fused() -> Iterator[Row]:
    torch.manual_seed(0)
    x = torch.randn(SHAPE)
    model = kalmannorm.convert(torchvision.models.resnet18(num_classes=10), x[:2], statistics_batch_size=2)
    both = kalmannorm.fuse(model, x[:2])
    exact = step(model, x, "float64")
    for precision in ("float64", "float32", "bf16"):
        plain, one_pass = step(model, x, precision), step(both, x, precision)
        yield {
            "claim": "fused",
            "model": "resnet18",
            "precision": precision,
            "difference": off(one_pass, plain),
            "fused_error": off(one_pass, exact),
            "error": off(plain, exact),
        }


def parameters() -> Iterator[Row]:
    for name in ("resnet50", "densenet121"):
        net = torchvision.models.get_model(name)
        learned = kalmannorm.convert(net, torch.randn(2, *SHAPE[1:]), transition="learned", statistics_batch_size=2)
        own, all_of_them = (sum(p.numel() for p in model.parameters()) for model in (net, learned))
        yield {"claim": "parameters", "model": name, "own": own, "added_share": round(all_of_them / own - 1, 2)}


def width() -> Iterator[Row]:
    name, *net = "digits-net", 10, (1, 8, 8)
    found = matching_width(name, *net)
    share = batchnorm_parameters(name, found, *net) / learned_parameters(name, *net)
    yield {"claim": "width", "model": name, "width": found, "off_percent": round(100 * (share - 1), 1)}


def chains() -> Iterator[Row]:
    for family, model in CHAINS:
        chosen = models.Chosen("timm", family, model)
        torch.manual_seed(0)
        net = models.build(chosen)
        two, four = (models.noise(chosen, net, n) for n in (2, 4))
        converted = kalmannorm.convert(net, two, gain=0.999)
        ratios = [prior.ratio for prior in checks.priors(converted, four).values()]
        low, high = checks.RATIO
        below, above = sum(ratio < low for ratio in ratios), sum(ratio > high for ratio in ratios)
        yield {"claim": "chains", "model": model, "norms": len(ratios), "below": below, "above": above}


def read(claim: str) -> list[Row]:
    rows = [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["claim"] == claim]


def written(text: str) -> str:
    """docs/performance.md with the table of `fused` from the record."""
    kinds = {"difference": "fused and unfused", "fused_error": "fused and float64", "error": "unfused and float64"}
    parts = [(name, part) for part in ("logits", "gradients") for name in kinds]
    headings = ["", *(f"{part}: {kinds[name]}" for name, part in parts)]
    body = [[row["precision"], *(f"{row[name][part]:.2g}" for name, part in parts)] for row in read("fused")]
    return placed(text, RECORD.name, "\n".join([*markdown(headings, body, 1), ""]), DOCUMENT.name)


def main() -> None:
    torch.set_num_threads(1)
    source = origin("torchvision", "timm")
    rows = [*fused(), *parameters(), *width(), *chains()]
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    text = "".join(json.dumps({**row, **source}, ensure_ascii=False) + "\n" for row in rows)
    RECORD.write_text(text, encoding="utf-8")
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
