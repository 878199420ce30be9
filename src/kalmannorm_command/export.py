"""`kalmannorm export`: a trained run as ONNX, a torch.export program or plain weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="A run's folder, finished or with a checkpoint.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="A name that ends in .onnx, .pt2 or .safetensors.")],
    inference: Annotated[str, typer.Option("--inference", help="population, example or batch.")] = "population",
    folded: Annotated[
        bool, typer.Option("--fold/--no-fold", help="Norms into convolutions; else they become BatchNorms.")
    ] = True,
    data_root: Annotated[Path | None, typer.Option("--data-root", help="Where data sets are kept.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Ship a trained model: to ONNX, to torch.export's .pt2, or as weights of a plain, folded net.

    The file is read back and compared with the model on test images. It takes images normalized as in training: mean
    and deviation are in the file, under the name kalmannorm, with what else there is to know.
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
        typer.echo("logits not compared, for onnxruntime is missing: pip install 'kalmannorm[onnx]'")
    else:
        typer.echo(f"logits differ from the model's by at most {found['difference']:.1e} of the largest")


def _number(batch: dict[str, int] | int) -> str:
    if isinstance(batch, int):
        return f"exactly {batch}, for torch.export fixed their number:"
    if batch["multiple_of"] == 1:
        return "any number of"
    return f"a multiple of {batch['multiple_of']}, at least {batch['at_least']},"
