// The start of the script: tables and figures are set up.
const DATA = JSON.parse(document.getElementById("data").textContent);
document.querySelectorAll("table.sortable").forEach(setUpTable);
document.querySelectorAll("[data-figure]").forEach((node) => setUp(node, DATA.figures[Number(node.dataset.figure)]));
document.addEventListener("pointerdown", (event) => { if (!event.target.closest(".canvas")) tip.hide(); });
document.documentElement.dataset.ready = "yes";
