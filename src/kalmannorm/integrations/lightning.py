"""`Trainer(callbacks=[KalmanCallback(...)])` of Lightning: converts, closes, recalibrates and logs.

Lightning calls `setup` before it restores a checkpoint, builds the optimizers and wraps the model for several devices.
So the model is converted there.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from kalmannorm._model.norm_classes import batch_norms
from kalmannorm._model.recalibrate import Forward
from kalmannorm._model.settings import norms
from kalmannorm.integrations.following import Closing, Data, Following

Stage = Literal["validation", "test"]
STAGES: tuple[Stage, ...] = ("validation", "test")


class KalmanCallback(Callback):
    """Converts the model of a LightningModule to Kalman norms, recalibrates before evaluation, and logs figures.

    It logs `kalman/gain`, the mean gain, and `kalman/variance_gap`, the mean gap between the variances of a training
    batch and the population variances. Both are those of the last batch of each epoch.

    Args:
        example_input: the input of the converted module. None takes `example_input_array` of the LightningModule.
        module: name of the submodule to convert. None takes the only child with batch norms; "" takes the whole
            LightningModule.
        recalibrate_on: batches, or a function that returns them. The population statistics are computed from them
            before each evaluation. None: no recalibration.
        before: the evaluations that recalibration comes before: "validation", "test" or both.
        recalibrate_batches: the most batches for it. None takes all.
        forward: `forward(module, batch)` runs the module on such a batch. The default takes the first element.
        closing: two shares of the training, such as (0.3, 0.6). Between them `kalmannorm.ClosingPhase` lets the norms
            go over to their running statistics. Or a dict of its options, for fine-tuning
            `{"start": 0, "end": 0, "present": 0.5}`. None: no closing phase.
        per_layer: log the gain and the gap of every norm too.
        **options: options of `kalmannorm.convert`, such as `statistics_batch_size=2`.
    """

    def __init__(
        self,
        example_input: Any = None,
        *,
        module: str | None = None,
        recalibrate_on: Data | None = None,
        before: Collection[Stage] = STAGES,
        recalibrate_batches: int | None = None,
        forward: Forward | None = None,
        closing: Closing | None = None,
        per_layer: bool = False,
        **options: Any,
    ) -> None:
        unknown = [stage for stage in ([before] if isinstance(before, str) else before) if stage not in STAGES]
        if unknown or isinstance(before, str):
            raise ValueError(f"before must be a tuple with 'validation', 'test' or both, got {before!r}")
        self.module, self.before = module, tuple(before)
        self.following = Following(
            example_input, recalibrate_on, recalibrate_batches, forward, per_layer, closing, options
        )

    def converted(self, lightning_module: LightningModule) -> nn.Module:
        """The module that is, or will be, converted."""
        whole: nn.Module = lightning_module
        if self.module is not None:
            return whole.get_submodule(self.module)
        parts = {name: part for name, part in whole.named_children() if batch_norms(part) or [*norms(part)]}
        if len(parts) != 1:
            found = f"{len(parts)} of them: {', '.join(parts)}" if parts else "none"
            raise ValueError(
                f"KalmanCallback: module must name the part of {type(whole).__name__} to convert, because "
                f"not exactly one child has batch norms ({found}); module='' converts the whole LightningModule"
            )
        return next(iter(parts.values()))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        given = self.following.example_input
        if given is None:
            given = pl_module.example_input_array
        if given is None:
            raise ValueError(
                "KalmanCallback: example_input must be given, or set example_input_array in the LightningModule"
            )
        self.following.prepare(self.converted(pl_module), given)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        steps, done = trainer.estimated_stepping_batches, trainer.global_step
        self.following.begin(self.converted(pl_module), steps, done, scaler)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.following.finish()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.is_last_batch:
            self.following.gaps.start(self.converted(pl_module))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.following.stepped(trainer.global_step)
        if trainer.is_last_batch:
            self.following.gaps.stop()
            pl_module.log_dict(self.following.figures(self.converted(pl_module)), on_step=False, on_epoch=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if "validation" in self.before and not trainer.sanity_checking:
            self.following.recalibrate(self.converted(pl_module))

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if "test" in self.before:
            self.following.recalibrate(self.converted(pl_module))
