"""The page and the image files draw one description: the same ranges, ticks, points, colours and words."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from kalmannorm.lab.report import axes, palette
from kalmannorm.lab.report.charts import Bar, BarGroup, Bars, Cloud, Curves, Heatmap, Lines, Map, Scatter, Series
from kalmannorm.lab.report.plotting import drawing

EPOCHS = [float(epoch) for epoch in range(1, 13)]
STEPS = [14 * epoch for epoch in range(1, 13)]
LOSS = [2.4 * math.exp(-0.4 * epoch) for epoch in EPOCHS]
LAYERS = [f"features.denseblock{i // 6 + 1}.denselayer{i}.norm1" for i in range(50)]
TRAINED = [
    Lines("(64, 64)", [Series("BN", 1, EPOCHS, LOSS, [0.1] * 12, [3] * 12, STEPS)]),
    Lines("(64, 1)", [Series("BKN", 0, EPOCHS[:6], [2.0, None, 0.5, 0.0, 0.2, 0.01], [1.0] * 6, [3] * 6, STEPS[:6])]),
]
SCORES = [
    Lines("population", [Series(f"row {i}", i, [0, 1, 2], [99.0, 98.0, 20.0 + i], [0.1, 3.0, 40.0]) for i in range(9)])
]
CURVES = {
    "loss": Curves(TRAINED, "epoch", "test loss", log=True, settle=0.15),
    "accuracy": Curves(
        SCORES, "setting", "test accuracy, %", ["(64, 64)", "(64, 2)", "(64, 1)"], bounds=(0, 100), aside=True
    ),
    "layers": Curves([Lines("", [Series("BKN", 0, range(50), [0.5] * 50)])], "layer", "gain q", LAYERS),
    "one epoch": Curves([Lines("", [Series("BN", 1, [1.0], [98.8])])], "epoch", "test accuracy, %"),
    "no lines": Curves([Lines("", [])], "epoch", "test loss", log=True),
}
MAP = [[math.sin(row * column) for column in range(40)] for row in range(30)]
HEATMAPS = {
    "gap": Heatmap(
        [Map("BN", MAP, range(40), [str(row) for row in range(30)])], "batch", "channel", "gap", -0.75, 0.75, True
    ),
    "gain": Heatmap([Map("BKN", [[0.5], [None]], [0.5], ["a", "b"])], "epoch", "layer", "gain q", 0.2, 0.9, False),
}
SCATTERS = {
    "variance": Scatter(
        [Cloud("Variance", "prior", "observed", True, [0.2, 30.0, 1.0], [0.1, 2.0, 1.5], [4, 5, 6])], 3
    ),
    "mean": Scatter([Cloud("Mean", "prior", "observed", False, [-2.0, 1.0], [0.5, 2.0], [0, 1])], 12),
}
BARS = {
    "speed": Bars(
        [BarGroup("(64, 1)", [Bar("BN", 1, 9718.0, 300.0, 3, "9,718"), Bar("BKN", 0, 20.0, 50.0, 3, "20")])], "images/s"
    )
}


def same_axis(ax, side: str, axis: dict) -> None:
    """The axis of a matplotlib picture is the axis in the data of the page."""
    low, high = sorted(getattr(ax, f"get_{side}lim")())
    assert (low, high) == pytest.approx((axis["low"], axis["high"]))
    assert getattr(ax, f"get_{side}scale")() == ("log" if axis.get("log") else "linear")
    assert getattr(ax, f"get_{side}label")() == axis["label"]
    labels = [label.get_text() for label in getattr(ax, f"get_{side}ticklabels")()]
    assert list(zip(getattr(ax, f"get_{side}ticks")(), labels, strict=True)) == [tuple(tick) for tick in axis["ticks"]]
    assert len(getattr(ax, f"get_{side}ticks")(minor=True)) == 0


def drawn(chart):
    canvas, panels = drawing(chart, "title")
    page = chart.to_json()
    assert [ax.get_title() for ax in panels] == [panel["title"] for panel in page["panels"]]
    return canvas, list(zip(panels, page["panels"], strict=True)), page


@pytest.mark.parametrize("name", CURVES)
def test_curves_agree(name):
    canvas, panels, page = drawn(CURVES[name])
    across, up = page["across"][0], page["up"][0]
    for ax, panel in panels:
        same_axis(ax, "x", across)
        same_axis(ax, "y", up)
        lines = ax.get_lines()
        assert len(lines) == len(panel["series"])
        for line, series in zip(lines, panel["series"], strict=True):
            x = [across["places"][i] + series.get("shift", 0) for i in series["at"][0]]
            assert list(line.get_xdata()) == pytest.approx(x, rel=1e-4)
            assert list(line.get_ydata()) == pytest.approx(series["y"], rel=1e-4)
            classes, _, marker = palette.looks()[series["colour"]]
            assert f"series-{palette.LIGHT.index(to_hex(line.get_color()))}" in classes.split()
            assert {"o": "circle", "s": "square", "^": "triangle", "D": "diamond", "None": None}[line.get_marker()] == (
                marker if series["marked"] else None
            )
            for y in (*series["y"], *series.get("low", ()), *series.get("high", ())):
                assert up["low"] <= y <= up["high"]
    assert [text.get_text() for text in canvas.legends[0].get_texts()] == [label for label, *_ in page["legend"]]


def test_hollow_markers_are_drawn():
    """Every look, as a series of one point: a line alone would show nothing."""
    series = [Series(f"row {look}", look, [0.0], [90.0 + look]) for look in range(palette.LOOKS)]
    canvas, (ax,) = drawing(Curves([Lines("", series)], "m", "accuracy", ["2"], aside=True), "")
    for legend in canvas.legends:
        legend.remove()
    for line in ax.get_lines():
        line.set_visible(False)
    empty = pixels(canvas)
    for look, line in enumerate(ax.get_lines()):
        line.set_visible(True)
        assert (pixels(canvas) != empty).any(), look
        line.set_visible(False)


def pixels(canvas):
    agg = FigureCanvasAgg(canvas)
    agg.draw()
    return np.asarray(agg.buffer_rgba()).copy()


@pytest.mark.parametrize("name", HEATMAPS)
def test_maps_agree(name):
    canvas, panels, page = drawn(HEATMAPS[name])
    for ax, panel in panels:
        same_axis(ax, "x", panel["across"])
        same_axis(ax, "y", panel["down"])
        (picture,) = ax.get_images()
        assert picture.get_clim() == (page["scale"]["low"], page["scale"]["high"])
        assert picture.get_array().shape == (len(panel["rows"]), len(panel["columns"]))
    same_axis(canvas.axes[-1], "y", page["scale"])


@pytest.mark.parametrize("name", SCATTERS)
def test_scatters_agree(name):
    _, panels, _ = drawn(SCATTERS[name])
    for ax, panel in panels:
        same_axis(ax, "x", panel["across"])
        same_axis(ax, "y", panel["across"] | {"label": panel["up"]})
        points = sorted(map(tuple, ax.collections[0].get_offsets()))
        assert points == pytest.approx(list(zip(panel["x"], panel["y"], strict=True)), rel=1e-4)


def test_bars_agree():
    _, panels, page = drawn(BARS["speed"])
    for ax, panel in panels:
        same_axis(ax, "x", page["across"])
        assert [label.get_text() for label in ax.get_yticklabels()] == [bar["label"] for bar in panel["bars"]]
        assert [bar.get_width() for bar in ax.patches] == [bar["value"] for bar in panel["bars"]]
        assert [text.get_text() for text in ax.texts] == [bar["text"] for bar in panel["bars"]]
        for whisker, bar in zip(ax.collections, panel["bars"], strict=True):
            assert [x for x, _ in whisker.get_segments()[0]] == pytest.approx(bar["reach"])


def test_a_close_up_ignores_the_beginning_and_outliers():
    def up(y: list[float], settle: float = 0.0) -> dict[str, axes.Axis]:
        return Curves([Lines("", [Series("BN", 1, range(len(y)), y)])], "epoch", "accuracy", settle=settle).up

    risen = up([10.0, 60.0, *range(90, 100)], settle=0.15)
    assert risen["whole"].low < 10 and 89 < risen["close-up"].low < 90 and 99 < risen["close-up"].high < 100
    fallen = up([98.0, 97.0, 98.5, 97.5, 98.2, 20.0])
    assert fallen["whole"].low < 20 and 96 < fallen["close-up"].low < 97
    assert list(up([1.0, 2.0, 3.0])) == ["whole"]  # there is nothing to leave out


def test_a_logarithmic_axis_has_no_point_at_0():
    (_, panel) = CURVES["loss"].to_json()["panels"]
    assert panel["series"][0]["y"] == [2, 0.5, 0.2, 0.01] and min(panel["series"][0]["low"]) > 0


RANGES = [(0, 1), (0, 12), (0, 168), (0, 1.2e4), (0, 3.9e5), (98.51, 98.93), (-2.2, 2.6), (1e9, 1e9 + 3), (0, 1e60)]


@pytest.mark.parametrize(("low", "high"), [*RANGES, (-1e60, 1e60), (1e-60, 2e-60), (0.254, 0.376)])
def test_ticks_are_round_different_and_have_room(low, high):
    ticks = axes.steps(low, high)
    values, words = zip(*ticks, strict=True)
    assert 3 <= len(ticks) <= 7 and len(set(words)) == len(words)
    assert all(low <= value <= high * (1 + 1e-9) for value in values)
    gaps = [b - a for a, b in itertools.pairwise(values)]
    assert gaps == pytest.approx([gaps[0]] * len(gaps))
    for value, word in ticks:
        assert float(word.replace("−", "-").replace(",", "")) == pytest.approx(value)
    assert sum(map(len, words)) <= 44  # letters, on the narrowest axis


@pytest.mark.parametrize(("low", "high"), [(0.03, 2.4), (0.09, 14), (1e-60, 1e60), (0.5, 0.6), (1e-7, 1.0), (1e5, 3e5)])
def test_ticks_of_a_logarithmic_axis(low, high):
    ticks = axes.decades(low, high)
    assert 2 <= len(ticks) <= 7
    for value, word in ticks:
        assert low <= value <= high and float(word.replace("−", "-").replace(",", "")) == pytest.approx(value)


def test_an_axis_of_one_value_is_not_empty():
    assert axes.around("", [98.8]).low < 98.8 < axes.around("", [98.8]).high
    assert axes.around("", [1e30]).low < 1e30 and axes.around("", [], log=True).low > 0


def test_columns_that_are_not_even_have_ticks_at_their_values():
    axis = axes.of_columns("epoch", [1, 2, 3, 4, 5, 6, 8, 10, 20])
    assert {words: place for place, words in axis.ticks}["10"] == 7
