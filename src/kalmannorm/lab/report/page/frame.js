// Parts that all plots share: panels, axes, and a reader for mouse, finger and keys.

/** A row of empty panels. All exist before any is measured, and the lines are about equally full. */
function lay(host, panels, least) {
  const fit = Math.max(1, Math.floor((host.clientWidth + 20) / (least + 20)));
  const lines = Math.ceil(panels.length / fit);
  host.style.gridTemplateColumns = `repeat(${Math.ceil(panels.length / lines)}, minmax(0, 1fr))`;
  const nodes = panels.map((panel) => make("div", { class: "panel" }, ...(panel.title ? [make("h5", {}, panel.title)] : [])));
  host.replaceChildren(...nodes);
  return nodes;
}

/** An empty plot as wide as its panel: {canvas, svg, area, width, height, left, top}. Width and height are of the plot area. */
function frame(node, { height, left = 52, right = 12, top = 8, bottom = 40, label }) {
  const canvas = make("div", { class: "canvas", tabindex: "0", role: "img", "aria-label": label });
  node.append(canvas);
  node.style.setProperty("--left", `${left}px`);
  const whole = Math.max(200, Math.floor(canvas.clientWidth));
  const svg = shape(canvas, "svg", { width: whole, height: height + top + bottom, "aria-hidden": "true" });
  const area = shape(svg, "g", { transform: `translate(${left},${top})` });
  return { canvas, svg, area, width: whole - left - right, height, left, top };
}

function axisX(plot, axis, scale, { grid = true } = {}) {
  const group = shape(plot.area, "g", { class: "across" });
  for (const [x, words] of scale.ticks) {
    if (grid) shape(group, "line", { x1: x, x2: x, y1: 0, y2: plot.height, class: "grid" });
    const place = axis.turned
      ? { transform: `translate(${x + 4},${plot.height + 10}) rotate(-60)`, "text-anchor": "end" }
      : { x, y: plot.height + 16, "text-anchor": "middle" };
    shape(group, "text", { ...place, class: "tick" }, words);
  }
  shape(group, "line", { x1: 0, x2: plot.width, y1: plot.height, y2: plot.height, class: "axis" });
  const below = Number(plot.svg.getAttribute("height")) - plot.top - 5;
  shape(group, "text", { x: plot.width / 2, y: below, "text-anchor": "middle", class: "label" }, axis.label);
}

function axisY(plot, axis, scale, { grid = true } = {}) {
  const group = shape(plot.area, "g", { class: "up" });
  for (const [y, words] of scale.ticks) {
    if (grid) shape(group, "line", { x1: 0, x2: plot.width, y1: y, y2: y, class: "grid" });
    shape(group, "text", { x: -7, y: y + 3.5, "text-anchor": "end", class: "tick" }, words);
  }
  const turned = `translate(${11 - plot.left},${plot.height / 2}) rotate(-90)`;
  shape(group, "text", { transform: turned, "text-anchor": "middle", class: "label" }, axis.label);
}

/**
 * Reads a plot with mouse, finger and keys. `nearest(x, y)` is the item at a place of the plot area, `read(item, y)` marks
 * it and returns {x, y, title, rows}, `leave()` removes the mark. Items of a map lie in lines of `across`.
 */
function reading(plot, count, { nearest, read, leave = () => {}, across = 1 }) {
  let current = -1;
  const tell = (item, aloud, y = null) => {
    if (!count) return;
    current = clamp(item, 0, count - 1);
    const found = read(current, y);
    const box = plot.svg.getBoundingClientRect();
    tip.show(box.left + plot.left + found.x, box.top + plot.top + found.y, found.title, found.rows, aloud);
  };
  const point = (event) => {
    const box = plot.svg.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left - plot.left, event.clientY - box.top - plot.top];
    tell(nearest(x, y), false, y);
  };
  const end = () => { leave(); tip.hide(); };
  plot.canvas.addEventListener("pointermove", point);
  plot.canvas.addEventListener("pointerdown", point);
  plot.canvas.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") end(); });
  plot.canvas.addEventListener("blur", end);
  plot.canvas.addEventListener("keydown", (event) => {
    if (event.key === "Escape") end();
    const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across }[event.key];
    if (!move) return;
    event.preventDefault();
    const next = current < 0 ? 0 : current + move;
    const line = (item) => Math.floor(item / across);
    const leaves = next < 0 || next >= count || (across > 1 && Math.abs(move) === 1 && current >= 0 && line(next) !== line(current));
    tell(leaves ? current : next, true);
  });
}

/** The place of the item that is least far. */
function closest(items, far) {
  return items.reduce((best, item, i) => (far(item) < far(items[best]) ? i : best), 0);
}

function marker(parent, kind, x, y, size, attributes) {
  const s = size;
  if (kind === "circle") return shape(parent, "circle", { cx: x, cy: y, r: s, ...attributes });
  const points = {
    square: [[-s, -s], [s, -s], [s, s], [-s, s]],
    triangle: [[0, -s * 1.2], [s * 1.15, s * 0.9], [-s * 1.15, s * 0.9]],
    diamond: [[0, -s * 1.3], [s * 1.3, 0], [0, s * 1.3], [-s * 1.3, 0]],
  }[kind];
  return shape(parent, "polygon", { points: points.map(([a, b]) => `${x + a},${y + b}`).join(" "), ...attributes });
}
