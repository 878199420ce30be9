// Horizontal bars with their values written beside them.
function drawBars(nodes, chart, view) {
  const shown = (panel) => panel.bars.filter((bar) => !view.hidden.has(bar.label));
  const most = Math.max(...chart.panels.flatMap(shown).map((bar) => bar.value + (bar.std ?? 0)), 1e-9);
  const letters = Math.max(...chart.panels.flatMap((panel) => panel.bars).map((bar) => bar.label.length));
  const above = letters > 20; // a long name stands above its bar, not beside it
  const [left, row, down] = above ? [2, 42, 20] : [clamp(letters * 6.6 + 14, 40, 150), 24, 3];
  chart.panels.forEach((panel, index) => {
    const bars = shown(panel);
    const label = `${panel.title} ${chart.value}, bars. Arrow keys read the values.`;
    const plot = frame(nodes[index], { height: bars.length * row + 2, left, right: 74, bottom: 6, label });
    const x = linear(0, most, 0, plot.width);
    bars.forEach((bar, i) => {
      const y = i * row + down;
      const group = shape(plot.area, "g", { class: look(bar.colour).classes });
      const place = above ? { x: 0, y: y - 5 } : { x: -8, y: y + 11.5, "text-anchor": "end" };
      shape(group, "text", { ...place, class: "tick" }, bar.label);
      shape(group, "rect", { x: 0, y, width: Math.max(1, x(bar.value)), height: 14, rx: 2, class: "fill" });
      if (bar.std) shape(group, "line", { x1: x(Math.max(0, bar.value - bar.std)), x2: x(bar.value + bar.std), y1: y + 7, y2: y + 7, class: "whisker ink" });
      shape(group, "text", { x: x(bar.value + (bar.std ?? 0)) + 6, y: y + 11, class: "value" }, bar.text);
    });
    shape(plot.area, "line", { x1: 0, x2: 0, y1: 0, y2: plot.height, class: "axis" });
    let current = -1;
    const read = (place, aloud) => {
      current = clamp(place, 0, bars.length - 1);
      const bar = bars[current];
      if (!bar) return;
      const against = bars.find((other) => other.label === "BN");
      const rows = [{ label: chart.value, value: plusMinus(bar.value, bar.std), colour: bar.colour }];
      if (against && against !== bar) rows.push({ label: "ratio to BN", value: format(bar.value / against.value, 2), muted: true });
      rows.push({ label: "seeds", value: String(bar.n), muted: true });
      tip.show(...inWindow(plot, x(bar.value) / 2, current * row + down + 7), `${bar.label} · ${panel.title}`, rows, aloud);
    };
    pointing(plot, {
      point: (px, py) => read(Math.floor(py / row), false),
      move: (key) => read(current + (key === "ArrowDown" || key === "ArrowRight" ? 1 : -1), true),
      leave: () => tip.hide(),
    });
  });
}
