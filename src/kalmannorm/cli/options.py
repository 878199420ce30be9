"""Options that several commands share: those of a recipe, and those of its execution.

A command takes them as two arguments, `changes` (what was given of a recipe) and `execution`, and the decorators here
spell them out on the command line:

    @recipe_options
    @execution_options
    def train(dataset: …, *, changes: dict[str, Any], execution: Execution) -> None: …
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kalmannorm.lab.recipes.presets import PRESETS
from kalmannorm.lab.recipes.recipe import Execution

OWN = "the data set's own"
THREADS = "CPU threads; 1 is often quickest for a small net, above all where others use the machine."

_RECIPE: list[tuple[str, type, str, str]] = [
    ("epochs", float, "--epochs", "Passes over the training set; a fraction is fine."),
    ("optimizer", str, "--optimizer", "sgd (Nesterov) or adamw."),
    ("learning_rate", float, "--learning-rate", "At its peak; it scales with the gradient batch unless given."),
    ("momentum", float, "--momentum", "Of sgd."),
    ("weight_decay", float, "--weight-decay", "Of all but norms and the filter."),
    ("schedule", str, "--schedule", "Of the learning rate: cosine, linear, step (a tenth at 1/2 and 3/4) or constant."),
    ("warmup_epochs", float, "--warmup", "Epochs in which the learning rate rises from 0."),
    ("label_smoothing", float, "--label-smoothing", "0.1 for ImageNet, as a rule."),
    ("precision", str, "--precision", "float32, bf16 or fp16 (mixed), float64."),
    ("channels_last", bool, "--channels-last/--no-channels-last", "Memory format; faster on most devices."),
    ("augment", bool, "--augment/--no-augment", "Crops and flips of the training images."),
    ("image_size", int, "--image-size", "Resize images to this many pixels."),
    ("gain", float, "--gain", "Where the trust q in the mini-batch starts, between 0 and 1 (BKN)."),
    ("train_examples", int, "--train-examples", "Use only so many training images."),
    ("test_examples", int, "--test-examples", "Use only so many test images."),
    ("evaluate_every", float, "--evaluate-every", "Epochs between evaluations; 0: at the end only."),
    ("finish_epochs", float, "--finish-epochs", "Train the last epochs on frozen population statistics."),
    ("pretrained", bool, "--pretrained/--no-pretrained", "Start from torchvision's or timm's weights."),
    ("deterministic", bool, "--deterministic/--no-deterministic", "Allow deterministic kernels only."),
]
_EXECUTION: list[tuple[str, type, str, str]] = [
    ("device", str, "--device", "auto, cpu, cuda or cuda:1."),
    ("threads", int, "--threads", THREADS),
    ("micro_batch", int, "--micro-batch", "Examples per forward, where memory is short; the numbers stay the same."),
    ("fuse", bool, "--fuse/--no-fuse", "Norm, sum and ReLU in one pass (bn, brn, bkn, bkn-learned); other rounding."),
    ("compile", bool, "--compile/--no-compile", "torch.compile the model."),
    ("cuda_graph", bool, "--cuda-graph/--no-cuda-graph", "Run each step as a CUDA graph: for small nets on a GPU."),
    ("workers", int, "--workers", "Processes that read an image folder."),
    ("data_root", Path, "--data-root", "Where data sets are kept; see kalmannorm data list."),
    ("save_every", int, "--save-every", "Steps between checkpoints."),
    ("log_every", int, "--log-every", "Steps between events of the log."),
    ("tensorboard", bool, "--tensorboard/--no-tensorboard", "Write TensorBoard event files."),
]


_UNSET = {
    "gain": "0.5 of bkn, 0.9 of bkn-learned",
    "image_size": OWN,
    "train_examples": "all",
    "test_examples": "all",
    "threads": "as torch sees fit",
    "micro_batch": "the gradient batch",
    "data_root": "$KALMANNORM_DATA, else kalmannorm in the cache folder",
    "save_every": "once per epoch",
    "log_every": "ten times per epoch",
}
"""What None stands for."""


def recipe_options(command: Callable[..., Any], **defaults: str) -> Callable[..., Any]:
    """Adds the options of a recipe; the command gets those that were given as `changes`.

    `defaults` are what its help says where it has others than the data sets.
    """
    return _spelled_out(command, _RECIPE, "changes", "Training", lambda given: given, _recipe_defaults() | defaults)


def execution_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of an execution, which the command gets as `execution`."""

    def gather(given: dict[str, Any]) -> Execution:
        return Execution(**given)

    return _spelled_out(command, _EXECUTION, "execution", "How it runs", gather, _execution_defaults())


def given_execution_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same options, of which the command gets those that were given, as a dict."""
    return _spelled_out(command, _EXECUTION, "execution", "How it runs", lambda given: given, _execution_defaults())


def _recipe_defaults() -> dict[str, str]:
    """Where every data set has the same, that; docs/data.md has a table of the rest."""
    recipes = list(PRESETS.values())
    values = {name: {getattr(recipe, name) for recipe in recipes} for name, *_ in _RECIPE}
    shown = {name: _shown(name, found.pop()) if len(found) == 1 else OWN for name, found in values.items()}
    return shown | {"learning_rate": f"{shown['learning_rate']} at {OWN} gradient batch, a hundredth with adamw"}


def _execution_defaults() -> dict[str, str]:
    return {field.name: _shown(field.name, field.default) for field in dataclasses.fields(Execution)}


def _shown(name: str, value: Any) -> str:
    if value is None:
        return _UNSET[name]
    if isinstance(value, bool):
        flag = name.replace("_", "-")
        return flag if value else f"no-{flag}"
    return value if isinstance(value, str) else f"{value:g}"


def _spelled_out(
    command: Callable[..., Any],
    options: Sequence[tuple[str, type, str, str]],
    argument: str,
    panel: str,
    gather: Callable[[dict[str, Any]], Any],
    defaults: Mapping[str, str],
) -> Callable[..., Any]:
    signature = inspect.signature(command, eval_str=True)
    names = [name for name, *_ in options]

    @functools.wraps(command)
    def spelled_out(**values: Any) -> Any:
        given = {name: value for name in names if (value := values.pop(name)) is not None}
        return command(**values, **{argument: gather(given)})

    kept = [parameter for parameter in signature.parameters.values() if parameter.name != argument]
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                kind | None, typer.Option(flag, help=f"{text} [default: {defaults[name]}]", rich_help_panel=panel)
            ],
        )
        for name, kind, flag, text in options
    ]
    spelled_out.__signature__ = signature.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
    spelled_out.__annotations__ = {}
    del spelled_out.__wrapped__
    return spelled_out
