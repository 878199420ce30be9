// Maps side by side on one colour scale; pointing at a cell reads the same cell in all of them.
function unpack(text, count) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Array.from({ length: count }, (_, i) => {
    const value = view.getInt16(2 * i, true);
    return value === -32768 ? null : value / 1000;
  });
}

/** A function from 0 … 1 to [red, green, blue]. */
function colourScale(diverging) {
  const stops = [0, 1, 2].map((i) => shade(`--${diverging ? "diverging" : "sequential"}-${i}`));
  return (share) => {
    const place = clamp(share, 0, 1) * 2;
    const i = Math.min(1, Math.floor(place));
    return stops[i].map((low, k) => low + (stops[i + 1][k] - low) * (place - i));
  };
}

function drawHeatmap(nodes, chart) {
  const colour = colourScale(chart.diverging);
  const missing = shade("--line");
  const share = (value) => (value - chart.low) / (chart.high - chart.low);
  const wide = Math.max(...chart.panels.flatMap((panel) => panel.rows).map((words) => words.length));
  const left = clamp(wide * 6.4 + 30, 44, 130);
  const maps = chart.panels.map((panel) => unpack(panel.packed, panel.rows.length * panel.columns.length));

  chart.panels.forEach((panel, place) => {
    const [rows, columns] = [panel.rows.length, panel.columns.length];
    const label = `${panel.title} ${chart.value}, ${chart.y} by ${chart.x}. Arrow keys read the values.`;
    const plot = frame(nodes[place], { height: clamp(rows * 18, 60, 230), left, label });
    const x = linear(0, columns, 0, plot.width);
    const y = linear(0, rows, 0, plot.height);
    const wanted = linear(panel.columns[0], panel.columns[columns - 1], 0.5, columns - 0.5);
    axisX(plot, columns > 1 ? wanted.ticks(clamp(plot.width / 45, 3, 5)).map(([v, words]) => [wanted(v), words]) : [], x, chart.x, { grid: false });
    const every = Math.ceil((rows * 17) / plot.height);
    axisY(plot, panel.rows.map((words, i) => [i + 0.5, words.length > 17 ? `…${words.slice(-16)}` : words]).filter((_, i) => i % every === 0), y, chart.y, { grid: false });

    const picture = make("canvas", { width: columns, height: rows, class: "cells" });
    picture.style.cssText = `left:${plot.left}px;top:${plot.top}px;width:${plot.width}px;height:${plot.height}px`;
    const pixels = new ImageData(columns, rows);
    maps[place].forEach((value, i) => pixels.data.set([...(value === null ? missing : colour(share(value))), 255], 4 * i));
    picture.getContext("2d").putImageData(pixels, 0, 0);
    plot.canvas.prepend(picture);
    const box = shape(plot.area, "rect", { class: "ring", visibility: "hidden", width: x(1), height: y(1) });

    let [row, column] = [0, -1];
    const read = (r, c, aloud) => {
      [row, column] = [clamp(r, 0, rows - 1), clamp(c, 0, columns - 1)];
      box.setAttribute("x", x(column));
      box.setAttribute("y", y(row));
      box.setAttribute("visibility", "visible");
      const lines = chart.panels.map((other, i) => {
        const there = other.rows.indexOf(panel.rows[row]);
        const here = other.columns.indexOf(panel.columns[column]);
        if (there < 0 || here < 0) return null;
        return { label: other.title, value: format(maps[i][there * other.columns.length + here], 3), muted: i !== place };
      }).filter(Boolean);
      tip.show(...inWindow(plot, x(column + 0.5), y(row + 0.5)),
        `${chart.y} ${panel.rows[row]}, ${chart.x} ${format(panel.columns[column], Number.isInteger(panel.columns[column]) ? 0 : 2)}`, lines, aloud);
    };
    pointing(plot, {
      point: (px, py) => read(Math.floor(y.invert(py)), Math.floor(x.invert(px)), false),
      move: (key) => read(row + (key === "ArrowDown") - (key === "ArrowUp"), column + (key === "ArrowRight") - (key === "ArrowLeft"), true),
      leave: () => { box.setAttribute("visibility", "hidden"); tip.hide(); },
    });
  });
}

function colourBar(chart) {
  const colour = colourScale(chart.diverging);
  const strip = make("canvas", { width: 96, height: 1, class: "strip" });
  const pixels = new ImageData(96, 1);
  for (let i = 0; i < 96; i++) pixels.data.set([...colour(i / 95), 255], 4 * i);
  strip.getContext("2d").putImageData(pixels, 0, 0);
  const ends = chart.diverging
    ? [`≤ ${format(chart.low, 2)}`, `≥ +${format(chart.high, 2)}`]
    : [format(chart.low, 1), format(chart.high, 1)];
  return make("span", { class: "scale" }, `${chart.value} `, ends[0], strip, ends[1]);
}
