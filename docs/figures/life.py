"""The life of a model: BatchNorm net, convert, train, fold, plain net. The counts are those of a ResNet-18."""

from __future__ import annotations

from look import Theme, arrow, box, canvas, drawing, records
from matplotlib.figure import Figure

RECORDS = ("benchmarks/records/deploy.csv",)


def counts() -> dict[str, int]:
    """Norms and parameters before and after, from the library itself."""
    import torch
    import torchvision
    from torch import nn

    import kalmannorm

    model = torchvision.models.resnet18()
    converted = kalmannorm.convert(model, torch.randn(2, 3, 64, 64), statistics_batch_size=2)
    folded = kalmannorm.fold(converted.eval())

    def parameters(net: nn.Module) -> int:
        return sum(parameter.numel() for parameter in net.parameters())

    def norms(net: nn.Module) -> int:
        return sum(isinstance(module, nn.BatchNorm2d) for module in net.modules())

    return {
        "norms": norms(model),
        "priors": len(kalmannorm.gains(converted)),
        "added": parameters(converted) - parameters(model),
        "folded": norms(folded),
    }


def draw(theme: Theme) -> Figure:
    found = counts()
    norms, priors, added, left = (found[name] for name in ("norms", "priors", "added", "folded"))
    rows = records(RECORDS[0])
    moved = max(row[stage] for row in rows for stage in ("converted", "fold", "onnxruntime"))
    figure = canvas(theme, 12, 3.5)
    axes = drawing(figure, 12, 3.5)
    boxes = (
        ("BatchNorm net", f"{norms} BatchNorm2d", theme.batch),
        ("Kalman net", f"{priors} of {norms} norms\nhave a prior\n+{added} parameters", theme.kalman),
        ("trained net", "same class, names\nand checkpoints", theme.kalman),
        ("plain net", f"{left} norms\nno kalmannorm\nneeded", theme.good),
    )
    steps = (
        ("convert", "pretrained\nor not"),
        ("train", "closing phase:\noptional"),
        ("fold", "population\ninference"),
    )
    width, gap = 2.05, 1.16
    code = {"ha": "center", "va": "bottom", "fontweight": "bold", "family": "DejaVu Sans Mono", "fontsize": 12}
    note = {"ha": "center", "va": "top", "fontsize": 9.5, "color": theme.quiet, "linespacing": 1.25}
    for number, (name, words, colour) in enumerate(boxes):
        left_side = 0.12 + number * (width + gap)
        axes.text(left_side + width / 2, 0.5, name, ha="center", fontsize=14, fontweight="bold", color=colour)
        box(axes, theme, (left_side, 0.66, width, 1.1), words, colour=colour)
    for number, (name, words) in enumerate(steps):
        start = 0.12 + width + number * (width + gap)
        arrow(axes, theme, (start + 0.08, 1.21), (start + gap - 0.08, 1.21))
        axes.text(start + gap / 2, 1.08, name, **code)
        axes.text(start + gap / 2, 1.36, words, **note)
    trained, first = 0.12 + 2 * (width + gap) + width / 2, 0.12 + width / 2
    axes.plot([trained, trained, first], [1.78, 2.33, 2.33], color=theme.quiet, lw=1.6)
    arrow(axes, theme, (first, 2.33), (first, 1.8))
    axes.text((trained + first) / 2, 2.26, "to_batchnorm", **code)
    axes.text((trained + first) / 2, 2.43, "the same outputs, bit for bit", **note)
    told = f"Counts: ResNet-18.  Folding moves logits by at most {moved:.1e} of the largest one ({len(rows)} families)."
    axes.text(0.12, 3.2, told.replace("e-0", "e-"), fontsize=10, color=theme.quiet)
    return figure
