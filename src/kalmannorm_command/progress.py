"""Output of a single run: a progress bar with loss, accuracy, images/s and time left, then the result."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kalmannorm.lab.errors import first_rank
from kalmannorm.lab.files.records import Record
from kalmannorm.lab.recipes.recipe import Recipe
from kalmannorm.lab.words.naming import row_name
from kalmannorm.lab.words.wording import counted


class Bar:
    """Shows the events of `train`: a live bar on a terminal, one line per evaluation elsewhere, nothing if `quiet`."""

    def __init__(self, title: str, *, quiet: bool = False) -> None:
        self.quiet = quiet or not first_rank()
        self.console = Console(stderr=True)
        self.live = not self.quiet and self.console.is_terminal
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[values]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.live,
        )
        self.task: TaskID = self.progress.add_task(title, total=None, values="")

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.progress.stop()

    def __call__(self, event: Record) -> None:
        if event["event"] in ("progress", "train"):
            values = (
                f"loss {event['loss']:.3f}  accuracy {event['accuracy']:.1f} %  {event['images_per_second']:.0f} img/s"
            )
            self.progress.update(self.task, completed=event["step"], total=event["steps"], values=values)
        elif event["event"] == "fuse":
            self.say(event["text"])
        elif event["event"] == "evaluate":
            scores = "  ".join(f"{mode} {found['accuracy']:.1f} %" for mode, found in event["modes"].items())
            self.say(f"epoch {event['epoch']:g}: {scores}")

    def say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def crowded() -> str | None:
    """A hint if other processes keep the cores busy. Threads that wait for each other are slow then."""
    cores, threads = os.cpu_count() or 1, torch.get_num_threads()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if threads == 1 or torch.cuda.is_available() or load + threads <= 1.5 * cores:
        return None
    return (
        f"this machine has {cores} cores and a load of {load:.1f}, and torch uses {threads} threads; "
        "--threads 1 may be many times as fast on a busy machine"
    )


def result_table(recipe: Recipe, result: Record, folder: Path) -> None:
    """Print the result on stdout, on rank 0 only."""
    if not first_rank():
        return
    console = Console(file=sys.stdout)
    table = Table()
    for heading in ("inference", "accuracy %", "loss"):
        table.add_column(heading, justify="left" if heading == "inference" else "right")
    for mode, accuracy in result["accuracy"].items():
        loss = result["loss"][mode]
        table.add_row(mode, f"{accuracy:.2f}", "–" if loss is None else f"{loss:.4f}")
    # A title of the table would be wrapped at the width of the table.
    title = f"{recipe.model}, {row_name(recipe)}, {counted(result['epochs'], 'epoch')}"
    console.print(title, highlight=False, soft_wrap=True)
    console.print(table)
    speed = result["images_per_second"] or 0
    console.print(
        f"{counted(result['steps'], 'step')} in {result['seconds']:.1f} s, {speed:.0f} images/s, "
        f"{result['parameters']:,} parameters; in {folder}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
