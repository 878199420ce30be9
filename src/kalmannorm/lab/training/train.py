"""Trains one run: loop, log, checkpoints, and resuming after an interruption.

Every random choice depends only on the seed and the position (epoch, step). A checkpoint holds the remaining state. So
a resumed run ends with the same weights as an uninterrupted one, bit for bit.
"""

from __future__ import annotations

import math
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kalmannorm._model.closing import ClosingPhase
from kalmannorm._model.convert import wiring
from kalmannorm._model.fusion import Fusion
from kalmannorm._model.optimization import gains
from kalmannorm._model.recalibrate import finish_on_population
from kalmannorm._model.settings import freeze_statistics
from kalmannorm.lab.errors import DivergedError, Interrupted, LabError
from kalmannorm.lab.files import checkpoint, manifest
from kalmannorm.lab.files.lock import locked
from kalmannorm.lab.files.records import (
    Record,
    Run,
    as_json,
    describe,
    forget_measurements,
    full_disks_told,
    usable,
    write_atomically,
    write_protected,
)
from kalmannorm.lab.files.resuming import resumable
from kalmannorm.lab.machine import memory
from kalmannorm.lab.machine.devices import on_threads
from kalmannorm.lab.machine.origin import origin
from kalmannorm.lab.recipes import fitting
from kalmannorm.lab.recipes.methods import method
from kalmannorm.lab.recipes.recipe import Execution, Recipe
from kalmannorm.lab.training import device, launcher
from kalmannorm.lab.training.averages import Average
from kalmannorm.lab.training.evaluate import Scores, evaluate, evaluation_batch, prepared
from kalmannorm.lab.training.interrupt import Signals
from kalmannorm.lab.training.loading import data_of, fused, model_of, steps_of
from kalmannorm.lab.training.logbook import Logbook, Watch
from kalmannorm.lab.training.meeting import lost_ranks_told
from kalmannorm.lab.training.optimizer import learning_rate, optimizer_of, set_learning_rate
from kalmannorm.lab.training.step import Step
from kalmannorm.lab.training.stopwatch import Stopwatch

PATIENCE = 60.0
"""Seconds that a restart waits until the old processes have ended. Launchers kill them after 30."""


def train(
    recipe: Recipe,
    folder: Path,
    execution: Execution | None = None,
    *,
    resume: bool = False,
    watch: Watch | None = None,
) -> Record:
    """Train a run into a folder and return its result, which is also in `folder/result.json`.

    With `resume` the run continues from the last checkpoint, or starts if there is none. A finished run stays
    unchanged. Under a launcher that repeats commands (torchrun, a requeued Slurm job) `resume` is always on. `watch` is
    called with every log event, and with "progress" a few times per second.

    After a SIGINT or SIGTERM a checkpoint is saved and `Interrupted` is raised. If the loss becomes NaN, the result is
    written and `DivergedError` is raised.
    """
    recipe, execution = recipe.checked(), (execution or Execution()).checked()
    _, ranks = fitting.checked(recipe, execution)  # before complaints about the folder
    usable(folder)
    resume = resume or launcher.repeats_commands()
    # Several ranks look later, in `Training.begin`, when no process of an earlier start can write any more.
    if ranks == 1 and (result := _found(recipe, folder, resume=resume)) is not None:
        return result
    with (
        full_disks_told(folder),
        lost_ranks_told(),
        on_threads(execution.threads),
        device.determinism(recipe.deterministic),
    ):
        training = Training(recipe, folder, execution, watch)
        try:
            return training.begin(resume=resume) or training.run()
        except (MemoryError, RuntimeError) as error:
            if not memory.ran_out(error):
                raise
            raise LabError(
                f"out of memory at step {training.done}: give --micro-batch, a smaller multiple of the statistics "
                f"batch {recipe.statistics_batch}"
            ) from error
        finally:
            training.close()


def _found(recipe: Recipe, folder: Path, *, resume: bool) -> Record | None:
    """The result if the folder has one. Raises if this run can neither start nor be resumed in the folder."""
    if not (folder / "recipe.json").exists():
        if checkpoint.checkpoints(folder):
            raise LabError(
                f"{folder} holds checkpoints of a run without its recipe.json: delete it, or give another --out"
            )
        return None
    run = Run.read(folder)
    if not resume:
        if run.finished:
            raise LabError(f"{folder} holds a finished run: give another --out, or delete it")
        raise LabError(f"{folder} holds an unfinished run: resume it with --resume {folder}, or give another --out")
    if name := recipe.differs_in(run.recipe):
        raise LabError(
            f"{folder} holds a run of another recipe, with {name} {getattr(run.recipe, name)} instead of "
            f"{getattr(recipe, name)}: give another --out"
        )
    result = run.result
    if result is not None and "model.safetensors" in manifest.entries(folder):
        manifest.verified(folder, "model.safetensors", run.remedy("it and result.json"))
    if result is not None and result.get("diverged"):
        raise DivergedError(f"the run in {folder} diverged at step {result.get('steps')}; that is its result")
    return result


class Training:
    """A run in progress, after `done` of `steps` optimizer steps."""

    def __init__(self, recipe: Recipe, folder: Path, execution: Execution, watch: Watch | None) -> None:
        self.recipe, self.folder, self.execution, self.watch = recipe, folder, execution, watch
        fabric = self.fabric = device.launched(recipe, execution)
        self.first = fabric.global_rank == 0
        self.data = data_of(recipe, fabric.device, execution)
        self.per_epoch = self.data.train_size // recipe.gradient_batch
        self.steps = steps_of(recipe, self.data)
        self.warmup = round(recipe.warmup_epochs * self.per_epoch)
        self.finish = self.steps - round(recipe.finish_epochs * self.per_epoch)
        self.bare = model_of(recipe, self.data, fabric.device)
        if execution.fuse:
            self.bare = fused(self.bare, recipe, self.data.shape)
            if self.first and watch is not None:
                watch({"event": "fuse", "text": _told(self.bare, recipe)})
        self.phase = _closing(self.bare, recipe, self.steps)
        model: Any = torch.compile(self.bare) if execution.compile else self.bare
        self.model, self.optimizer = fabric.setup(model, optimizer_of(self.bare, recipe))
        self.averages = {name: Average(fabric.device) for name in ("loss", "accuracy")}
        self.stopwatch = Stopwatch()
        self.done = 0
        self.logged = 0, 0.0
        """Steps and seconds at the last log event."""
        self.speeds: list[float] = []
        self.step = Step(fabric, self.model, recipe, execution)
        if self.phase is not None:
            self.phase.scaler = getattr(fabric.strategy.precision, "scaler", None)
        if fabric.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(fabric.device)  # do not count building the model
        self._open = ExitStack()

    def begin(self, *, resume: bool) -> Record | None:
        """Lock the folder and restore the last checkpoint. Returns the result if the run is already finished."""
        result = self._take(resume)
        if result is not None:
            return result
        offset = self._restore()
        steps = self.fabric.all_gather(torch.tensor(self.done, device=self.fabric.device))
        if len(reached := sorted(set(torch.as_tensor(steps).flatten().tolist()))) > 1:
            raise LabError(
                f"the ranks find different checkpoints in {self.folder}, of steps {', '.join(map(str, reached))}: "
                "give an --out on a disk that all ranks share"
            )
        if self.first:
            self._describe()
            forget_measurements(self.folder)
        self.logbook = Logbook(
            self.folder if self.first else None,
            self.watch,
            step=self.done,
            offset=offset,
            tensorboard=self.execution.tensorboard,
        )
        self._open.callback(self.logbook.close)
        return None

    def _take(self, resume: bool) -> Record | None:
        """Rank 0 locks the folder and looks for a result. All ranks get the same result or raise the same error."""
        found: Record | LabError | None = None
        if self.first:
            try:
                self._open.enter_context(locked(self.folder, PATIENCE if launcher.repeats_commands() else 0))
                found = _found(self.recipe, self.folder, resume=resume)
            except LabError as error:
                found = error
        found = self.fabric.broadcast(found)
        if isinstance(found, LabError):
            raise found
        return found

    def close(self) -> None:
        self._open.close()

    def run(self) -> Record:
        with Signals() as signals:
            while self.done < self.steps:
                self.model.train()
                with self.stopwatch.running():
                    self._epoch(signals)
            return self._finished(diverged=False)

    def _describe(self) -> None:
        if not (self.folder / "recipe.json").is_file():
            ran = {**vars(self.execution), "ranks": self.fabric.world_size, "device": str(self.fabric.device)}
            about = origin("lightning-fabric", "torchmetrics", "torchvision")
            describe(self.folder, self.recipe, ran, about)
        if method(self.recipe.method).to == "kalman":
            write_atomically(self.folder / "wiring.svg", wiring(self.bare).svg().encode())

    def _epoch(self, signals: Signals) -> None:
        """Train to the end of the current epoch, or to the end of the training."""
        recipe = self.recipe
        log_every = self.execution.log_every or max(self.per_epoch // 10, 1)
        save_every = self.execution.save_every or self.per_epoch
        evaluate_every = max(round(recipe.evaluate_every * self.per_epoch), 1) if recipe.evaluate_every else self.steps
        epoch, start = divmod(self.done, self.per_epoch)
        batches = self.data.train_batches(
            recipe.gradient_batch,
            seed=recipe.seed,
            epoch=epoch,
            start=start,
            augment=recipe.augment,
            rank=self.fabric.global_rank,
            ranks=self.fabric.world_size,
        )
        for images, labels in batches:
            if self.done == self.finish:
                with self.stopwatch.paused():
                    self._finish_on_population()
            self._train_on(prepared(images, recipe), labels)
            last = self.done == self.steps
            if self.done % log_every == 0 or last:
                self._log()
            elif self.logbook.due():
                self.logbook.progress(**self._position(), **self._since_logged())
            stop = signals.stop(self.fabric)
            with self.stopwatch.paused():
                if self.done % evaluate_every == 0 and not last:
                    self._evaluate()
                if self.done % save_every == 0 or stop or last:
                    self._save()
            if last:
                return
            if stop:
                raise Interrupted(
                    f"saved at step {self.done} of {self.steps}; resume with: kalmannorm train --resume {self.folder}"
                )

    def _train_on(self, images: Tensor, labels: Tensor) -> None:
        # Dropout depends on the step alone, so a resumed run draws the same numbers.
        torch.manual_seed(((self.recipe.seed * 1_000_003 + self.done) * 1_009 + self.fabric.global_rank) % 2**63)
        set_learning_rate(self.optimizer, learning_rate(self.recipe, self.done, self.steps, self.warmup))
        try:
            loss, accuracy = self.step(images, labels)
        except ValueError as error:  # from batch norm: a group has a single value per channel, as on a 1×1 map
            raise LabError(f"{self.recipe.model} cannot be trained at {self.recipe.setting}: {error}") from error
        self.optimizer.step()
        if self.phase is not None:
            before = self.phase.begun, self.phase.settled
            self.phase.step()
            if (self.phase.begun, self.phase.settled) != before:
                self.step.recapture()  # the norms run in another way from now on
        self.averages["loss"].update(loss)
        self.averages["accuracy"].update(100 * accuracy)
        self.done += 1

    def _finish_on_population(self) -> None:
        size = evaluation_batch(self.recipe, self.execution.micro_batch)
        loader = (prepared(images, self.recipe) for images, _ in self.data.plain_batches(size))
        finish_on_population(self.bare, loader, progress=False)
        self.step.recapture()
        self.model.train()

    def _position(self) -> Record:
        return {"step": self.done, "steps": self.steps, "epoch": round(self.done / self.per_epoch, 4)}

    def _since_logged(self) -> Record:
        """Averages of this rank since the last log event. Waits for the device."""
        values = {name: average.of_this_rank() for name, average in self.averages.items()}
        step, seconds = self.logged
        images = (self.done - step) * self.recipe.gradient_batch
        return {**values, "images_per_second": round(images / max(self.stopwatch.seconds - seconds, 1e-9), 2)}

    def _log(self) -> None:
        values = self._since_logged()
        for name, average in self.averages.items():
            values[name] = average.of_all_ranks()
            average.reset()
        seconds = self.stopwatch.seconds
        self.speeds.append(values["images_per_second"])
        self.logged = self.done, seconds
        rate = learning_rate(self.recipe, self.done - 1, self.steps, self.warmup)
        self.logbook.write("train", **self._position(), **values, learning_rate=rate, seconds=round(seconds, 4))
        if not math.isfinite(values["loss"]):
            with self.stopwatch.paused():
                self._finished(diverged=True)
            raise DivergedError(
                f"the loss is {values['loss']} at step {self.done} of {self.steps}; the result is kept as diverged in "
                f"{self.folder}; a lower --learning-rate or a --warmup may help"
            )

    def _evaluate(self) -> Scores:
        scores = evaluate(
            self.bare,
            self.data,
            self.recipe,
            batch=evaluation_batch(self.recipe, self.execution.micro_batch),
            rank=self.fabric.global_rank,
            ranks=self.fabric.world_size,
            wrapped=self.model,
        )
        where = {"step": self.done, "epoch": self._position()["epoch"]}
        self.logbook.write("evaluate", **where, modes=scores)
        if method(self.recipe.method).to == "kalman":
            self.logbook.write("gains", **where, gains=gains(self.bare))
        return scores

    def _finished(self, *, diverged: bool) -> Record:
        scores = self._evaluate()
        cuda = self.fabric.device.type == "cuda"
        result: Record = {
            "accuracy": {mode: found["accuracy"] for mode, found in scores.items()},
            "loss": {mode: found["loss"] for mode, found in scores.items()},
            "test_images": self.data.test_size,
            "steps": self.done,
            "epochs": self._position()["epoch"],
            "seconds": round(self.stopwatch.seconds, 3),
            "images_per_second": statistics.median(self.speeds) if self.speeds else None,
            "parameters": sum(parameter.numel() for parameter in self.bare.parameters()),
            "peak_memory": torch.cuda.max_memory_allocated(self.fabric.device) if cuda else None,
            "gains": gains(self.bare) if method(self.recipe.method).to == "kalman" else {},
            "diverged": diverged or not all(math.isfinite(found["loss"]) for found in scores.values()),
        }
        if self.phase is not None:
            self.phase.remove()  # the finished model needs none of its state
        if self.first:
            end = {"model.safetensors": checkpoint.weights(self.bare), "result.json": as_json(result)}
            write_protected(self.folder, end, {"log.jsonl": self.logbook.written()})
            checkpoint.discard(self.folder)
        self.fabric.barrier()
        return result

    def _save(self) -> None:
        averages = {name: average.sums_of_ranks(self.fabric) for name, average in self.averages.items()}
        if self.first:
            state = {
                "step": self.done,
                "optimizer": self.optimizer.state_dict(),
                "precision": self.fabric.strategy.precision.state_dict(),
                "averages": averages,
                "logged": list(self.logged),
                "speeds": self.speeds,
                "seconds": self.stopwatch.seconds,
                "log": self.logbook.written(),
            }
            checkpoint.save(self.folder, self.done, self.bare, state)
        self.fabric.barrier()

    def _restore(self) -> int:
        """Restore the last checkpoint, if there is one. Returns the size of the log at it."""
        state = checkpoint.newest(self.folder, self._load)
        if state is None:
            return 0
        for name, sums in state["averages"].items():
            self.averages[name].restore(sums, self.fabric)
        self.done, self.speeds, self.stopwatch.seconds = state["step"], state["speeds"], state["seconds"]
        self.logged = state["logged"][0], state["logged"][1]
        if self.done > self.finish:
            freeze_statistics(self.bare)
        return int(state["log"]["bytes"])

    def _load(self, folder: Path) -> Record:
        """Load weights and optimizer of a checkpoint, and return the rest of its state."""
        if self.phase is not None:
            self.phase.load_state_dict({"done": checkpoint.step_of(folder)})  # its state is part of the weights
        checkpoint.load_weights(folder / "model.safetensors", self.bare)
        return resumable(folder, self.recipe, self.steps, self.optimizer, self.fabric.strategy.precision)


def _closing(model: nn.Module, recipe: Recipe, steps: int) -> ClosingPhase | None:
    start, end = recipe.closing_start, recipe.closing_end
    if start is None:
        return None
    end = min(start + 0.3, 1.0) if end is None else end
    return ClosingPhase(
        model,
        steps,
        start=start,
        end=end,
        momentum=0.1 if recipe.statistics_momentum is None else recipe.statistics_momentum,
        fade_prior=recipe.fade_prior,
        present=recipe.closing_present or 0.0,
    )


def _told(model: nn.Module, recipe: Recipe) -> str:
    """The effect of --fuse, in one line."""
    fusion: Fusion | None = getattr(model, "fusion", None)
    if fusion is None:
        return f"--fuse has no effect on {method(recipe.method).title}: it uses torch's own norms"
    return str(fusion).splitlines()[0]
