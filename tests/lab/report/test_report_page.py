"""The page in a real browser: it draws, answers to mouse, finger and keys, fits a phone, and runs nobody's code."""

from __future__ import annotations

import math
import shutil
import statistics
from pathlib import Path

import pytest

from kalmannorm.lab.files.records import read_json, write_json
from kalmannorm.lab.recipes.recipe import Recipe
from kalmannorm.lab.report import write
from kalmannorm.lab.report.collecting import collect
from kalmannorm.lab.report.comparison import chapters
from kalmannorm.lab.report.page import content
from kalmannorm.lab.report.plotting import drawing
from support.report_runs import LAYERS, METHOD_NAMES, SETTINGS, accuracies, make_comparison, make_experiment, make_run

api = pytest.importorskip("playwright.sync_api", reason="the test extra brings playwright")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium here: apt-get install chromium")

HOSTILE = '</script><img src=x onerror="window.pwned=1">'


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("report")
    made = {
        "demo": write([make_comparison(folder / "demo")], folder / "demo.html"),
        "experiment": write([make_experiment(folder / "experiment")], folder / "experiment.html"),
    }
    with pytest.MonkeyPatch.context() as patch:  # files to link to, without the time to draw them
        patch.setattr("kalmannorm.lab.report.plotting.images", lambda chart, title: {"png": b"", "svg": b""})
        made["linked"] = write([folder / "demo"], folder / "linked.html", figures=folder / "linked-figures")
    for epochs in (1, 4, 12):  # more rows than colours
        for method in METHOD_NAMES:
            one = Recipe(method=method, statistics_batch=1, epochs=epochs)
            make_run(folder / "many" / f"{one.name}-{epochs}", one)
    make_run(folder / "many" / "gain", Recipe(method="bkn-learned", statistics_batch=1, epochs=12, gain=0.8))
    made["many"] = write([folder / "many"], folder / "many.html")
    once = Recipe(method="bn", statistics_batch=1, epochs=1)
    make_run(folder / "once" / once.name, once)
    made["once"] = write([folder / "once"], folder / "once.html")
    hostile = make_experiment(folder / "hostile", seeds=1)
    # A slash cannot be in a folder's name.
    make_run(hostile / HOSTILE.replace("/", "-"), Recipe(dataset=HOSTILE, model=HOSTILE, epochs=12, statistics_batch=2))
    record = read_json(hostile / "experiment.json")
    record |= {"title": HOSTILE, "question": HOSTILE, "notes": [HOSTILE]}
    record["tables"][0] |= {"title": HOSTILE, "columns": [HOSTILE] * 5, "rows": [[HOSTILE] * 5]}
    record["figures"][0] |= {"title": HOSTILE, "groups": [record["figures"][0]["groups"][0] | {"label": HOSTILE}]}
    write_json(hostile / "experiment.json", record)
    made["hostile"] = write([hostile], folder / "hostile.html")
    return made


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=BROWSER)
        yield started
        started.close()


@pytest.fixture
def opened(browser, pages):
    """Opens a page, and at the end demands that nothing was complained of and nothing asked for."""
    contexts, complaints = [], []

    def open_page(name: str = "demo", width: int = 1280, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: request.url != pages[name].as_uri() and complaints.append(request.url))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.goto(pages[name].as_uri())
        page.wait_for_selector("html[data-ready=yes]", state="attached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def figure(page, title: str):
    return page.locator("figure").filter(has=page.locator("h4", has_text=title))


def tooltip(page) -> dict[str, str]:
    """What it says, by label; nothing where it is hidden."""
    rows = page.locator("#tip:visible .row")
    return {row.locator(".label").inner_text(): row.locator(".value").inner_text() for row in rows.all()}


def boxes(node, shapes: str) -> list[list[float]]:
    """Left, right, top and bottom of every such shape in a node, in the window; in one go, which is quicker."""
    return node.evaluate(
        """(node, shapes) => [...node.querySelectorAll(shapes)].map((shape) => {
            const box = shape.getBoundingClientRect();
            return [box.left, box.right, box.top, box.bottom];
        })""",
        shapes,
    )


def point_at(page, plot, x: float, y: float = 0.5) -> None:
    """The mouse, at these shares of a plot's width and height."""
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])


@pytest.mark.parametrize("name", ["demo", "experiment"])
def test_every_figure_is_drawn(opened, name):
    page = opened(name)
    figures = page.locator("figure").all()
    assert len(figures) >= 7
    for one in figures:
        drawn = boxes(one, "polyline.line[points*=' '], circle.spot, rect.fill, canvas.cells")
        assert drawn, one.locator("h4").inner_text()
        assert all(right - left + bottom - top > 1 for left, right, top, bottom in drawn)
    # A map is not one flat colour.
    colours = (
        figure(page, "ariance")
        .first.locator("canvas.cells")
        .first.evaluate(
            "c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size"
        )
    )
    assert colours > 20


TICKS = """(plot) => {
    const along = plot.querySelector(".across .axis");
    const [width, height] = [Number(along.getAttribute("x2")), Number(along.getAttribute("y1"))];
    const left = (tick) => Number(tick.getAttribute("x") ?? tick.getAttribute("transform").match(/[\\d.]+/)[0] - 4);
    const top = (tick) => tick.getAttribute("y") - 3.5;
    return {
        across: [...plot.querySelectorAll(".across .tick")].map((tick) => [tick.textContent, left(tick) / width]),
        up: [...plot.querySelectorAll(".up .tick")].map((tick) => [tick.textContent, 1 - top(tick) / height]),
    };
}"""
"""Words and places of all ticks of a plot, the places as shares of the axis."""


def test_ticks_lie_where_the_image_files_have_them(opened, pages):
    page = opened()
    figures = content(chapters(collect([pages["demo"].parent / "demo"])), []).figures
    kinds = set()
    for node, one in zip(page.locator("figure").all(), figures, strict=True):
        _, chart = one.charts[one.start]
        if chart.kind == "bars":  # without ticks
            continue
        kinds.add(chart.kind)
        _, panels = drawing(chart, one.title)
        for plot, ax in zip(node.locator(".canvas").all(), panels, strict=True):
            seen, place = plot.evaluate(TICKS), ax.transScale + ax.transLimits
            corner = (ax.get_xlim()[1], ax.get_ylim()[1])
            for side, axis, here in ((0, ax.xaxis, seen["across"]), (1, ax.yaxis, seen["up"])):
                spots = [tuple(v if i == side else corner[i] for i in (0, 1)) for v in axis.get_ticklocs()]
                shares = [place.transform(spot)[side] for spot in spots]
                assert here and [words for words, _ in here] == [text.get_text() for text in axis.get_ticklabels()]
                assert [share for _, share in here] == pytest.approx(shares, abs=1e-6)
    assert kinds == {"curves", "heatmap", "scatter"}


def test_a_hover_shows_mean_and_spread_of_the_seeds(opened):
    page = opened()
    plot = figure(page, "Accuracy against setting").locator(".canvas").first
    assert tooltip(page) == {}
    point_at(page, plot, 0.97)  # the last setting, (64, 1), in population mode
    seeds = [accuracies("bn", 1, seed)["population"] for seed in range(3)]
    assert tooltip(page)["BN"] == f"{statistics.fmean(seeds):.1f} ± {statistics.stdev(seeds):.1f}"
    assert "(64, 1)" in page.locator("#tip .title").inner_text()
    values = [float(value.split()[0]) for value in tooltip(page).values()]
    assert len(values) == 5 and values == sorted(values, reverse=True)
    page.mouse.move(2, 2)
    assert tooltip(page) == {}


def test_the_dots_of_a_hover_lie_on_the_markers(opened):
    page = opened()
    plot = figure(page, "Accuracy against setting").locator(".canvas").first
    point_at(page, plot, 0.97)
    dots, markers = (
        [((left + right) / 2, (top + bottom) / 2) for left, right, top, bottom in boxes(plot, shapes)]
        for shapes in (".dot", ".point")
    )
    assert len(dots) == 5
    for x, y in dots:
        assert min(math.hypot(x - a, y - b) for a, b in markers) < 1.5


def test_axes_hold_all_of_every_curve_and_whisker(opened):
    """BN at (64, 1) has the lowest mean, the longest whisker, and the worst first epochs."""
    page = opened()
    for title, shapes in (("Accuracy against setting", ".whisker"), ("along training", ".band, .line")):
        plots = figure(page, title).first.locator(".canvas").all()
        for plot in plots:
            (_, _, _, axis), *_ = boxes(plot, "line.axis")
            ((_, _, highest, _),) = boxes(plot, "svg[aria-hidden]")
            drawn = boxes(plot, f":is({shapes})")
            assert drawn and all(highest <= top and bottom <= axis + 0.5 for _, _, top, bottom in drawn)


def test_a_close_up_leaves_out_the_first_epochs_and_cuts_them(opened):
    page = opened()
    training = figure(page, "along training").first
    training.get_by_role("button", name="example").click()  # where nothing ends at chance level
    ticks = training.locator(".panel").first.locator("text.tick[text-anchor=end]")
    whole = [float(words) for words in ticks.all_text_contents()]
    assert training.locator("svg.inside").count() == 0
    training.get_by_role("button", name="close-up").click()
    assert min(float(words) for words in ticks.all_text_contents()) > min(whole)
    for plot in training.locator("svg.inside").all():
        assert plot.evaluate("node => getComputedStyle(node).overflow") == "hidden"
    assert training.locator("svg.inside").count() == len(SETTINGS)


def test_links_to_images_follow_the_choices(opened, pages):
    page = opened("linked")
    gap = figure(page, "moving average")

    def files() -> list[str]:
        return [link.get_attribute("href") for link in gap.locator(".files a:visible").all()]

    assert files()[0].endswith("/variance-gap-64-1-features-8.png")  # as the page opens
    gap.get_by_role("button", name="(64, 2)").click()
    assert [name.rpartition("-")[2] for name in files()] == ["8.png", "8.svg", "gap.csv"] and "64-2" in files()[0]
    for name in files():
        assert (pages["linked"].parent / name).is_file()
    gap.get_by_label("Layer").select_option("features.4")  # which has no image
    assert [name.rpartition(".")[2] for name in files()] == ["csv"]


def test_a_hover_over_a_map_reads_that_cell_in_every_map(opened, pages):
    page = opened()
    gap = figure(page, "moving average")
    gap.get_by_label("Layer").select_option("features.4")
    gap.get_by_role("button", name="(64, 2)").click()
    cells = gap.locator("canvas.cells").nth(1)
    point_at(page, cells, 10.5 / 40, 3.5 / LAYERS["features.4"])  # channel 3, batch 10
    assert "channel 3, batch 10" in page.locator("#tip .title").inner_text()
    folder = pages["demo"].parent / "demo"
    for label, method in (("BN", "bn"), ("BKN", "bkn")):
        record = read_json(folder / f"digits-net-{method}-64x2-s0" / "analysis" / "variance-gap.json")
        value = next(layer for layer in record["layers"] if layer["name"] == "features.4")["gap"][3][10]
        assert float(tooltip(page)[label].replace("−", "-")) == pytest.approx(value, abs=6e-4)


def test_keys_read_a_plot_aloud(opened):
    page = opened()
    for one in page.locator("figure").all():
        plot = one.locator(".canvas").first
        plot.focus()
        page.keyboard.press("ArrowRight")
        first = page.locator("#spoken").inner_text()
        assert tooltip(page) and all(value in first for value in tooltip(page).values())
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowDown")
        assert page.locator("#spoken").inner_text() != first
        page.keyboard.press("Escape")
        assert tooltip(page) == {}


def test_a_finger_reads_a_plot(opened):
    page = opened(width=375, has_touch=True)
    plot = figure(page, "Accuracy against setting").locator(".canvas").first
    plot.tap()
    assert len(tooltip(page)) == 5
    box = page.locator("#tip").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 375


def test_the_legend_hides_a_line_and_the_choices_change_the_chart(opened):
    page = opened()
    training = figure(page, "along training").first
    lines = training.locator(".panels polyline.line")
    before = lines.count()
    button = training.get_by_role("button", name="BN", exact=True)
    button.click()
    assert button.get_attribute("aria-pressed") == "false" and lines.count() == before - len(SETTINGS)
    point_at(page, training.locator(".canvas").first, 0.6)
    assert "BN" not in tooltip(page) and "BKN" in tooltip(page)
    training.get_by_role("button", name="loss").click()
    assert training.locator("text.label", has_text="test loss").count() == len(SETTINGS)
    training.get_by_role("button", name="step").click()
    point_at(page, training.locator(".canvas").first, 0.99)
    assert "step 168" in page.locator("#tip .title").inner_text()
    assert "BN" not in tooltip(page)  # what was hidden stays hidden


def test_click_and_enter_sort_a_table(opened):
    page = opened()
    table = page.locator("table").first
    head = table.locator("thead tr").nth(1).locator("th").nth(6)  # (64, 1), population

    def column() -> list[float]:
        return [float(cell) for cell in table.locator("tbody tr td:nth-child(8) .mean").all_inner_texts()]

    before = column()
    assert before != sorted(before, reverse=True)
    head.get_by_role("button").click()
    assert column() == sorted(before, reverse=True) and head.get_attribute("aria-sort") == "descending"
    head.get_by_role("button").press("Enter")
    assert column() == sorted(before) and head.get_attribute("aria-sort") == "ascending"
    assert table.locator("[aria-sort]").count() == 1
    for _ in range(2):  # GN has no `batch`: it stays last in either order
        table.locator("thead tr").nth(1).locator("th").nth(7).get_by_role("button").click()
        assert table.locator("tbody tr").last.locator("th").inner_text() == "GN"
    table.get_by_role("button", name="Method").click()
    assert table.locator("tbody th").all_inner_texts() == ["BN", "BRN", "GN", "BKN", "BKN learned"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_two_rows_look_alike(opened, scheme):
    page = opened("many", color_scheme=scheme)
    rows = len(METHOD_NAMES) * 3 + 1
    legend = figure(page, "Gain along depth").locator(".legend svg")
    assert legend.count() == 7  # BKN and BKN learned
    assert len({node.inner_html() + node.evaluate("n => n.parentNode.className") for node in legend.all()}) == 7
    look = "node => ['backgroundColor', 'backgroundImage', 'borderTop'].map((p) => getComputedStyle(node)[p]).join()"
    swatches = page.locator("table").first.locator("tbody .swatch")
    assert len({swatch.evaluate(look) for swatch in swatches.all()}) == swatches.count() == rows
    look = "node => ['fill', 'fillOpacity', 'stroke'].map((p) => getComputedStyle(node)[p]).join()"
    bars = page.locator("figure", has_text="Images per second").locator("rect.fill")
    assert len({bar.evaluate(look) for bar in bars.all()}) == bars.count() == rows


@pytest.mark.parametrize("width", [1300, 390])
def test_names_of_bars_are_whole_and_inside(opened, width):
    page = opened("many", width=width)
    for one in page.locator("figure", has=page.locator("rect.fill")).all():
        box = one.bounding_box()
        assert "BKN learned, q₀ by default, 12 epochs" in one.locator("text.tick").all_text_contents()
        for left, right, _, _ in boxes(one, "text.tick"):
            assert left >= box["x"] and right <= box["x"] + box["width"]
    if width == 1300:
        table = page.locator(".scroll").first
        assert table.evaluate("box => box.scrollWidth <= box.clientWidth")


def test_the_axis_of_one_epoch_starts_at_0_and_ends_after_it(opened):
    page = opened("once")
    training = figure(page, "along training")
    plot = training.locator(".canvas svg").first
    (point,) = training.locator(".panels .point").all()
    ticks = training.locator("text.tick[text-anchor=middle]").all_text_contents()
    assert float(ticks[0]) == 0 and float(ticks[-1]) == 1
    left, mark = plot.bounding_box(), point.bounding_box()
    assert left["x"] + left["width"] - mark["x"] - mark["width"] < 40  # no empty third
    assert mark["width"] > 6  # and not cut


@pytest.mark.parametrize("name", ["demo", "experiment", "hostile", "many"])
def test_a_phone_scrolls_tables_not_the_page(opened, name):
    page = opened(name, width=375)
    page.evaluate("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    for table in page.locator(".scroll").all():
        assert table.bounding_box()["width"] <= 375
    if name == "demo":
        assert page.locator(".scroll").first.evaluate("box => box.scrollWidth > box.clientWidth")


def test_names_of_norms_fit_their_boxes(opened):
    page = opened()
    for norm in page.locator(".wiring").first.locator("g").all():
        ((left, right, _, _),) = boxes(norm, "rect")
        ((start, end, _, _),) = boxes(norm, "text")
        assert left <= start and end <= right


def test_a_plot_follows_the_width_of_the_window(opened):
    page = opened()
    plot = page.locator("figure .canvas svg").first
    wide = plot.bounding_box()["width"]
    page.set_viewport_size({"width": 500, "height": 900})
    page.wait_for_function("wide => document.querySelector('figure .canvas svg').clientWidth !== wide", arg=round(wide))
    assert page.evaluate("document.documentElement.scrollWidth") <= 500


def test_dark_follows_the_system_and_the_button(opened):
    page = opened(color_scheme="dark")

    def ground() -> int:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        return sum(colour)

    def cell() -> list[int]:
        return page.locator("canvas.cells").first.evaluate("c => [...c.getContext('2d').getImageData(0, 0, 1, 1).data]")

    dark, dark_cell = ground(), cell()
    assert dark < 150
    page.locator("#theme").click()
    assert ground() > 600 and cell() != dark_cell
    page.reload()  # the choice is remembered
    assert ground() > 600


def test_what_records_say_is_shown_and_never_run(opened):
    page = opened("hostile")
    assert page.evaluate("window.pwned") is None
    assert page.locator("img").count() == 0
    assert page.locator("h1").inner_text() == HOSTILE
    assert page.locator("table").first.locator("th").first.inner_text().startswith(HOSTILE)
    assert figure(page, HOSTILE).locator(".legend button").inner_text() == HOSTILE
