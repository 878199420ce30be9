"""Options that several commands share: those of a recipe, and those of its execution.

A command has two arguments for them, `changes` (the recipe options that were given) and `execution`. The decorators
here replace both arguments by one command-line option for each field:

    @recipe_options
    @execution_options
    def compare(dataset: …, *, changes: dict[str, Any], execution: Execution) -> None: …

Defaults are written out here, because the classes that define them import torch. A test compares both.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

if TYPE_CHECKING:
    from kalmannorm.lab.recipes.recipe import Execution

OWN = "depends on the data set"
THREADS = "CPU threads. 1 is often fastest for a small net, above all on a shared machine."
THREADS_DEFAULT = "torch decides"


CLUSTER = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="Train the runs on the workers of a Dask cluster: the address of its scheduler, or its scheduler file. "
        "[default: this machine]",
    ),
]


class Shared(NamedTuple):
    """An option that sets the field `name` of a recipe or an execution. `default` is the text that the help shows."""

    name: str
    kind: type
    flag: str
    help: str
    default: str


RECIPE = [
    Shared("epochs", float, "--epochs", "Passes over the training set. May be a fraction.", OWN),
    Shared("optimizer", str, "--optimizer", "sgd (with Nesterov momentum) or adamw.", "sgd"),
    Shared(
        "learning_rate",
        float,
        "--learning-rate",
        "Peak learning rate.",
        "0.1 at the data set's gradient batch, in proportion at others; a hundredth of that with adamw",
    ),
    Shared("momentum", float, "--momentum", "Momentum of sgd.", "0.9"),
    Shared("weight_decay", float, "--weight-decay", "Weight decay of all but norms and the Kalman filter.", OWN),
    Shared(
        "schedule",
        str,
        "--schedule",
        "Learning rate schedule: cosine, linear, step (divides by 10 at 1/2 and 3/4 of the training) or constant.",
        OWN,
    ),
    Shared("warmup_epochs", float, "--warmup", "Epochs of linear learning rate warm-up.", "0"),
    Shared("label_smoothing", float, "--label-smoothing", "Label smoothing. 0.1 is common on ImageNet.", "0"),
    Shared("precision", str, "--precision", "float32, bf16 (mixed), fp16 (mixed) or float64.", "float32"),
    Shared(
        "channels_last",
        bool,
        "--channels-last/--no-channels-last",
        "Memory format. channels_last is faster on most devices.",
        "no-channels-last",
    ),
    Shared("augment", bool, "--augment/--no-augment", "Randomly crop and flip the training images.", "augment"),
    Shared("image_size", int, "--image-size", "Resize the images to this many pixels per side.", OWN),
    Shared(
        "gain",
        float,
        "--gain",
        "Initial gain q of BKN, between 0 and 1: how far a norm trusts the mini-batch.",
        "0.5 with bkn, 0.9 with bkn-learned",
    ),
    Shared("train_examples", int, "--train-examples", "Use only this many training images.", "all"),
    Shared("test_examples", int, "--test-examples", "Use only this many test images.", "all"),
    Shared("evaluate_every", float, "--evaluate-every", "Epochs between evaluations. 0: only at the end.", "1"),
    Shared(
        "finish_epochs",
        float,
        "--finish-epochs",
        "Train this many last epochs with frozen population statistics.",
        "0",
    ),
    Shared(
        "closing_start",
        float,
        "--closing-start",
        "Share of training at which norms begin to go over to their running statistics (ClosingPhase).",
        "no closing phase",
    ),
    Shared("closing_end", float, "--closing-end", "Share of training at which they have.", "0.3 after the start"),
    Shared(
        "closing_present",
        float,
        "--closing-present",
        "Share of the present forward in the gradients of the closing phase; 0.5 helps fine-tuning.",
        "0",
    ),
    Shared(
        "fade_prior",
        bool,
        "--fade-prior/--no-fade-prior",
        "Let the priors of BKN fade while the closing phase begins.",
        "no-fade-prior",
    ),
    Shared(
        "statistics_momentum",
        float,
        "--statistics-momentum",
        "Weight of one step in running statistics; use less for true batches of a few examples.",
        "0.1",
    ),
    Shared(
        "pretrained",
        bool,
        "--pretrained/--no-pretrained",
        "Start from the pretrained weights of torchvision or timm.",
        "no-pretrained",
    ),
    Shared(
        "deterministic",
        bool,
        "--deterministic/--no-deterministic",
        "Use deterministic kernels only.",
        "no-deterministic",
    ),
]
EXECUTION = [
    Shared("device", str, "--device", "auto, cpu, cuda or a numbered GPU such as cuda:1.", "auto"),
    Shared("threads", int, "--threads", THREADS, THREADS_DEFAULT),
    Shared(
        "micro_batch",
        int,
        "--micro-batch",
        "Examples per forward pass. Smaller values save memory and change results only by rounding.",
        "the gradient batch",
    ),
    Shared(
        "fuse",
        bool,
        "--fuse/--no-fuse",
        "Fuse each norm with the sum and ReLU after it (bn, brn, bkn, bkn-learned). Changes rounding.",
        "no-fuse",
    ),
    Shared("compile", bool, "--compile/--no-compile", "Compile the model with torch.compile.", "no-compile"),
    Shared(
        "cuda_graph",
        bool,
        "--cuda-graph/--no-cuda-graph",
        "Capture each step as a CUDA graph. Faster for small nets on a GPU.",
        "no-cuda-graph",
    ),
    Shared("workers", int, "--workers", "Processes that read the images of an image folder.", "4"),
    Shared(
        "data_root",
        Path,
        "--data-root",
        "Folder of the data sets. See kalmannorm data list.",
        "$KALMANNORM_DATA, or kalmannorm in the user's cache folder",
    ),
    Shared("save_every", int, "--save-every", "Steps between checkpoints.", "one epoch"),
    Shared("log_every", int, "--log-every", "Steps between log events.", "a tenth of an epoch"),
    Shared("tensorboard", bool, "--tensorboard/--no-tensorboard", "Write TensorBoard event files.", "tensorboard"),
]


def recipe_options(command: Callable[..., Any], **defaults: str) -> Callable[..., Any]:
    """Add the options of a recipe. The command gets those that were given, as `changes`.

    `defaults` replaces the defaults that the help shows, for a command that has others.
    """
    return _with_options(command, RECIPE, "changes", "Training", lambda given: given, defaults)


def execution_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of an execution. The command gets an `Execution`, as `execution`."""

    def gather(given: dict[str, Any]) -> Execution:
        from kalmannorm.lab.recipes.recipe import Execution

        return Execution(**given)

    return _with_options(command, EXECUTION, "execution", "Execution", gather, {})


def given_execution_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the same options. The command gets those that were given, as a dict `execution`."""
    return _with_options(command, EXECUTION, "execution", "Execution", lambda given: given, {})


def _with_options(
    command: Callable[..., Any],
    options: Sequence[Shared],
    argument: str,
    panel: str,
    gather: Callable[[dict[str, Any]], Any],
    defaults: Mapping[str, str],
) -> Callable[..., Any]:
    # typer needs evaluated annotations. `Execution` is not imported here, and its parameter is replaced anyway.
    signature = inspect.signature(command, locals={"Execution": Any}, eval_str=True)

    @functools.wraps(command)
    def with_options(**values: Any) -> Any:
        given = {each.name: value for each in options if (value := values.pop(each.name)) is not None}
        return command(**values, **{argument: gather(given)})

    kept = [parameter for parameter in signature.parameters.values() if parameter.name != argument]
    added = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                each.kind | None,
                typer.Option(
                    each.flag,
                    help=f"{each.help} [default: {defaults.get(each.name, each.default)}]",
                    rich_help_panel=panel,
                ),
            ],
        )
        for each in options
    ]
    with_options.__signature__ = signature.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
    with_options.__annotations__ = {}
    del with_options.__wrapped__
    return with_options
