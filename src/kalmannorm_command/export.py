"""`kalmannorm export`: write a trained run as ONNX, as a torch.export program or as plain weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run that is finished or has a checkpoint.")],
    output: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="File to write. The format follows from the name: .onnx, .pt2 or .safetensors."
        ),
    ],
    inference: Annotated[str, typer.Option("--inference", help="population, example or batch.")] = "population",
    folded: Annotated[
        bool, typer.Option("--fold/--no-fold", help="Fold norms into convolutions. Without it they become BatchNorms.")
    ] = True,
    data_root: Annotated[Path | None, typer.Option("--data-root", help="Folder of the data sets.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Export a trained model to ONNX, to .pt2 of torch.export, or to .safetensors weights of a plain net.

    The exported file is read back and compared with the model on test images. The exported model takes images
    normalized as in training. Their mean, their standard deviation and other metadata are in the file, under the name
    kalmannorm.
    """
    from kalmannorm.lab.export import export as write

    found = write(run, output, inference=inference, folded=folded, data_root=data_root)
    if as_json:
        typer.echo(json.dumps(found))
        return
    left = f"{found['norms']} norms left" if found["norms"] else "no norm left"
    position = "" if found["step"] == found["steps"] else f" at step {found['step']} of {found['steps']}"
    typer.echo(f"{output}: {found['model']}{position}, {inference} inference, {left}, {found['bytes'] / 1e6:.1f} MB")
    typer.echo(f"takes {_number(found['batch'])} images of {' × '.join(map(str, found['shape']))}")
    if found["difference"] is None:
        typer.echo("logits not compared: onnxruntime is missing. pip install 'kalmannorm[onnx]'")
    else:
        typer.echo(f"logits differ from the model's by at most {found['difference']:.1e} of the largest")


def _number(batch: dict[str, int] | int) -> str:
    if isinstance(batch, int):
        return f"exactly {batch}, because torch.export fixed the batch size:"
    if batch["multiple_of"] == 1:
        return "any number of"
    return f"a multiple of {batch['multiple_of']}, at least {batch['at_least']},"
