// Small helpers: elements, colours that follow the scheme, the tooltip.
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

/** The look of a series: {classes, dash, marker}. */
function look(colour) {
  const [classes, dash, marker] = DATA.looks[colour % DATA.looks.length];
  return { classes, dash, marker };
}

function clamp(value, low, high) {
  return Math.min(high, Math.max(low, value));
}

/** A custom property in the current scheme, as [red, green, blue]. */
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

  /** `rows` are {label, value, colour, muted}. The tooltip points at x and y, in the window. */
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
    this.node.style.left = `${left + scrollX}px`; // on the page, not in the window: it scrolls with its plot
    this.node.style.top = `${top + scrollY}px`;
    if (aloud) this.spoken.textContent = `${title}: ${rows.map((row) => `${row.label} ${row.value}`).join(", ")}`;
  },

  hide() {
    this.node.hidden = true;
  },
};
