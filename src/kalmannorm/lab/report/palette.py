"""The colours of the report, once for the page and for the image files.

Eight series colours per scheme, found by search: any two stay apart (ΔE in Oklab of 10 or more) for full colour vision
and for each of the three dichromacies, and each has a contrast of 3 or more to its background. Dashes and markers tell
series apart without colour.
"""

from __future__ import annotations

LIGHT = ("#082f7d", "#e07000", "#15a88a", "#af64de", "#845605", "#1d7f88", "#551f33", "#535457")
DARK = ("#6198df", "#e45c17", "#a2efd1", "#aa48fc", "#f6c503", "#3bcae7", "#a84d73", "#989898")
DASHES = ("", "", "7 3", "2 2.5", "9 3 2 3", "4 4", "12 4", "1.5 4")
MARKERS = ("circle", "square", "triangle", "diamond")

# Low, middle and high end of the heat maps: diverging around 0, and sequential.
DIVERGING = (("#8c4a00", "#f7f5f2", "#0a3f8f"), ("#f09a3e", "#22262b", "#6aa8f0"))
SEQUENTIAL = (("#f2f5f9", "#6f9bd1", "#0a2f70"), ("#1d232b", "#3f6fae", "#cfe3ff"))

_FIXED = {"bkn": 0, "bn": 1, "gn": 2, "bkn-learned": 3, "brn": 4, "ln": 5, "in": 6}


def colours(methods: list[str]) -> list[int]:
    """A colour for each row: its method's own, or, where that is taken, the next free one."""
    given: list[int] = []
    for method in methods:
        wanted = _FIXED.get(method, 7)
        if wanted in given:
            own = {_FIXED.get(other, 7) for other in methods}
            free = [i for i in range(len(LIGHT)) if i not in given and i not in own]
            free += [i for i in range(len(LIGHT)) if i not in given]
            wanted = free[0] if free else len(given) % len(LIGHT)
        given.append(wanted)
    return given


def css() -> str:
    """The same as custom properties, which follow the page's colour scheme."""
    pairs = [(f"series-{i}", light, dark) for i, (light, dark) in enumerate(zip(LIGHT, DARK, strict=True))]
    for name, (lights, darks) in (("diverging", DIVERGING), ("sequential", SEQUENTIAL)):
        pairs += [(f"{name}-{i}", light, dark) for i, (light, dark) in enumerate(zip(lights, darks, strict=True))]
    lines = "".join(f"  --{name}: light-dark({light}, {dark});\n" for name, light, dark in pairs)
    return f":root {{\n{lines}}}\n"
