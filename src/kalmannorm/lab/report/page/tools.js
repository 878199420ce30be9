// Small helpers: elements, numbers as people write them, the tooltip, colours that follow the scheme.
const SVG = "http://www.w3.org/2000/svg";

function make(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

function shape(parent, name, attributes = {}, text = null) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  parent.append(node);
  return node;
}

/** How a series looks: {classes, dash, marker}. */
function look(colour) {
  const [classes, dash, marker] = DATA.looks[colour % DATA.looks.length];
  return { classes, dash, marker };
}

function decimals(value) {
  const size = Math.abs(value);
  if (size === 0 || size >= 1000) return 0;
  return size < 10 ? Math.max(0, Math.min(6, 2 - Math.floor(Math.log10(size)))) : 1;
}

function format(value, places = null) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value !== 0 && Math.abs(value) < 1e-4 && places === null) return value.toExponential(1).replace(/-/g, "−");
  const fixed = { minimumFractionDigits: places ?? decimals(value), maximumFractionDigits: places ?? decimals(value) };
  return (value + 0).toLocaleString("en", fixed).replace("-", "−");
}

/** Decimals by the spread, as the tables have it: the first at which it is seen, one at least. */
function placesOf(mean, std) {
  const size = Math.abs(mean);
  if (size >= 1000) return 0;
  if (std) return [1, 2, 3, 4, 5].find((places) => std * 10 ** places >= 0.5) ?? 6;
  return size >= 1 || size === 0 ? 1 : Math.min(6, 1 - Math.floor(Math.log10(size)));
}

function plusMinus(mean, std) {
  const places = placesOf(mean, std);
  return format(mean, places) + (std === null || std === undefined ? "" : ` ± ${format(std, places)}`);
}

function clamp(value, low, high) {
  return Math.min(high, Math.max(low, value));
}

/** The scheme's value of a custom property as [red, green, blue]. */
function shade(property) {
  const probe = make("span", { hidden: "" });
  document.body.append(probe);
  probe.style.color = `var(${property})`;
  const found = getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
  probe.remove();
  return found;
}

const tip = {
  node: document.getElementById("tip"),
  spoken: document.getElementById("spoken"),

  /** rows are {label, value, colour}; x and y are where it points, in the window. */
  show(x, y, title, rows, aloud = false) {
    const lines = rows.map((row) => make("div", { class: "row" + (row.muted ? " muted" : "") },
      make("span", { class: row.colour === undefined ? "swatch none" : `swatch ${look(row.colour).classes}` }),
      make("span", { class: "label" }, row.label), make("span", { class: "value" }, row.value)));
    this.node.replaceChildren(make("div", { class: "title" }, title), ...lines);
    this.node.hidden = false;
    const box = this.node.getBoundingClientRect();
    const right = x + 14 + box.width < document.documentElement.clientWidth - 4;
    const left = right ? x + 14 : Math.max(4, x - 14 - box.width);
    const top = clamp(y - box.height / 2, 4, Math.max(4, innerHeight - box.height - 4));
    this.node.style.left = `${left + scrollX}px`; // on the page, not the window: it stays with its plot
    this.node.style.top = `${top + scrollY}px`;
    if (aloud) this.spoken.textContent = `${title}: ${rows.map((row) => `${row.label} ${row.value}`).join(", ")}`;
  },

  hide() {
    this.node.hidden = true;
  },
};
