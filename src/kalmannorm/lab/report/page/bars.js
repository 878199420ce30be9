// Horizontal bars with their values beside them.
function drawBars(nodes, chart) {
  const all = chart.panels.flatMap((panel) => panel.bars);
  const wide = wordsWidth(all.map((bar) => bar.label));
  const above = wide > 130; // a long name stands above its bar, not beside it
  const [left, row, down] = above ? [2, 42, 20] : [Math.max(40, wide + 16), 24, 3];
  const right = wordsWidth(all.map((bar) => bar.text)) + 12;
  chart.panels.forEach((panel, index) => {
    const plot = frame(nodes[index], { height: panel.bars.length * row + 2, left, right, bottom: 6, label: panel.spoken });
    const x = scaleOf(chart.across, 0, plot.width);
    panel.bars.forEach((bar, i) => {
      const y = i * row + down;
      const [low, high] = bar.reach.map(x);
      const group = shape(plot.area, "g", { class: look(bar.colour).classes });
      const place = above ? { x: 0, y: y - 5 } : { x: -8, y: y + 11.5, "text-anchor": "end" };
      shape(group, "text", { ...place, class: "tick" }, bar.label);
      shape(group, "rect", { x: 0, y, width: Math.max(1, x(bar.value)), height: 14, rx: 2, class: "fill" });
      if (low < high) shape(group, "line", { x1: low, x2: high, y1: y + 7, y2: y + 7, class: "whisker ink" });
      shape(group, "text", { x: high + 6, y: y + 11, class: "value" }, bar.text);
    });
    shape(plot.area, "line", { x1: 0, x2: 0, y1: 0, y2: plot.height, class: "axis" });
    reading(plot, panel.bars.length, {
      nearest: (px, py) => Math.floor(py / row),
      read: (place) => {
        const bar = panel.bars[place];
        const rows = bar.read.map(([label, value], i) => (i ? { label, value, muted: true } : { label, value, colour: bar.colour }));
        return { x: x(bar.value) / 2, y: place * row + down + 7, title: bar.title, rows };
      },
    });
  });
}
