// One point per channel, and the line on which prior and observation agree.
function drawScatter(nodes, chart) {
  chart.panels.forEach((panel, index) => {
    const { across } = panel;
    const up = { ...across, label: panel.up };
    const plot = frame(nodes[index], { height: 270, left: Math.max(54, 28 + ticksWidth(up)), label: panel.spoken });
    const x = scaleOf(across, 0, plot.width);
    const y = scaleOf(up, plot.height, 0);
    axisY(plot, up, y);
    axisX(plot, across, x);
    shape(plot.area, "line", { x1: x(across.low), y1: y(up.low), x2: x(across.high), y2: y(up.high), class: "rule" });
    const group = shape(plot.area, "g", { class: look(chart.colour).classes });
    const points = panel.x.map((value, i) => [x(value), y(panel.y[i])]);
    for (const [cx, cy] of points) shape(group, "circle", { cx, cy, r: 3, class: "spot" });
    const ring = shape(plot.area, "circle", { r: 6, class: "ring", visibility: "hidden" });
    reading(plot, points.length, {
      nearest: (px, py) => closest(points, ([cx, cy]) => (cx - px) ** 2 + (cy - py) ** 2),
      read: (i) => {
        const [cx, cy] = points[i];
        ring.setAttribute("cx", cx);
        ring.setAttribute("cy", cy);
        ring.setAttribute("visibility", "visible");
        const rows = [across, up].map((axis, k) => ({ label: axis.label, value: panel.text[i][k] }));
        return { x: cx, y: cy, title: `${panel.point} ${panel.channels[i]}`, rows };
      },
      leave: () => ring.setAttribute("visibility", "hidden"),
    });
  });
}
