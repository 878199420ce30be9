"""Should I use it? The questions to ask, in order, and the answers."""

from __future__ import annotations

from look import Theme, arrow, box, canvas, drawing
from matplotlib.figure import Figure

RECORDS = ()
QUESTIONS = (
    ("Do 8 or more examples share their statistics?", "Stay with BatchNorm"),
    ("Are there many devices with a fast network?", "SyncBatchNorm is simpler"),
    ("Do you fine-tune, and are frozen statistics accurate enough?", "Stay with frozen BatchNorm"),
    (
        "Can you do without folding, and without BatchNorm weights to start from?",
        "Compare BKN with GroupNorm,\nwith standardized weights too",
    ),
)
LAST = "Convert, train by the recipe or with a closing phase,\nand compare BKN with batch norm on groups"


def draw(theme: Theme) -> Figure:
    step, tall, wide = 1.12, 0.68, 7.0
    height = step * (len(QUESTIONS) + 1) + 0.1
    figure = canvas(theme, 12, height)
    axes = drawing(figure, 12, height)
    for number, (question, answer) in enumerate(QUESTIONS):
        top = 0.15 + step * number
        box(axes, theme, (0.12, top, wide, tall), question, colour=theme.quiet)
        arrow(axes, theme, (wide + 0.17, top + tall / 2), (wide + 1.05, top + tall / 2))
        axes.text(wide + 0.58, top + tall / 2 - 0.09, "yes", ha="center", va="bottom", color=theme.quiet)
        box(axes, theme, (wide + 1.1, top, 11.85 - wide - 1.1, tall), answer, colour=theme.batch, bold=True)
        arrow(axes, theme, (0.12 + wide / 2, top + tall + 0.03), (0.12 + wide / 2, top + step - 0.03))
        axes.text(0.12 + wide / 2 + 0.1, top + (tall + step) / 2, "no", va="center", color=theme.quiet)
    box(axes, theme, (0.12, 0.15 + step * len(QUESTIONS), wide, tall + 0.15), LAST, colour=theme.kalman, bold=True)
    return figure
