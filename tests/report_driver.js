// What tests/test_compare.py does in the report's page; the title says what it found.
const tell = (what) => document.title += " | " + what;
window.onerror = (message) => tell("ERROR " + message);
const rows = () => [...document.querySelector("table.settings tbody").rows];
const names = () => rows().map(row => row.cells[0].textContent).join(", ");
const head = document.querySelectorAll("table.settings th button")[2];
tell(rows().length + " rows");
head.click(); head.click();
tell("sorted by ratio: " + names());
head.click();
tell("back: " + names());
