// Maps side by side on one colour scale. Pointing at a cell reads the same cell in all of them.

/** The cells of a map, in thousandths; null where there is no number. */
function unpack(text, count) {
  const view = new DataView(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
  return Array.from({ length: count }, (_, i) => {
    const value = view.getInt16(2 * i, true);
    return value === -32768 ? null : value;
  });
}

/** Strings for 100,000 cells would make a large page. Only these numbers are therefore written by the script. */
function thousandths(value) {
  return value === null ? "–" : (value / 1000).toFixed(3).replace("-", "−");
}

/** A function from 0 … 1 to [red, green, blue]. */
function colourScale(name) {
  const stops = [0, 1, 2].map((i) => shade(`--${name}-${i}`));
  return (share) => {
    const place = clamp(share, 0, 1) * 2;
    const i = Math.min(1, Math.floor(place));
    return stops[i].map((low, k) => low + (stops[i + 1][k] - low) * (place - i));
  };
}

function drawHeatmap(nodes, chart) {
  const colour = colourScale(chart.colours);
  const missing = shade("--line");
  const share = scaleOf(chart.scale, 0, 1);
  const left = Math.max(44, ...chart.panels.map((panel) => 30 + ticksWidth(panel.down)));
  const maps = chart.panels.map((panel) => unpack(panel.packed, panel.rows.length * panel.columns.length));

  chart.panels.forEach((panel, place) => {
    const { across, down } = panel;
    const [rows, columns] = [panel.rows.length, panel.columns.length];
    const plot = frame(nodes[place], { height: clamp(rows * 18, 60, 230), left, label: panel.spoken });
    const x = scaleOf(across, 0, plot.width);
    const y = scaleOf(down, 0, plot.height);
    axisX(plot, across, x, { grid: false });
    axisY(plot, down, y, { grid: false });

    const picture = make("canvas", { width: columns, height: rows, class: "cells" });
    picture.style.cssText = `left:${plot.left}px;top:${plot.top}px;width:${plot.width}px;height:${plot.height}px`;
    const pixels = new ImageData(columns, rows);
    maps[place].forEach((value, i) => pixels.data.set([...(value === null ? missing : colour(share(value / 1000))), 255], 4 * i));
    picture.getContext("2d").putImageData(pixels, 0, 0);
    plot.canvas.prepend(picture);
    const [wide, tall] = [plot.width / columns, plot.height / rows];
    const box = shape(plot.area, "rect", { class: "ring", visibility: "hidden", width: wide, height: tall });

    reading(plot, rows * columns, {
      across: columns,
      nearest: (px, py) => clamp(Math.floor(py / tall), 0, rows - 1) * columns + clamp(Math.floor(px / wide), 0, columns - 1),
      read: (cell) => {
        const [row, column] = [Math.floor(cell / columns), cell % columns];
        box.setAttribute("x", x(column) - wide / 2);
        box.setAttribute("y", y(row) - tall / 2);
        box.setAttribute("visibility", "visible");
        const lines = chart.panels.map((other, i) => {
          const there = other.rows.indexOf(panel.rows[row]);
          const here = other.columns.indexOf(panel.columns[column]);
          const value = there < 0 || here < 0 ? undefined : maps[i][there * other.columns.length + here];
          return value === undefined ? null : { label: other.title, value: thousandths(value), muted: i !== place };
        });
        const title = `${down.label} ${panel.rows[row]}, ${across.label} ${panel.columns[column]}`;
        return { x: x(column), y: y(row), title, rows: lines.filter(Boolean) };
      },
      leave: () => box.setAttribute("visibility", "hidden"),
    });
  });
}

function colourBar(chart) {
  const colour = colourScale(chart.colours);
  const strip = make("canvas", { width: 96, height: 1, class: "strip" });
  const pixels = new ImageData(96, 1);
  for (let i = 0; i < 96; i++) pixels.data.set([...colour(i / 95), 255], 4 * i);
  strip.getContext("2d").putImageData(pixels, 0, 0);
  const words = make("span", { class: "marks" }, ...chart.scale.ticks.map(([, one]) => make("span", {}, one)));
  return make("span", { class: "scale" }, chart.scale.label, make("span", {}, strip, words));
}
