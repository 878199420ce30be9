"""Shows a comparison while it runs: a live table in a terminal, else a line per finished run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, JustifyMethod, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kalmannorm._norms.grouped import INFERENCE_MODES
from kalmannorm.lab.comparing.cells import Cell
from kalmannorm.lab.comparing.pool import Listener, Outcome
from kalmannorm.lab.comparing.progress import CellProgress, Progress
from kalmannorm.lab.comparing.summary import Row
from kalmannorm.lab.files.records import Record, Run
from kalmannorm.lab.words.spread import spread
from kalmannorm.lab.words.wording import accuracy, counted, number


class Screen(Listener):
    """Tracks the cells that are trained now; `todo` are these cells. It shows nothing, its subclasses do."""

    def __init__(self, cells: Sequence[Cell], todo: Sequence[Cell], folder: Path, workers: int) -> None:
        self.progress = Progress(cells, workers)
        self.folder = folder
        places = {name: place for place, (name, _) in enumerate(cells)}
        self.worked_on = [self.progress.cells[places[name]] for name, _ in todo]
        waiting = {name for name, _ in todo}
        for cell in self.progress.cells:
            if cell.name not in waiting:
                self._take_result(cell)
        self.kept = self.progress.over

    def started(self, task: int) -> None:
        cell = self.worked_on[task]
        cell.state, cell.started = "running", self.progress.clock()

    def heard(self, task: int, record: Record) -> None:
        self.worked_on[task].hear(record, self.progress.clock())

    def ended(self, task: int, outcome: Outcome) -> None:
        cell = self.worked_on[task]
        cell.seconds = self.progress.clock() - cell.started
        if outcome.kind == "done":
            self._take_result(cell)
        else:
            cell.state, cell.reason = outcome.kind, outcome.reason

    def _take_result(self, cell: CellProgress) -> None:
        result = Run.read(self.folder / cell.name).result
        assert result is not None, f"{cell.name} has no result"
        cell.take(result)


class Lines(Screen):
    """Output for a file or a pipe."""

    def __init__(self, cells: Sequence[Cell], todo: Sequence[Cell], folder: Path, workers: int) -> None:
        super().__init__(cells, todo, folder, workers)
        self.titles = {place: row for row in self.progress.rows for place in row.members}
        if self.kept:
            say(f"{self.kept} of {counted(len(cells), 'run')} already finished")

    def ended(self, task: int, outcome: Outcome) -> None:
        super().ended(task, outcome)
        cell = self.worked_on[task]
        total = len(self.progress.cells)
        row = self.titles[next(place for place, other in enumerate(self.progress.cells) if other is cell)]
        scores = ", ".join(f"{mode} {value:.1f}" for mode, value in cell.accuracy.items())
        what = {"finished": scores, "diverged": f"diverged: {scores}"}.get(cell.state, f"{cell.state} {cell.reason}")
        place = f"{self.progress.over:>{len(str(total))}}/{total}"
        say(f"{place}  {row.title} {row.setting} seed {cell.recipe.seed}: {what}  ({cell.seconds:.1f} s)")

    def interrupted(self) -> None:
        say("interrupted: saving the running runs")


class LiveTable(Screen):
    """Output for a terminal: one row per method and setting."""

    def __init__(
        self, cells: Sequence[Cell], todo: Sequence[Cell], folder: Path, workers: int, console: Console
    ) -> None:
        super().__init__(cells, todo, folder, workers)
        self.console = console
        self.stopping = False
        self.live = Live(self.table(), console=console, auto_refresh=False, transient=True)

    def tick(self) -> None:
        self.live.update(self.table(), refresh=True)

    def interrupted(self) -> None:
        self.stopping = True

    def table(self) -> Table:
        modes = [mode for mode in INFERENCE_MODES if any(mode in cell.accuracy for cell in self.progress.cells)]
        names = ["", "setting", "runs", "epoch", "loss", *modes, "images/s", "left"]
        if self.console.width < 70 + 12 * len(modes):
            names = [name for name in names if name not in ("epoch", "loss", "images/s")]
        table = Table(box=None, pad_edge=False, caption=self._caption(), caption_justify="left", header_style="bold")
        for name in names:
            justify: JustifyMethod = "left" if name in ("", "setting", "runs") else "right"
            table.add_column(name, justify=justify, min_width=10 if name in modes else None, no_wrap=True)
        for row in self._shown():
            line = self._line(row)
            table.add_row(*(line.get(name, "") for name in names))
        return table

    def _shown(self) -> list[Row]:
        """All rows, or as many as fit: first those that run, then those that have ended."""
        room = self.console.height - 4
        if len(self.progress.rows) <= room:
            return self.progress.rows

        def urgency(row: Row) -> int:
            cells = self.progress.of(row)
            if any(cell.state == "running" for cell in cells):
                return 0
            return 1 if all(cell.over for cell in cells) else 2

        chosen = {id(row) for row in sorted(self.progress.rows, key=urgency)[: max(room, 1)]}
        return [row for row in self.progress.rows if id(row) in chosen]

    def _line(self, row: Row) -> dict[str, RenderableType]:
        """The content of a row, by column."""
        cells = self.progress.of(row)
        ended = [cell for cell in cells if cell.state in ("finished", "diverged")]
        running = [cell for cell in cells if cell.state == "running"]
        heard = [cell for cell in running if cell.first is not None]
        line: dict[str, RenderableType] = {"": row.title, "setting": row.setting, "runs": _bar(cells)}
        if heard:
            line |= {"epoch": f"{heard[-1].epoch:.1f}", "loss": f"{heard[-1].loss:.3f}"}
        for mode in INFERENCE_MODES:
            found = spread(cell.accuracy.get(mode) for cell in ended or running)
            if found is not None:  # dim until a run has ended: not a result yet
                line[mode] = Text(accuracy(found), style="" if ended else "dim")
        speed = spread(cell.images_per_second for cell in heard or ended)
        if speed is not None:
            line["images/s"] = number(speed.mean, 0)
        line["left"] = _left(running, self.progress.clock()) or _verdict(cells)
        return line

    def _caption(self) -> Text:
        total = len(self.progress.cells)
        parts = [f"{self.progress.over} of {counted(total, 'run')}"]
        if self.kept:
            parts.append(f"{self.kept} already finished")
        rest = self.progress.remaining()
        if self.stopping:
            parts.append("saving; press Ctrl-C again to stop without saving")
        elif rest is not None:
            parts.append(f"about {_clock(rest)} left")
        return Text(", ".join(parts), style="dim")


def _bar(cells: Sequence[CellProgress]) -> ProgressBar:
    broken = any(cell.state in ("failed", "diverged") for cell in cells)
    style = "red" if broken else "green"
    done = sum(1.0 if cell.over else cell.fraction for cell in cells)
    return ProgressBar(len(cells), done, width=8, complete_style=style, finished_style=style)


def _left(running: Sequence[CellProgress], now: float) -> str:
    rests = [rest for cell in running if (rest := cell.remaining(now)) is not None]
    if rests:
        return _clock(max(rests))
    return "starts" if running else ""


def _verdict(cells: Sequence[CellProgress]) -> str:
    for state in ("failed", "diverged"):
        count = sum(cell.state == state for cell in cells)
        if count:
            return state if count == len(cells) else f"{count} {state}"
    return "done" if all(cell.over for cell in cells) else ""


def _clock(seconds: float) -> str:
    """ "0:45", "3:20" or "2:05:00". The width stays constant during the countdown."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def say(line: str) -> None:
    """Print to standard error, for people."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def screen(
    cells: Sequence[Cell], todo: Sequence[Cell], folder: Path, *, workers: int, quiet: bool = False
) -> Iterator[Screen]:
    """The output that fits standard error. Standard output is reserved for results."""
    if quiet:
        yield Screen(cells, todo, folder, workers)
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines(cells, todo, folder, workers)
        return
    shown = LiveTable(cells, todo, folder, workers, console)
    with shown.live:
        yield shown
