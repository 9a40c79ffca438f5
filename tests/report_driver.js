// What tests/test_compare.py does in the report's page; the title says what it found.
const tell = (what) => document.title += " | " + what;
window.onerror = (message) => tell("ERROR " + message);
const cell = (row, n) => document.querySelectorAll("tbody tr")[row].cells[n].textContent;
tell(document.querySelectorAll("svg").length + " plots");
tell(cell(0, 0) + ": " + cell(0, 3) + " " + cell(0, 2));
document.querySelector("tbody tr button").click();
tell(document.querySelectorAll("td.runs div").length + " runs");
