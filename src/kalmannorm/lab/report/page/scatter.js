// One point per channel, with the line on which prior and observation agree.
function drawScatter(nodes, chart) {
  chart.panels.forEach((panel, index) => {
    const label = `${panel.y_label} over ${panel.x_label}, ${panel.x.length} channels. Arrow keys read the values.`;
    const plot = frame(nodes[index], { height: 270, left: 54, label });
    const scale = panel.log ? logarithmic : linear;
    const [low, high] = extent([...panel.x, ...panel.y], panel.log);
    const x = scale(low, high, 0, plot.width);
    const y = scale(low, high, plot.height, 0);
    axisY(plot, y.ticks(5), y, panel.y_label);
    axisX(plot, x.ticks(Math.min(5, plot.width / 60)), x, panel.x_label);
    shape(plot.area, "line", { x1: x(low), y1: y(low), x2: x(high), y2: y(high), class: "rule" });
    const group = shape(plot.area, "g", { class: look(chart.colour).classes });
    panel.x.forEach((value, i) => shape(group, "circle", { cx: x(value), cy: y(panel.y[i]), r: 3, class: "spot" }));
    const ring = shape(plot.area, "circle", { r: 6, class: "ring", visibility: "hidden" });
    const order = panel.x.map((value, i) => i).sort((a, b) => panel.x[a] - panel.x[b]);
    let current = -1;
    const read = (rank, aloud) => {
      current = clamp(rank, 0, order.length - 1);
      const i = order[current];
      const [px, py] = [x(panel.x[i]), y(panel.y[i])];
      ring.setAttribute("cx", px);
      ring.setAttribute("cy", py);
      ring.setAttribute("visibility", "visible");
      tip.show(...inWindow(plot, px, py), `channel ${panel.channels[i]}`, [
        { label: panel.x_label, value: format(panel.x[i]) },
        { label: panel.y_label, value: format(panel.y[i]) },
      ], aloud);
    };
    pointing(plot, {
      point: (px, py) => {
        const far = (i) => (x(panel.x[i]) - px) ** 2 + (y(panel.y[i]) - py) ** 2;
        read(order.reduce((best, i, place) => (far(i) < far(order[best]) ? place : best), 0), false);
      },
      move: (key) => read(current + (key === "ArrowRight" || key === "ArrowDown" ? 1 : -1), true),
      leave: () => { ring.setAttribute("visibility", "hidden"); tip.hide(); },
    });
  });
}
