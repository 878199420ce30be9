// Sorting: a click or Enter on a column head sorts by it, numbers from the largest. A second one reverses the order.
function setUpTable(table) {
  const body = table.tBodies[0];
  const heads = sortableHeads(table);
  heads.forEach(({ cell, button, column }) => button.addEventListener("click", () => {
    const rows = [...body.rows];
    const keys = new Map(rows.map((row) => [row, key(row.cells[column])]));
    const numeric = [...keys.values()].every((value) => value === null || typeof value === "number");
    const before = cell.getAttribute("aria-sort");
    const down = before ? before === "ascending" : numeric && column > 0;
    const sign = down ? -1 : 1;
    rows.sort((a, b) => {
      const [one, other] = [keys.get(a), keys.get(b)];
      if (one === null || other === null) return (one === null) - (other === null); // missing values stay last
      return sign * (numeric ? one - other : String(one).localeCompare(String(other), "en", { numeric: true }));
    });
    body.append(...rows);
    heads.forEach((other) => other.cell.removeAttribute("aria-sort"));
    cell.setAttribute("aria-sort", down ? "descending" : "ascending");
  }));
}

function key(cell) {
  const value = cell?.dataset.value;
  if (value === undefined || value === "" || value === "–") return null;
  return Number.isNaN(Number(value)) ? value : Number(value);
}

/** The heads with a button, and the column of each. Spans are counted. */
function sortableHeads(table) {
  const taken = [];
  const found = [];
  [...table.tHead.rows].forEach((row, y) => {
    let x = 0;
    for (const cell of row.cells) {
      while (taken[y]?.[x]) x++;
      for (let down = 0; down < cell.rowSpan; down++) {
        for (let over = 0; over < cell.colSpan; over++) (taken[y + down] ??= [])[x + over] = true;
      }
      const button = cell.querySelector("button.sort");
      if (button) found.push({ cell, button, column: x });
      x += cell.colSpan;
    }
  });
  return found;
}
