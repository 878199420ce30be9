// Lines with a band of one standard deviation, or points with whiskers. All lines are read together, at one place.
function drawCurves(nodes, chart, view) {
  const across = chart.across[view.across] ?? chart.across[0];
  const at = (series) => series.at[chart.across.indexOf(across)];
  const up = chart.up[view.up] ?? chart.up[0];
  const cut = up !== chart.up[0];

  chart.panels.forEach((panel, index) => {
    const shown = panel.series.filter((series) => !view.hidden.has(series.label));
    const bottom = across.turned ? 38 + 0.87 * ticksWidth(across) : 40;
    const plot = frame(nodes[index], { height: 220, left: Math.max(52, 28 + ticksWidth(up)), label: panel.spoken, bottom });
    const x = scaleOf(across, 0, plot.width);
    const y = scaleOf(up, plot.height, 0);
    axisY(plot, up, y);
    axisX(plot, across, x, { grid: false });
    // A close-up cuts lines at its edges. The whole range cuts nothing, not even half a marker.
    const inside = shape(plot.area, "svg", { width: plot.width, height: plot.height, class: cut ? "inside" : "whole" });
    const placed = (series, i) => x(across.places[at(series)[i]] + (series.shift ?? 0));
    for (const series of shown) drawLine(inside, series, (i) => placed(series, i), y, chart.whiskers);
    const rule = shape(plot.area, "line", { y1: 0, y2: plot.height, class: "rule", visibility: "hidden" });
    const dots = shape(plot.area, "g");

    const all = [...new Set(shown.flatMap(at))].sort((a, b) => a - b);
    reading(plot, all.length, {
      nearest: (px) => closest(all, (place) => Math.abs(x(across.places[place]) - px)),
      read: (rank, height) => {
        const here = x(across.places[all[rank]]);
        const found = shown.map((series) => [series, at(series).indexOf(all[rank])]).filter(([, i]) => i >= 0);
        found.sort(([a, i], [b, j]) => b.y[j] - a.y[i]);
        rule.setAttribute("x1", here);
        rule.setAttribute("x2", here);
        rule.setAttribute("visibility", "visible");
        dots.replaceChildren();
        for (const [series, i] of found) {
          const cy = clamp(y(series.y[i]), 0, plot.height);
          shape(dots, "circle", { cx: placed(series, i), cy, r: 3.5, class: `dot ${look(series.colour).classes}` });
        }
        return {
          x: here,
          y: height ?? plot.height / 2,
          title: [panel.title, across.names[all[rank]]].filter(Boolean).join(" · "),
          rows: found.map(([series, i]) => ({ label: series.label, colour: series.colour, value: series.text[i] })),
        };
      },
      leave: () => { rule.setAttribute("visibility", "hidden"); dots.replaceChildren(); },
    });
  });
}

function drawLine(parent, series, placed, y, whiskers) {
  const { classes, dash, marker: kind } = look(series.colour);
  const group = shape(parent, "g", { class: classes });
  const joined = (values) => values.map((value, i) => `${placed(i).toFixed(1)},${y(value).toFixed(1)}`);
  if (series.low && whiskers) {
    series.low.forEach((low, i) => {
      if (low < series.high[i]) shape(group, "line", { x1: placed(i), x2: placed(i), y1: y(low), y2: y(series.high[i]), class: "whisker" });
    });
  } else if (series.low) {
    shape(group, "polygon", { points: [...joined(series.high), ...joined(series.low).reverse()].join(" "), class: "band" });
  }
  shape(group, "polyline", { points: joined(series.y).join(" "), class: "line", "stroke-dasharray": dash });
  if (series.marked) series.y.forEach((value, i) => marker(group, kind, placed(i), y(value), 3.4, { class: "point" }));
}
