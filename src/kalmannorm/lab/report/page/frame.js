// What every plot has: its place, axes, and a way to point at it with mouse, finger or keys.

/** A row of empty panels, all there before any is measured; as many in a line as leave the last line full. */
function lay(host, panels, least) {
  const fit = Math.max(1, Math.floor((host.clientWidth + 20) / (least + 20)));
  const lines = Math.ceil(panels.length / fit);
  host.style.gridTemplateColumns = `repeat(${Math.ceil(panels.length / lines)}, minmax(0, 1fr))`;
  const nodes = panels.map((panel) => make("div", { class: "panel" }, ...(panel.title ? [make("h5", {}, panel.title)] : [])));
  host.replaceChildren(...nodes);
  return nodes;
}

/** An empty plot of the panel's width: {svg, area, width, height, left, top}; width and height are of the plot area. */
function frame(node, { height, left = 52, right = 12, top = 8, bottom = 40, label }) {
  const canvas = make("div", { class: "canvas", tabindex: "0", role: "img", "aria-label": label });
  node.append(canvas);
  node.style.setProperty("--left", `${left}px`);
  const whole = Math.max(200, Math.floor(canvas.clientWidth));
  const svg = shape(canvas, "svg", { width: whole, height: height + top + bottom, "aria-hidden": "true" });
  const area = shape(svg, "g", { transform: `translate(${left},${top})` });
  return { canvas, svg, area, width: whole - left - right, height, left, top };
}

function axisX(plot, ticks, scale, label, { slanted = false, grid = true } = {}) {
  for (const [value, words] of ticks) {
    const x = scale(value);
    if (grid) shape(plot.area, "line", { x1: x, x2: x, y1: 0, y2: plot.height, class: "grid" });
    const place = slanted
      ? { transform: `translate(${x + 4},${plot.height + 12}) rotate(-40)`, "text-anchor": "end" }
      : { x, y: plot.height + 16, "text-anchor": "middle" };
    shape(plot.area, "text", { ...place, class: "tick" }, words);
  }
  shape(plot.area, "line", { x1: 0, x2: plot.width, y1: plot.height, y2: plot.height, class: "axis" });
  const below = Number(plot.svg.getAttribute("height")) - plot.top - 5;
  shape(plot.area, "text", { x: plot.width / 2, y: below, "text-anchor": "middle", class: "label" }, label);
}

function axisY(plot, ticks, scale, label, { grid = true } = {}) {
  for (const [value, words] of ticks) {
    const y = scale(value);
    if (grid) shape(plot.area, "line", { x1: 0, x2: plot.width, y1: y, y2: y, class: "grid" });
    shape(plot.area, "text", { x: -7, y: y + 3.5, "text-anchor": "end", class: "tick" }, words);
  }
  const turned = `translate(${11 - plot.left},${plot.height / 2}) rotate(-90)`;
  if (label) shape(plot.area, "text", { transform: turned, "text-anchor": "middle", class: "label" }, label);
}

/** point(x, y, aloud) is called with a place in the plot area; move(key) with an arrow key; leave() when it ends. */
function pointing(plot, { point, move, leave }) {
  const at = (event) => {
    const box = plot.svg.getBoundingClientRect();
    point(event.clientX - box.left - plot.left, event.clientY - box.top - plot.top, false);
  };
  plot.canvas.addEventListener("pointermove", at);
  plot.canvas.addEventListener("pointerdown", at);
  plot.canvas.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") leave(); });
  plot.canvas.addEventListener("blur", leave);
  plot.canvas.addEventListener("keydown", (event) => {
    if (event.key === "Escape") leave();
    if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
    move(event.key);
  });
}

/** Where in the window a place of the plot area is. */
function inWindow(plot, x, y) {
  const box = plot.svg.getBoundingClientRect();
  return [box.left + plot.left + x, box.top + plot.top + y];
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
