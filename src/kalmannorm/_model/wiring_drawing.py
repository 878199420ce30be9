"""An SVG drawing of who feeds whom: norms in layers from top to bottom, with an arrow from every source.

Colours are attributes, so that the file works alone. Elements also have classes, so that the style sheet of a page can
give them other colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_ROW, _GAP, _HEIGHT, _LETTER, _LANE, _TOP = 46, 18, 24, 6.4, 14, 92
_COLOURS = {"wired": ("#e0f2e9", "#2f855a"), "alone": ("#fff4de", "#b7791f")}
_LEGEND = (("wired", "has a prior, from the norms before it"), ("alone", "no prior: hover to see why"))


def draw(title: str, summary: str, norms: Sequence[tuple[str, int, list[str], str | None]]) -> str:
    """`norms` are (name, channels, sources, why there is no prior), in the order in which they run."""
    level: dict[str, int] = {}
    for name, _, sources, _ in norms:
        level[name] = max((level[source] + 1 for source in sources if source in level), default=0)
    rows: dict[int, list[int]] = {}
    for index, (name, _, _, _) in enumerate(norms):
        rows.setdefault(level[name], []).append(index)
    widths = [max(70.0, _LETTER * (len(name) + len(str(channels)) + 3)) for name, channels, _, _ in norms]
    total = max(sum(widths[i] + _GAP for i in row) for row in rows.values()) + 2 * _GAP
    legend = sum(_LETTER * len(words) + 2 * _GAP for _, words in _LEGEND)
    total = max(total + 2 * _LANE * max(rows) ** 0.5, _LETTER * 1.25 * len(summary), legend + _GAP)
    place: dict[str, tuple[float, float]] = {}
    for depth, row in rows.items():
        x = (total - sum(widths[i] + _GAP for i in row)) / 2
        for i in row:
            place[norms[i][0]] = (x + widths[i] / 2, _TOP + depth * _ROW)
            x += widths[i] + _GAP
    height = _TOP + (max(rows) + 1) * _ROW - _GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {total:.0f} {height:.0f}" font-family="ui-monospace, Menlo, Consolas, monospace" '
        'font-size="10.5">',
        '<rect width="100%" height="100%" class="ground" fill="#ffffff"/>',
        '<defs><marker id="tip" markerWidth="7" markerHeight="7" refX="6" refY="3" orient="auto">'
        '<path d="M0,0 L6,3 L0,6 z" class="feeds-tip" fill="#8a94a6"/></marker></defs>',
        f'<text x="{_GAP}" y="24" class="words" font-size="14" font-weight="bold" fill="#1f2937">'
        f"{escape(title)}</text>",
        f'<text x="{_GAP}" y="41" class="quiet" fill="#4b5563">{escape(summary)}</text>',
        *_legend(),
    ]
    edges = {
        depth: _edges([place[norms[i][0]][0] for i in row], [widths[i] for i in row]) for depth, row in rows.items()
    }
    for name, _, sources, _ in norms:
        for source in filter(place.__contains__, sources):  # others are outside of the model
            between = [edges[depth] for depth in range(level[source] + 1, level[name]) if depth in edges]
            parts.append(_arrow(place[source], place[name], between))
    for (name, channels, _, reason), width in zip(norms, widths, strict=True):
        parts.append(_box(place[name], width, name, channels, reason))
    return "\n".join([*parts, "</svg>"])


def _legend() -> list[str]:
    """The meaning of the two colours, on one line under the summary."""
    parts, x = [], float(_GAP)
    for kind, words in _LEGEND:
        fill, line = _COLOURS[kind]
        parts.append(
            f'<rect x="{x:.1f}" y="52" width="12" height="10" rx="2" class="{kind}" fill="{fill}" stroke="{line}"/>'
            f'<text x="{x + 18:.1f}" y="61" class="quiet" fill="#4b5563">{words}</text>'
        )
        x += _LETTER * len(words) + 2 * _GAP
    return parts


def _edges(centres: list[float], widths: list[float]) -> tuple[float, float]:
    """The left and the right edge of a row."""
    return centres[0] - widths[0] / 2, centres[-1] + widths[-1] / 2


def _arrow(start: tuple[float, float], end: tuple[float, float], between: list[tuple[float, float]]) -> str:
    (x1, y1), (x2, y2) = start, end
    y1, y2 = y1 + _HEIGHT / 2, y2 - _HEIGHT / 2
    c1, c2 = x1, x2
    if between:
        # Go around the rows between, on the shorter side. A cubic covers three quarters of the way to its handles.
        lane = _LANE * len(between) ** 0.5
        left, right = min(row[0] for row in between) - lane, max(row[1] for row in between) + lane
        side = left if x1 + x2 - 2 * left < 2 * right - x1 - x2 else right
        c1, c2 = x1 + (side - x1) * 4 / 3, x2 + (side - x2) * 4 / 3
    return (
        f'<path d="M{x1:.1f},{y1:.1f} C{c1:.1f},{y1 + 18:.1f} {c2:.1f},{y2 - 18:.1f} {x2:.1f},{y2:.1f}" '
        'class="feeds" fill="none" stroke="#8a94a6" stroke-opacity="0.75" marker-end="url(#tip)"/>'
    )


def _box(centre: tuple[float, float], width: float, name: str, channels: int, reason: str | None) -> str:
    x, y = centre
    kind = "wired" if reason is None else "alone"
    fill, line = _COLOURS[kind]
    note = "wired" if reason is None else f"no prior: {reason}"
    return (
        f"<g><title>{escape(name)}: {escape(note)}</title>"
        f'<rect x="{x - width / 2:.1f}" y="{y - _HEIGHT / 2:.1f}" width="{width:.1f}" height="{_HEIGHT}" rx="5" '
        f'class="{kind}" fill="{fill}" stroke="{line}"/>'
        f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" class="words" fill="#1f2937">{escape(name)} '
        f'<tspan class="quiet" fill="#6b7280">{channels}</tspan></text></g>'
    )
