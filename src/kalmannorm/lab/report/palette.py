"""The looks of series and the colours of maps, for the page and for the image files.

Each scheme, light and dark, has eight series colours. They were found by search. Any two of them differ (ΔE in Oklab of
10 or more) for full colour vision and for each of the three dichromacies. Each has a contrast of 3 or more to its
background. Dashes and markers tell series apart without colour. From the ninth series on, colours repeat, but hollow
and with another dash and marker. Other modules call the number of such a look its colour.
"""

from __future__ import annotations

import itertools

LIGHT = ("#082f7d", "#e07000", "#15a88a", "#af64de", "#845605", "#1d7f88", "#551f33", "#535457")
DARK = ("#6198df", "#e45c17", "#a2efd1", "#aa48fc", "#f6c503", "#3bcae7", "#a84d73", "#989898")
DASHES = ("", "", "7 3", "2 2.5", "9 3 2 3", "4 4", "12 4", "1.5 4")
MARKERS = ("circle", "square", "triangle", "diamond")

# Low end, middle and high end of the heat maps, for the light and the dark scheme.
DIVERGING = (("#8c4a00", "#f7f5f2", "#0a3f8f"), ("#f09a3e", "#22262b", "#6aa8f0"))
SEQUENTIAL = (("#f2f5f9", "#6f9bd1", "#0a2f70"), ("#1d232b", "#3f6fae", "#cfe3ff"))

_FIXED = {"bkn": 0, "bn": 1, "gn": 2, "bkn-learned": 3, "brn": 4, "ln": 5, "in": 6, "mabn": 7}
_FIXED |= {"on": 8, "gn-ws": 9, "bkn-ws": 10, "bn-ws": 11}


LOOKS = 64
"""The number of looks. All differ in colour, dash or marker, and the first 24 in colour or filling."""


def shade(colour: int) -> str:
    """The colour on white."""
    return LIGHT[colour % len(LIGHT)]


def filled(colour: int) -> tuple[str, float]:
    """The colour and the opacity inside a marker or a bar, on white."""
    return shade(colour), (1.0, 0.0, 0.4)[filling(colour)]


def dash(colour: int) -> str:
    again, own = divmod(colour, len(LIGHT))
    return DASHES[(own + 3 * again) % len(DASHES)]


def marker(colour: int) -> str:
    again, own = divmod(colour, len(LIGHT))
    return MARKERS[(own + again) % len(MARKERS)]


def filling(colour: int) -> int:
    """0 is full, 1 hollow, 2 half."""
    return colour // len(LIGHT) % 3


def classes(colour: int) -> str:
    """The CSS classes of this look."""
    return f"series-{colour % len(LIGHT)}" + (f" filling-{filling(colour)}" if filling(colour) else "")


def looks() -> list[tuple[str, str, str]]:
    """Classes, dash and marker of every look, for the page's script."""
    return [(classes(i), dash(i), marker(i)) for i in range(LOOKS)]


def colours(methods: list[str]) -> list[int]:
    """A different look for each row. The first row of a method has the look of the method. Further rows have a colour
    that no method here has. When none is left, they have the colour of the method, hollow, or any free look."""
    own = {method: _FIXED.get(method, 7) for method in methods}
    plain = [i for i in range(len(LIGHT)) if i not in own.values()]
    given: list[int] = []
    for method in methods:
        choices = itertools.chain([own[method]], plain, [own[method] + len(LIGHT)], itertools.count(len(LIGHT)))
        given.append(next(i for i in choices if i not in given))
    return given


def css() -> str:
    """The colours as custom properties, which follow the colour scheme of the page."""
    pairs = [(f"series-{i}", light, dark) for i, (light, dark) in enumerate(zip(LIGHT, DARK, strict=True))]
    for name, (lights, darks) in (("diverging", DIVERGING), ("sequential", SEQUENTIAL)):
        pairs += [(f"{name}-{i}", light, dark) for i, (light, dark) in enumerate(zip(lights, darks, strict=True))]
    lines = "".join(f"  --{name}: light-dark({light}, {dark});\n" for name, light, dark in pairs)
    return f":root {{\n{lines}}}\n"
