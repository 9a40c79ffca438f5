// Filters and sorts the tables of the report, which is complete without it.
"use strict";
const filter = document.getElementById("filter");
const tables = [...document.querySelectorAll("table.settings")];

function hideOthers(table) {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of table.tBodies[0].rows) {
    const reference = row.classList.contains("reference");
    row.hidden = !reference && !words.every(word => row.dataset.text.includes(word));
  }
}

function sort(table, column) {
  const heads = [...table.tHead.rows[0].cells], head = heads[column];
  const words = head.classList.contains("text");
  const up = head.ariaSort ? head.ariaSort === "descending" : words;
  heads.forEach(each => { each.ariaSort = null; });
  head.ariaSort = up ? "ascending" : "descending";
  const value = row => row.cells[column].dataset.value;
  const rows = [...table.tBodies[0].rows].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (!x || !y) return Boolean(y) - Boolean(x);  // what is unknown stays last
    return (up ? 1 : -1) * (words ? x.localeCompare(y, "en", {numeric: true}) : x - y);
  });
  table.tBodies[0].append(...rows);
}

for (const table of tables) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.firstChild.addEventListener("click", () => sort(table, column));
  });
  hideOthers(table);
}
filter.addEventListener("input", () => tables.forEach(hideOthers));
