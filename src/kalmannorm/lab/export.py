"""Writes a trained run as a file to deploy: ONNX, a torch.export program, or weights of a plain model.

The file is read back, run on test images and compared with the run's own model. If its logits differ, it is not kept.
In population inference the norms are first folded into the convolutions before them. The file then contains nothing of
this library, and often no norm at all.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

import kalmannorm
from kalmannorm._model.convert import to_batchnorm
from kalmannorm._model.deploy import fold, freeze_priors
from kalmannorm._model.settings import norms, set_inference
from kalmannorm._norms.kalman import BatchKalmanNorm
from kalmannorm.lab.errors import LabError, first_line
from kalmannorm.lab.files.records import Record, writable
from kalmannorm.lab.recipes.methods import method
from kalmannorm.lab.training.loading import Loaded, load_run, model_of

FORMATS = (".onnx", ".pt2", ".safetensors")
LIMIT = 1e-3
"""The largest error of logits, relative to the largest logit.

Another order of summation in float32 gives about 1e-5.
"""
CHECKED = (1, 3, 5)
"""Images per batch when a file is compared with its model. In batch inference: groups, and at least two."""

Forward = Callable[[Tensor], Tensor]


def export(
    folder: Path, output: Path, *, inference: str = "population", folded: bool = True, data_root: Path | None = None
) -> Record:
    """Write the model of a run, in the format given by the name of `output`, and return a description of the file.

    `folded` is for population inference: False keeps BatchNorms, and so the names of the original model.
    """
    _check_output(output, inference)
    loaded = load_run(folder, device="cpu", data_root=data_root, workers=0)
    recipe, own = loaded.run.recipe, loaded.model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    chosen = method(recipe.method)
    if inference not in chosen.modes:
        raise LabError(f"{chosen.title} has no {inference} inference; it has {', '.join(chosen.modes)}")
    if any(True for _ in norms(own)):
        set_inference(own, inference)  # type: ignore[arg-type]
    group = recipe.statistics_batch if inference == "batch" else None
    sizes = [count if group is None else max(count, 2) * group for count in CHECKED]
    images = _test_images(loaded, max(sizes), next(own.parameters()).dtype)
    model = shipped(own, images[:2], folded=folded)
    about: Record = {
        "model": recipe.model,
        "dataset": recipe.dataset,
        "method": recipe.method,
        "setting": list(recipe.setting),
        "inference": inference,
        "step": loaded.step,
        "steps": loaded.steps,
        "classes": loaded.data.classes,
        "shape": list(loaded.data.shape),
        "mean": loaded.data.mean.flatten().tolist(),
        "std": loaded.data.std.flatten().tolist(),
        "norms": sum(isinstance(module, (_NormBase, nn.GroupNorm)) for module in model.modules()),
        "kalmannorm": kalmannorm.__version__,
    }
    forward: Forward | None
    with torch.no_grad(), _arriving(output) as partial:
        if output.suffix == ".safetensors":
            about["batch"] = {"multiple_of": 1, "at_least": 1}
            forward = _weights(model, partial, about, lambda: shipped(_again(loaded), images[:2], folded=folded))
        else:
            program, about["batch"] = exported(model, images[: 2 * (group or 1)], group)
            forward = (_onnx if output.suffix == ".onnx" else _pt2)(program, partial, about)
        sizes = [about["batch"]] if isinstance(about["batch"], int) else sizes
        difference = None if forward is None else _difference(forward, own, [images[:size] for size in sizes])
    return {"file": str(output), "bytes": output.stat().st_size, "difference": difference, **about}


def _check_output(output: Path, inference: str) -> None:
    if output.suffix not in FORMATS:
        raise LabError(f"{output}: the name must end in {', '.join(FORMATS)}")
    if not os.path.isdir(output.absolute().parent):
        raise LabError(f"{output}: there is no folder {output.parent}")
    writable(output)
    if output.suffix == ".safetensors" and inference != "population":
        raise LabError(
            f"a .safetensors file contains weights only, not enough for {inference} inference: use .onnx or .pt2"
        )
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if output.suffix == ".onnx" and missing:
        raise LabError(f"ONNX needs {' and '.join(missing)}: pip install 'kalmannorm[onnx]', or write a .pt2 file")


def shipped(model: nn.Module, example: Tensor, *, folded: bool) -> nn.Module:
    """A copy of a model for deployment, in eval mode and in its way of inference. It cannot be trained."""
    found = [norm for _, norm in norms(model)]
    wired = any(isinstance(norm, BatchKalmanNorm) and norm.wire is not None for norm in found)
    if not found:
        return model
    if found[0].inference != "population":
        return freeze_priors(model) if wired else model
    if folded:
        try:
            return fold(model, None if wired else example)
        except ValueError:  # no norm alone reads a convolution
            pass
    return to_batchnorm(model).eval()


def exported(
    model: nn.Module, example: Tensor, group: int | None = None
) -> tuple[torch.export.ExportedProgram, dict[str, int] | int]:
    """The program, and the number of images that it accepts: any number, whole groups, or only this number."""
    batch, takes = torch.export.Dim("batch"), {"multiple_of": 1, "at_least": 1}
    if group is not None:
        # The code has a branch for a single group, but a program cannot have branches.
        batch = group * torch.export.Dim("groups", min=2)
        takes = {"multiple_of": group, "at_least": 2 * group}
    failure: Exception
    with _quietly():
        numbers: list[tuple[Any, dict[str, int] | int]] = [(({0: batch},), takes), (None, len(example))]
        for shapes, number in numbers:
            try:
                return torch.export.export(model, (example,), dynamic_shapes=shapes), number
            except Exception as error:  # many kinds of errors, depending on the model's code
                failure = error
    raise LabError(f"torch.export cannot follow this model: {first_line(failure)}")


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress the messages of torch's exporters."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _onnx(program: torch.export.ExportedProgram, path: Path, about: Record) -> Forward | None:
    with _quietly():
        written = torch.onnx.export(
            program, (), dynamo=True, input_names=["images"], output_names=["logits"], verbose=False
        )
    assert written is not None
    written.model.metadata_props["kalmannorm"] = json.dumps(about)
    written.save(path, external_data=False)
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    import onnxruntime  # type: ignore[import-untyped]

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


def _pt2(program: torch.export.ExportedProgram, path: Path, about: Record) -> Forward:
    with _quietly():
        torch.export.save(program, path, extra_files={"kalmannorm.json": json.dumps(about)})
        module: Forward = torch.export.load(path).module()
    return module


def _weights(model: nn.Module, path: Path, about: Record, again: Callable[[], nn.Module]) -> Forward:
    """Read the weights back into a model that was built and folded again, as a user of the file would do it."""
    state = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    safetensors.torch.save_file(state, path, {"format": "pt", "kalmannorm": json.dumps(about)})
    empty = again()
    empty.load_state_dict(safetensors.torch.load_file(path))
    return empty.eval()


def _again(loaded: Loaded) -> nn.Module:
    return model_of(loaded.run.recipe, loaded.data, loaded.device).to(memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload,no-any-return]


def _test_images(loaded: Loaded, count: int, dtype: torch.dtype) -> Tensor:
    """The first test images, repeated if there are too few."""
    images = next(iter(loaded.data.test_batches(count)))[0].to(dtype)
    return torch.cat([images] * -(-count // len(images)))[:count].contiguous()


def _difference(forward: Forward, own: nn.Module, batches: list[Tensor]) -> float:
    """The largest difference of the logits, relative to the largest logit."""
    worst = 0.0
    for images in batches:
        expected = own(images)
        worst = max(worst, float((forward(images) - expected).abs().max() / expected.abs().max()))
    if not worst < LIMIT:
        raise LabError(f"the exported logits differ by {worst:.1e} of the largest, so nothing was written")
    return worst


@contextmanager
def _arriving(output: Path) -> Iterator[Path]:
    """A temporary path that replaces `output` if no error occurs."""
    partial = output.with_name(f".{output.stem}.partial{output.suffix}")
    try:
        yield partial
        os.replace(partial, output)
    except OSError as error:
        raise LabError(f"cannot write {output}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
