// A figure: choices, legend, and the chart of the choice, which is drawn again when its width changes.
const LEAST = { curves: 270, bars: 300, scatter: 300, heatmap: 240 };
const DRAW = { curves: drawCurves, bars: drawBars, scatter: drawScatter, heatmap: drawHeatmap };

function setUp(node, figure) {
  const view = { hidden: new Set(), across: 0, up: 0, chosen: [...figure.charts[figure.start].for] };
  const host = node.querySelector(".plot");
  const controls = make("div", { class: "controls" });
  const panels = make("div", { class: "panels" });
  const legend = make("div", { class: "legend" });
  const note = make("p", { class: "note" });
  host.append(controls, legend, panels, note);

  /** The chart of the choices. If it does not exist, the one that keeps the first choices. */
  const chart = () => {
    const agree = (one) => one.for.reduce((sum, value, i) => sum + (value === view.chosen[i] ? 2 ** (9 - i) : 0), 0);
    return figure.charts.reduce((best, one) => (agree(one) > agree(best) ? one : best));
  };
  const draw = () => {
    const current = chart();
    view.chosen = [...current.for];
    tip.hide();
    note.textContent = current.note ?? "";
    link(node, current.file);
    DRAW[current.kind](lay(panels, current.panels, LEAST[current.kind]), current, view);
  };
  const rebuild = () => {
    const focused = document.activeElement?.dataset?.key;
    buildControls(controls, figure, view, chart(), rebuild);
    buildLegend(legend, chart(), view, rebuild);
    draw();
    if (focused) node.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  };
  rebuild();
  let width = panels.clientWidth;
  new ResizeObserver(() => {
    if (panels.clientWidth === width) return;
    width = panels.clientWidth;
    draw();
  }).observe(panels);
  document.addEventListener("schemechange", rebuild);
}

function buildControls(node, figure, view, current, changed) {
  node.replaceChildren();
  figure.choices.forEach((name, i) => {
    // A later choice has only the values that exist with the earlier ones.
    const open = figure.charts.filter((chart) => chart.for.slice(0, i).every((value, k) => value === current.for[k]));
    const values = [...new Set(open.map((chart) => chart.for[i]))];
    if (values.length < 2) return;
    const choose = (value) => { view.chosen[i] = value; changed(); };
    node.append(chooser(name, values, current.for[i], choose));
  });
  if (current.kind === "curves") {
    const pick = (name, key, values) => {
      const chosen = values[view[key]] ?? values[0];
      if (values.length > 1) node.append(chooser(name, values, chosen, (value) => { view[key] = values.indexOf(value); changed(); }));
    };
    pick("Against", "across", current.across.map((axis) => axis.label));
    pick("Range", "up", current.up.map((axis) => axis.name));
  }
  node.hidden = !node.children.length;
}

/** The links lead to the image files of the shown chart. Some charts have no image. */
function link(node, file) {
  for (const one of node.querySelectorAll("a[data-kind]")) {
    one.hidden = !file;
    if (file) one.setAttribute("href", `${one.dataset.folder}/${file}.${one.dataset.kind}`);
  }
}

/** Buttons side by side for a few short values, a list for many. */
function chooser(name, values, chosen, choose) {
  const group = make("div", { class: "chooser" }, make("span", { class: "name" }, name));
  if (values.length <= 4 && values.join("").length < 40) {
    const row = make("div", { class: "segments", role: "group", "aria-label": name });
    for (const value of values) {
      const button = make("button", { type: "button", "aria-pressed": String(value === chosen), "data-key": `${name}=${value}` }, value);
      button.addEventListener("click", () => choose(value));
      row.append(button);
    }
    group.append(row);
  } else {
    const list = make("select", { "aria-label": name, "data-key": name });
    for (const value of values) list.append(make("option", { value }, value));
    list.value = chosen;
    list.addEventListener("change", () => choose(list.value));
    group.append(list);
  }
  return group;
}

function buildLegend(node, chart, view, changed) {
  node.replaceChildren();
  if (chart.kind === "heatmap") node.append(colourBar(chart));
  if (chart.kind !== "curves") return;
  for (const [label, colour, marked] of chart.legend) {
    const { classes, dash, marker: kind } = look(colour);
    const sample = document.createElementNS(SVG, "svg");
    sample.setAttribute("width", 22);
    sample.setAttribute("height", 10);
    sample.setAttribute("aria-hidden", "true");
    shape(sample, "line", { x1: 0, x2: 22, y1: 5, y2: 5, class: "line", "stroke-dasharray": dash });
    if (marked) marker(sample, kind, 11, 5, 3.2, { class: "point" });
    const button = make("button", {
      type: "button", class: classes, "aria-pressed": String(!view.hidden.has(label)),
      "data-key": `legend=${label}`, title: "Show or hide",
    }, sample, label);
    button.addEventListener("click", () => {
      view.hidden.has(label) ? view.hidden.delete(label) : view.hidden.add(label);
      changed();
    });
    node.append(button);
  }
}
