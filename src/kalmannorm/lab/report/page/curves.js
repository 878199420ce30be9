// Lines with a band of one standard deviation; panels share the y axis; pointing reads all lines at one place.
function drawCurves(nodes, chart, view) {
  const shown = (panel) => panel.series.filter((series) => !view.hidden.has(series.label));
  const places = (series) => (view.steps && series.steps ? series.steps : series.x);
  const known = chart.panels.flatMap(shown);
  const close = view.close && chart.settle > 0;
  const tall = [];
  for (const series of known) {
    const start = series.x[0] + (close ? chart.settle : 0) * (series.x[series.x.length - 1] - series.x[0]);
    series.y.forEach((y, i) => { if (y !== null && series.x[i] >= start) tall.push(...reach(chart, y, series.std?.[i])); });
  }
  const [low, high] = extent(tall, chart.log, 0.05);
  const [first, last] = chart.ticks ? [-0.35, chart.ticks.length - 0.65] : [0, 1.02 * Math.max(0, ...known.flatMap(places)) || 1];
  const long = chart.ticks && Math.max(...chart.ticks.map((words) => words.length)) > 8;

  chart.panels.forEach((panel, index) => {
    const label = `${panel.title} ${chart.y}, lines over ${chart.x}. Arrow keys read the values.`;
    const plot = frame(nodes[index], { height: 220, label, bottom: long ? 92 : 40 });
    const x = linear(first, last, 0, plot.width);
    const y = (chart.log ? logarithmic : linear)(low, high, plot.height, 0);
    axisY(plot, y.ticks(5), y, chart.y);
    axisX(plot, chart.ticks ? named(chart.ticks, plot.width, long) : x.ticks(Math.min(6, plot.width / 50)), x,
      view.steps ? "step" : chart.x, { slanted: long, grid: false });
    // Only a close-up leaves something out, and cuts it; else nothing is cut, not even half a marker at the edge.
    const inside = shape(plot.area, "svg", { width: plot.width, height: plot.height, class: close ? "inside" : "whole" });
    const count = shown(panel).length;
    const beside = chart.aside ? Math.min(8, plot.width / chart.ticks.length / count) : 0;
    const across = new Map(shown(panel).map((series, i) => [series, (place) => x(place) + (i - (count - 1) / 2) * beside]));
    across.forEach((own, series) => drawLine(inside, series, places(series), own, y, chart));
    const rule = shape(plot.area, "line", { y1: 0, y2: plot.height, class: "rule", visibility: "hidden" });
    const dots = shape(plot.area, "g");

    const all = [...new Set(shown(panel).flatMap(places))].sort((a, b) => a - b);
    let current = -1;
    const read = (index, aloud, at = null) => {
      if (!all.length) return;
      current = clamp(index, 0, all.length - 1);
      const here = all[current];
      const rows = shown(panel).map((series) => [series, places(series).indexOf(here)])
        .filter(([series, i]) => i >= 0 && series.y[i] !== null)
        .sort(([a, i], [b, j]) => b.y[j] - a.y[i]);
      rule.setAttribute("x1", x(here));
      rule.setAttribute("x2", x(here));
      rule.setAttribute("visibility", "visible");
      dots.replaceChildren();
      for (const [series, i] of rows) {
        const up = clamp(y(series.y[i]), 0, plot.height);
        shape(dots, "circle", { cx: across.get(series)(here), cy: up, r: 3.5, class: `dot ${look(series.colour).classes}` });
      }
      const name = chart.ticks ? chart.ticks[here] : `${view.steps ? "step" : chart.x} ${format(here, Number.isInteger(here) ? 0 : 2)}`;
      tip.show(...inWindow(plot, x(here), at ?? plot.height / 2), [panel.title, name].filter(Boolean).join(" · "),
        rows.map(([series, i]) => ({
          label: series.label, colour: series.colour, value: plusMinus(series.y[i], series.std?.[i]),
        })), aloud);
    };
    pointing(plot, {
      point: (px, py) => {
        const wanted = x.invert(px);
        const nearest = all.reduce((best, place, i) => (Math.abs(place - wanted) < Math.abs(all[best] - wanted) ? i : best), 0);
        read(nearest, false, py);
      },
      move: (key) => read(current + (key === "ArrowRight" || key === "ArrowDown" ? 1 : -1), true),
      leave: () => { rule.setAttribute("visibility", "hidden"); dots.replaceChildren(); tip.hide(); },
    });
  });
}

/** Where a whisker or a band ends: within what the value can be, and above 0 on a logarithmic axis. */
function reach(chart, y, std) {
  const [least, most] = chart.bounds ?? [-Infinity, Infinity];
  const low = chart.log ? Math.max(y - (std ?? 0), y / 10) : y - (std ?? 0);
  return [Math.max(low, Math.min(y, least)), Math.min(y + (std ?? 0), Math.max(y, most))];
}

/** As many of the names as have room. */
function named(names, width, slanted) {
  const every = Math.max(1, Math.ceil((names.length * (slanted ? 20 : 44)) / width));
  return names.map((words, i) => [i, words.length > 16 ? `…${words.slice(-15)}` : words]).filter(([i]) => i % every === 0);
}

function drawLine(parent, series, places, x, y, chart) {
  const { classes, dash, marker: kind } = look(series.colour);
  const group = shape(parent, "g", { class: classes });
  const points = series.y.map((value, i) => (value === null ? null : [x(places[i]), value, ...reach(chart, value, series.std?.[i]).map(y)])).filter(Boolean);
  if (series.std && chart.aside) {
    for (const [px, , bottom, top] of points) {
      if (bottom !== top) shape(group, "line", { x1: px, x2: px, y1: bottom, y2: top, class: "whisker" });
    }
  }
  if (series.std && points.length > 1 && !chart.aside) {
    const upper = points.map(([px, , , top]) => `${px.toFixed(1)},${top.toFixed(1)}`);
    const lower = points.map(([px, , bottom]) => `${px.toFixed(1)},${bottom.toFixed(1)}`).reverse();
    shape(group, "polygon", { points: [...upper, ...lower].join(" "), class: "band" });
  }
  const path = points.map(([px, value]) => `${px.toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  shape(group, "polyline", { points: path, class: "line", "stroke-dasharray": dash });
  if (points.length === 1 || (chart.ticks && chart.ticks.length <= 40)) {
    for (const [px, value] of points) marker(group, kind, px, y(value), 3.4, { class: "point" });
  }
}
