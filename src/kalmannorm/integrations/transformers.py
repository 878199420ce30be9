"""`Trainer(callbacks=[KalmanCallback(...)])` of Hugging Face: converts, recalibrates and logs.

The trainer calls `on_init_end` before it builds the optimizer and loads a checkpoint. So the model is converted there.
Accelerate needs nothing of this: convert the model before `accelerator.prepare`.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from kalmannorm._model.recalibrate import Forward
from kalmannorm._model.settings import norms
from kalmannorm.integrations.following import Closing, Data, Following


def _with_names(model: nn.Module, batch: Any) -> object:
    """Run a model of transformers on a batch: a dict of its arguments. Labels are not needed."""
    return model(**{name: value for name, value in batch.items() if name != "labels"})


class KalmanCallback(TrainerCallback):
    """Converts the trainer's model to Kalman norms, recalibrates before each evaluation, and logs figures.

    `kalman/gain` and `kalman/variance_gap`, as in the callback for Lightning, are added to the trainer's logs. The
    callbacks that report to TensorBoard or other services run before this one. To report the figures there too, use
    `report_to="none"` and pass their callback after this one.

    Args:
        example_input: the model's input, for example {"pixel_values": torch.randn(2, 3, 224, 224)}.
        recalibrate_on: batches, or a function that returns them. The population statistics are computed from them
            before each evaluation during training. None: no recalibration.
        recalibrate_batches: the most batches for it. None takes all.
        forward: `forward(model, batch)` runs the model on such a batch. The default calls `model(**batch)` without
            labels.
        closing: two shares of the training, such as (0.3, 0.6). Between them `kalmannorm.ClosingPhase` lets the norms
            go over to their running statistics. Or a dict of its options, for fine-tuning
            `{"start": 0, "end": 0, "present": 0.5}`. None: no closing phase.
        per_layer: log the gain and the gap of every norm too.
        **options: options of `kalmannorm.convert`, such as `statistics_batch_size=2`.
    """

    def __init__(
        self,
        example_input: Any,
        *,
        recalibrate_on: Data | None = None,
        recalibrate_batches: int | None = None,
        forward: Forward | None = None,
        closing: Closing | None = None,
        per_layer: bool = False,
        **options: Any,
    ) -> None:
        forward = forward or _with_names
        self.following = Following(
            example_input, recalibrate_on, recalibrate_batches, forward, per_layer, closing, options
        )

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.following.prepare(kwargs["model"], self.following.example_input)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not any(norms(kwargs["model"])):
            raise ValueError(
                "KalmanCallback: it came too late to convert the model; pass it to Trainer(callbacks=[...]), not to "
                "add_callback"
            )
        if self.following.closing is not None and args.fp16:
            raise ValueError(
                "KalmanCallback: closing does not work with fp16, because the trainer's GradScaler cannot be reached; "
                "use bf16=True"
            )
        self.following.begin(kwargs["model"], state.max_steps, state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.following.finish()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        epoch = max(round(state.max_steps / max(state.num_train_epochs, 1)), 1)
        if (state.global_step + 1) % min(max(int(state.logging_steps), 1), epoch) == 0:
            self.following.gaps.start(kwargs["model"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.following.gaps.stop()
        self.following.stepped(state.global_step)
        self._before_evaluation(control, kwargs["model"])

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._before_evaluation(control, kwargs["model"])

    def _before_evaluation(self, control: TrainerControl, model: nn.Module) -> None:
        if control.should_evaluate:  # the trainer's own callback has decided this already
            self.following.recalibrate(model)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if "loss" in kwargs["logs"]:  # of training, not of an evaluation
            figures = self.following.figures(kwargs["model"])
            kwargs["logs"].update(figures)
            state.log_history[-1].update(figures)
