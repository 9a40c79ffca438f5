// What tests/test_compare.py does in the report's page; the title says what it found.
const tell = (what) => document.title += " | " + what;
window.onerror = (message) => tell("ERROR " + message);
const rows = () => [...document.querySelector("table.settings tbody").rows];
const names = () => rows().map(row => row.querySelector("summary").textContent).join(", ");
const head = document.querySelectorAll("table.settings th button")[2];
tell(rows().length + " rows");
head.click(); head.click();
tell("sorted by ratio: " + names());
head.click();
tell("back: " + names());
filter.value = "nothing has this"; filter.dispatchEvent(new Event("input"));
tell("filtered: " + rows().filter(row => !row.hidden).length + " of " + rows().length);
