"""Options that several commands share: those of a recipe, and those of its execution.

A command takes them as two arguments, `changes` (what was given of a recipe) and `execution`, and the decorators here
spell them out on the command line:

    @recipe_options
    @execution_options
    def train(dataset: …, *, changes: dict[str, Any], execution: Execution) -> None: …
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kalmannorm.lab.recipe import Execution

_RECIPE: list[tuple[str, type, str, str]] = [
    ("epochs", float, "--epochs", "Passes over the training set; a fraction is fine."),
    ("optimizer", str, "--optimizer", "sgd (Nesterov) or adamw."),
    ("learning_rate", float, "--learning-rate", "At its peak. It scales with the gradient batch unless given."),
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
    ("micro_batch", int, "--micro-batch", "Examples per forward, where memory is short; the numbers stay the same."),
    ("fuse", bool, "--fuse/--no-fuse", "Norm, sum and ReLU in one pass (bn, brn, bkn, bkn-learned); same numbers."),
    ("compile", bool, "--compile/--no-compile", "torch.compile the model."),
    ("cuda_graph", bool, "--cuda-graph/--no-cuda-graph", "Run each step as a CUDA graph: for small nets on a GPU."),
    ("workers", int, "--workers", "Processes that read an image folder."),
    ("data_root", Path, "--data-root", "Where data sets are kept; see kalmannorm data list."),
    ("save_every", int, "--save-every", "Steps between checkpoints; once per epoch unless given."),
    ("log_every", int, "--log-every", "Steps between events of the log; ten per epoch unless given."),
    ("tensorboard", bool, "--tensorboard/--no-tensorboard", "Write TensorBoard event files."),
]


def recipe_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of a recipe; the command gets those that were given as `changes`."""
    return _spelled_out(command, _RECIPE, "changes", "Training", lambda given: given)


def execution_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of an execution, which the command gets as `execution`."""
    return _spelled_out(command, _EXECUTION, "execution", "How it runs", lambda given: Execution(**given))


def given_execution_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same options, of which the command gets those that were given, as a dict."""
    return _spelled_out(command, _EXECUTION, "execution", "How it runs", lambda given: given)


def _spelled_out(
    command: Callable[..., Any],
    options: Sequence[tuple[str, type, str, str]],
    argument: str,
    panel: str,
    gather: Callable[[dict[str, Any]], Any],
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
            annotation=Annotated[kind | None, typer.Option(flag, help=text, rich_help_panel=panel)],
        )
        for name, kind, flag, text in options
    ]
    spelled_out.__signature__ = signature.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
    spelled_out.__annotations__ = {}
    del spelled_out.__wrapped__
    return spelled_out
